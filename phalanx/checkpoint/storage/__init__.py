"""Where checkpoints lie: folders and object stores, which one is the latest, and which are kept."""
