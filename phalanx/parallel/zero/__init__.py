"""Data parallelism: flat buckets of parameters and gradients, split and summed over ranks."""
