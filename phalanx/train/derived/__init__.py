"""What follows from a config before anything is made: sizes, layout, memory."""
