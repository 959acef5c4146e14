"""Checkpoints of a training loop: when, in memory and on durable storage, and taking them up again."""
