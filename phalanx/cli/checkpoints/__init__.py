"""The commands of `phalanx checkpoint`, a module each; only those that look into tensors import torch."""
