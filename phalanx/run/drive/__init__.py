"""A driver's process: all parts joined for one job."""
