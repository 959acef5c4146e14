"""The random number generators of a process (torch, numpy, Python) as tensors of fixed shapes, and back."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def generator_tensors() -> dict[str, Tensor]:
    """The state of torch's generators (of the host, and of the present CUDA device), numpy's and Python's."""
    tensors = {"torch": torch.get_rng_state(), "python": _of_python()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    if _numpy_is_usual():
        tensors["numpy"] = _of_numpy()
    return tensors


def set_generators(tensors: Mapping[str, Tensor]) -> None:
    """Put generators into the states that `generator_tensors` gave; those without one stay as they are."""
    if "torch" in tensors:
        torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    if "python" in tensors:
        *state, has_gauss, gauss = tensors["python"].tolist()
        random.setstate((3, tuple(state), _float(gauss) if has_gauss else None))
    if "numpy" in tensors:
        *keys, position, has_gauss, gauss = tensors["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _float(gauss)))


def _of_python() -> Tensor:
    _, state, gauss = random.getstate()
    return torch.tensor([*state, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64)


def _of_numpy() -> Tensor:
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = state
    return torch.tensor([*keys.tolist(), position, has_gauss, _bits(gauss)], dtype=torch.int64)


def _numpy_is_usual() -> bool:
    state: Any = np.random.get_state(legacy=False)
    return bool(state["bit_generator"] == "MT19937")


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _float(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)
