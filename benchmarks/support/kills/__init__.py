"""Killing the processes of a run that takes checkpoints, again and again, and seeing that nothing is lost."""
