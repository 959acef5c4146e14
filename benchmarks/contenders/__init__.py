"""Training loops that `benchmarks/train_cpu.py` times, each run in a process of its own: see `__main__`."""
