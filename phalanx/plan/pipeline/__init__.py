"""How long one step takes in a pipeline: every schedule as an exact recurrence, closed forms, bounds."""
