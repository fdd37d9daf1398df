"""Replicas: engines behind one seam, each with its own HTTP server and event stream."""
