"""A year of real faults, replayed in simulated time against the real decision function."""
