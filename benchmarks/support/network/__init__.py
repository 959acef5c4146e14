"""What networks come to rest at, in closed form: the simulation is held against it."""
