"""What `benchmarks/checkpoint_stall.py` runs in each of its processes."""
