"""Training steps that `benchmarks/train_gpu.py` times, ours and those of peers, each in a process of its own."""
