"""Phalanx: train large language models on one laptop core or on thousands of GPUs with the same code."""

__version__ = "0.1.0"
