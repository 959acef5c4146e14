"""Wrong numbers in a parameter, without a word. Torch is reached through the optimizer's tensors."""

from __future__ import annotations

import random
import sys
from typing import Any

from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings
from phalanx.faults.torch_hooks import first_tensor

_INTEGERS = {2: "int16", 4: "int32", 8: "int64"}


def nan(order: Order, around: Surroundings) -> Act:
    """The first element of this rank's first parameter becomes NaN; after every step, for as long as it lasts."""
    tensor = _tensor(around)
    place = (0,) * tensor.ndim

    def act() -> None:
        tensor[place] = float("nan")

    return act


def corruption(order: Order, around: Surroundings) -> Act:
    """Bit ``bit`` (the highest of the mantissa) of element ``element`` (drawn) of the first parameter flips, once."""
    torch, tensor = sys.modules["torch"], _tensor(around)
    bits = 8 * tensor.element_size()
    if tensor.element_size() not in _INTEGERS:
        raise RefusedError(f"the first parameter has elements of {bits} bits")
    bit = int(order.settings.get("bit", {16: 6 if tensor.dtype == torch.bfloat16 else 9, 32: 22, 64: 51}[bits]))
    drawn = random.Random(around.seed * 1_000_003 + order.number).randrange(tensor.numel())
    element = int(order.settings.get("element", drawn))
    if not 0 <= bit < bits or not 0 <= element < tensor.numel():
        raise RefusedError(f"bit = {bit}, element = {element}: there are {bits} bits and {tensor.numel()} elements")
    mask = -(1 << bit) if bit == bits - 1 else 1 << bit
    place = _place(element, tuple(tensor.shape))
    flip = tensor[place].view(getattr(torch, _INTEGERS[tensor.element_size()])).bitwise_xor_

    def act() -> None:
        flip(mask)

    return act


def _tensor(around: Surroundings) -> Any:
    tensor = None if around.optimizer is None else first_tensor(around.optimizer)
    if tensor is None:
        raise RefusedError("no optimizer of torch has made a step, or it has no parameter here")
    return tensor


def _place(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of element `index`, in row-major order."""
    place: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tuple(place)
