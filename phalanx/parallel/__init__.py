"""Spreading a model over ranks: mesh, groups, data, tensor, pipeline and context parallel. Applied from outside."""
