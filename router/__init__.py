"""The ingress: tokenises once, decides which replica serves a request, and relays the bytes."""
