"""Weights that exist: to start from, to sample from, to convert."""
