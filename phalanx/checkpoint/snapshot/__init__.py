"""A rank's side of a snapshot: what it consists of and copying it while training goes on."""
