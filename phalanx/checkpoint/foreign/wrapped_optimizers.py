"""What optimizers keep elsewhere than in ``state``: in optimizers inside them, in a format of their own, in attributes.

Wrappers (SAM, Lookahead, schedule-free, ZeroRedundancyOptimizer) do so; a plain optimizer of torch is one part without
attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.foreign.named_state import flatten, require_savable
from phalanx.core.errors import UserError

# Of every optimizer of torch, and what its schedulers put there.
_OF_TORCH = frozenset(
    ("state", "param_groups", "defaults", "step", "_opt_called", "_warned_capturable_if_run_uncaptured")
)
_DEPTH = 3


def parts(key: str, optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizer and those inside it, by name: ``optimizer``, ``optimizer.base_optimizer``."""
    found: dict[str, Optimizer] = {}
    own: list[str] = []  # whose own format holds what is inside
    for path, each in _family(key, optimizer):
        if not path.startswith(tuple(own)):
            found[path] = each
            if own_state(each) is not None:
                own.append(f"{path}.")
    return found


def holders(members: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Of `parts`, those that have a state, each under the name of the first that gives it for its own."""
    found: dict[str, Optimizer] = {}
    for path, each in members.items():
        name = next((name for name, other in found.items() if other.state is each.state), path)
        if name == path or "state" in vars(each):
            found[name] = each
    return found


def _family(path: str, optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """The optimizer and all that are inside it, each once, after what it is in."""
    found = [(path, optimizer)]
    for outer, each in found:  # which grows
        found += [(p, o) for p, o in _inside(outer, each) if all(o is not other for _, other in found)]
    return found


def _inside(path: str, optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Those that are attributes of it, or in lists, tuples and dicts that are."""
    found = []
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            found.append((f"{path}.{name}", value))
        elif isinstance(value, list | tuple | dict) and name not in _OF_TORCH:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found += [(f"{path}.{name}.{each}", item) for each, item in items if isinstance(item, Optimizer)]
    return found


def watched(optimizer: Optimizer) -> list[Optimizer]:
    """Those that call hooks in `step`: it, or those inside where it was made without `Optimizer.__init__`."""
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return [optimizer]
    return [each for _, inner in _inside("", optimizer) for each in watched(inner)]


def own_state(optimizer: Optimizer) -> dict[str, Any] | None:
    """What its own `state_dict` gives, where that is more than the state of optimizers that are seen; else None."""
    kind = type(optimizer)
    if kind.state_dict is Optimizer.state_dict or _is_zero(optimizer):
        return None
    try:
        given = optimizer.state_dict()
        flatten(given, "", {})
    except (UserError, RuntimeError):
        return None  # it has to be gathered first, or has parameters as keys; its parts are saved by name
    if set(given) == {"state", "param_groups"}:
        known = {id(state) for _, each in _family("", optimizer) for state in each.state.values()}
        if all(id(state) in known for state in given["state"].values()):
            return None
    return given


def _is_zero(optimizer: Optimizer) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, whose part of the state is in the optimizer inside."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)


class Attributes:
    """Attributes of an optimizer that training changes: tensors other than parameters, and what has changed since this
    was made. Parameters in them are named."""

    def __init__(self, optimizer: Optimizer, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self._optimizer, self._names = optimizer, names
        self._loaded: set[str] = set()
        self._first = {name: value for name, value in self._plain().items() if not _has_tensors(value)}

    def state_dict(self) -> dict[str, Any]:
        """By name of the attribute; empty: there is no such state."""
        return {
            name: value
            for name, value in self._plain().items()
            if name in self._loaded or _has_tensors(value) or name not in self._first or self._first[name] != value
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the attributes back; tensors of the same shape in place."""
        parameters = {_reference(name): parameter for parameter, name in self._names().items()}
        device = next((p.device for group in self._optimizer.param_groups for p in group["params"]), None)
        self._loaded |= set(state)
        for name, saved in state.items():
            setattr(self._optimizer, name, _put(vars(self._optimizer).get(name), saved, parameters, device))

    def hidden(self) -> str:
        """The attribute, if one, whose object has a tensor shaped as a parameter that cannot be saved."""
        if type(self._optimizer).__module__.startswith("torch.optim."):
            return ""
        names = self._names()
        shapes = {tuple(p.shape) for p in names if p.dim()}
        known = {id(tensor) for p in names for tensor in (p, p.grad)}
        plain = self._plain()
        for name, value in vars(self._optimizer).items():
            if name not in plain and name not in _OF_TORCH and (name == "optim" or not _is_zero(self._optimizer)):
                for tensor in _within(value, _DEPTH):
                    if tensor.is_floating_point() and tuple(tensor.shape) in shapes and id(tensor) not in known:
                        return name
        return ""

    def _plain(self) -> dict[str, Any]:
        optimizer, names = self._optimizer, self._names()
        if type(optimizer).__module__.startswith("torch.optim.") or _is_zero(optimizer):
            return {}
        views = {_memory(tensor) for p in names for tensor in (p, p.grad) if tensor is not None} - {0}
        found = {}
        for name, value in vars(optimizer).items():
            # A flag such as `is_initialized` tells of what is made in the first step, and that is made again.
            if name in _OF_TORCH or name.startswith("_optimizer_") or isinstance(value, bool):
                continue
            try:
                tensors: dict[str, Tensor] = {}
                plain = _named(value, names)
                flatten(plain, name, tensors)
                for path, tensor in tensors.items():
                    require_savable(path, tensor)
            except Exception:
                continue  # a function, a process group, what contains itself
            if not any(_memory(tensor) in views for tensor in tensors.values()):
                found[name] = plain
        return found


def _memory(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.layout == torch.strided else 0


def _reference(name: str) -> str:
    return f"parameter {name}"


def _named(value: Any, names: Mapping[Tensor, str]) -> Any:
    """A copy of the containers of `value`, with names for parameters."""
    if isinstance(value, Tensor):
        return _reference(names[value]) if value in names else value
    if value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic):
        return value
    if isinstance(value, list | tuple | deque):
        return [_named(item, names) for item in value]
    if isinstance(value, dict):
        return {_named(key, names): _named(item, names) for key, item in value.items()}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        is_seen = isinstance(value, Optimizer) or (
            isinstance(value, nn.Module) and any(p in names for p in value.parameters())
        )
        if not is_seen:
            return _named(dict(value.state_dict()), names)
    raise TypeError(type(value))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_has_tensors(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | np.ndarray)


def _put(current: Any, saved: Any, parameters: Mapping[str, Tensor], device: torch.device | None) -> Any:
    """`saved` in the place of `current`, in the same objects where that is possible."""

    def put(old: Any, new: Any) -> Any:
        return _put(old, new, parameters, device)

    if isinstance(saved, Tensor):
        if isinstance(current, Tensor) and current.shape == saved.shape:
            current.detach().copy_(saved)
            return current
        return saved.to(device)
    if isinstance(saved, str):
        return parameters.get(saved, saved)
    if isinstance(saved, dict):
        if not isinstance(current, dict) and hasattr(current, "load_state_dict"):
            current.load_state_dict(put(None, saved))
            return current
        pairs = [(put(None, key), value) for key, value in saved.items()]
        old = dict(current) if isinstance(current, dict) else {}
        new = {key: put(old.get(key), value) for key, value in pairs}
        if not isinstance(current, dict):
            return new
        current.clear()
        current.update(new)
        return current
    if isinstance(saved, list):
        olds = (
            list(current)
            if isinstance(current, list | tuple | deque) and len(current) == len(saved)
            else [None] * len(saved)
        )
        items = [put(old, item) for old, item in zip(olds, saved, strict=True)]
        if isinstance(current, tuple):
            return tuple(items)
        if not isinstance(current, list | deque):
            return items
        current.clear()
        current.extend(items)
        return current
    return saved


def _within(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module | type) or not depth:
        return
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _within(item, depth - 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _within(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _within(vars(value), depth - 1)
