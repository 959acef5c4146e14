"""What ranks write: lines, rotated files, the pump between pipes and files, tails for heartbeats, and readers."""
