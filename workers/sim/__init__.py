"""A simulated engine: real queues, a real block cache and real events, with text and times from a model."""
