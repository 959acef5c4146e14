"""Ending processes for good: how they are held together, found, and killed. Torch-free, Linux."""
