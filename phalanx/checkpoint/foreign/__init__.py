"""Checkpoints for training loops that are not ours."""
