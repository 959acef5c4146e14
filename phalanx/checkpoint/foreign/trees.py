"""Nested state dicts as named tensors and JSON, and back, without pickling.

What JSON lacks is written as an object with the key ``$``: ``{"$": "tensor"}`` (its name is its path), ``array`` and
``scalar`` of numpy, ``tuple``, and ``dict`` for dicts whose keys are not plain strings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.core.errors import UserError

_MARK = "$"
_DICTS = {"dict": dict, "Counter": Counter}


def flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of `value`; its tensors are put into `tensors` under their paths.

    Raises:
        UserError: something in it is neither; names its path and type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _put(value, path, tensors, {_MARK: "tensor"})
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _put(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), path, tensors, {_MARK: "array"})
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_MARK: "scalar", "dtype": value.dtype.name, "value": value.item()}
    if type(value) is list:
        return _flatten_items(value, path, tensors)
    if type(value) in (tuple, torch.Size):
        return {_MARK: "tuple", "items": _flatten_items(value, path, tensors)}
    if isinstance(value, Mapping):
        return _flatten_dict(value, path, tensors)
    raise UserError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold without pickling",
        cure="make it of tensors, numbers, strings, None, lists, tuples and dicts, or leave it out of the state",
        field=path,
    )


def rebuild(tree: Any, path: str, tensor: Callable[[str], Tensor]) -> Any:
    """The reverse of `flatten`.

    Args:
        tensor: gives the tensor of a path.
    """
    if isinstance(tree, list):
        return [rebuild(item, f"{path}.{index}", tensor) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_MARK)
    if kind is None:
        return {key: rebuild(item, f"{path}.{key}", tensor) for key, item in tree.items()}
    if kind == "tensor":
        return tensor(path)
    if kind == "array":
        return tensor(path).numpy()
    if kind == "scalar":
        return np.dtype(tree["dtype"]).type(tree["value"])
    if kind == "tuple":
        return tuple(rebuild(tree["items"], path, tensor))
    pairs = [(_key(key), item) for key, item in tree["items"]]
    return _DICTS[kind]({key: rebuild(item, f"{path}.{key}", tensor) for key, item in pairs})


def paths(tree: Any, path: str) -> list[str]:
    """The names of the tensors that `rebuild` will ask for."""
    found: list[str] = []

    def note(name: str) -> Tensor:
        found.append(name)
        return torch.empty(0)

    rebuild(tree, path, note)
    return found


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor], mark: dict[str, str]) -> dict[str, str]:
    if path in tensors:
        raise UserError("two tensors would have this name", cure="rename a key of the state", field=path)
    tensors[path] = tensor.detach()
    return mark


def _flatten_items(items: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [flatten(item, f"{path}.{index}", tensors) for index, item in enumerate(items)]


def _flatten_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    plain = all(type(key) is str and not key.startswith(_MARK) for key in value)
    if plain and not isinstance(value, Counter):
        return {key: flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}
    items = [[_key_text(key, path), flatten(item, f"{path}.{key}", tensors)] for key, item in value.items()]
    return {_MARK: "Counter" if isinstance(value, Counter) else "dict", "items": items}


def _key_text(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, tuple):
        return [_key_text(part, path) for part in key]
    problem = f"has a key that is a {type(key).__qualname__}, which a checkpoint cannot hold without pickling"
    raise UserError(problem, cure="use strings or numbers as keys", field=path)


def _key(text: Any) -> Any:
    return tuple(_key(part) for part in text) if isinstance(text, list) else text
