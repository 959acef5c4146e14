"""From text to token files: one unit of work at a time, in as many processes as there are cores."""
