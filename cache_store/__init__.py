"""KV chunks of the whole cluster: their keys, and the messages that say who holds them."""
