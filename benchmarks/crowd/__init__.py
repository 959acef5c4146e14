"""A crowd of emulated executors, and servers that hear them."""
