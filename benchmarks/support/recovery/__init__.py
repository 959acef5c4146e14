"""Runs of the real command that lose something, and how long they take to go on."""
