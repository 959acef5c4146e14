"""What a run tells: on the terminal, in metrics, in profiles."""
