"""Watching a run from outside its ranks: alerts and what Prometheus reads. Nothing here imports torch."""
