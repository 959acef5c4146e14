"""The public Python interface: what a notebook imports."""
