"""What the network between hosts does to a step: a fluid model of a CLOS fabric, flow level, without packets."""
