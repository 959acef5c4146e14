"""Decisions: when a checkpoint is due, and which are kept. Pure and torch-free."""
