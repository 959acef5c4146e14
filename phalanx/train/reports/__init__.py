"""What a run reports: on the terminal, in metrics, in profiles, to callbacks."""
