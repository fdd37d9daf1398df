"""Wires the parts together: configuration, Serve application and command line."""
