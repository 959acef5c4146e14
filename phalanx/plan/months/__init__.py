"""Months in a minute: what failures, checkpoints and spares make of a run's time. Torch-free."""
