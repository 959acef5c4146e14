"""State dicts of models and optimizers as named tensors and JSON, and back, without pickling.

What JSON lacks is written as an object with the key ``$``: ``{"$": "tensor"}`` (its name is its path), ``array`` and
``scalar`` of numpy, ``tuple``, and ``dict`` for dicts whose keys are not plain strings.

Names do not depend on how a model is wrapped or spread. The state of an optimizer is named after its parameters
(``optimizer.state.layers.0.weight.exp_avg``), not numbered as torch does. `torch.distributed.checkpoint.state_dict`
names it so too, but steps an optimizer that has no state yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

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
        plain = all(type(key) is str and not key.startswith(_MARK) for key in value)
        if plain and not isinstance(value, Counter):
            return {key: flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}
        items = [[_key_text(key, path), flatten(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return {_MARK: "Counter" if isinstance(value, Counter) else "dict", "items": items}
    raise UserError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold without pickling",
        cure="make it of tensors, numbers, strings, None, lists, tuples and dicts, or leave it out of the state",
        field=path,
    )


def rebuild(tree: Any, path: str, tensor: Callable[[str], Tensor]) -> Any:
    """The reverse of `flatten`; `tensor` gives the tensor of a path."""
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


def _key_text(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, tuple):
        return [_key_text(part, path) for part in key]
    problem = f"has a key that is a {type(key).__qualname__}, which a checkpoint cannot hold without pickling"
    raise UserError(problem, cure="use strings or numbers as keys", field=path)


def _key(text: Any) -> Any:
    return tuple(_key(part) for part in text) if isinstance(text, list) else text


_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel, DataParallel or torch.compile around it.

    Raises:
        UserError: it is spread by the first FSDP, whose flat parameters have no names.
    """
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        problem = "is wrapped in FullyShardedDataParallel, whose flat parameters cannot be named"
        raise UserError(problem, cure="use torch.distributed.fsdp.fully_shard (FSDP2)", field="model")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    return _WRAPPERS.sub("", name)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[Tensor, str]:
    """The name of every parameter; of the only model, its own, else beginning with the model's."""
    names: dict[Tensor, str] = {}
    for key, model in models.items():
        prefix = f"{key}." if len(models) > 1 else ""
        for name, parameter in unwrapped(model).named_parameters():
            names.setdefault(parameter, prefix + clean(name))
    return names


def optimizer_tree(optimizer: Optimizer, names: Mapping[Tensor, str], path: str) -> dict[str, Any]:
    """The state of an optimizer as a tree: ``state`` by name of the parameter, ``groups``, and ``others`` (keys of no
    parameter).

    Raises:
        UserError: it has a parameter that is in no model.
    """

    def name_of(parameter: Tensor) -> str:
        if parameter not in names:
            problem = f"has a parameter of shape {tuple(parameter.shape)} that is in no model given here"
            raise UserError(problem, cure="give the model too, all of them where there are several", field=path)
        return names[parameter]

    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": [*map(name_of, group["params"])]}
        for group in optimizer.param_groups
    ]
    own = {p: state for p, state in optimizer.state.items() if isinstance(p, Tensor)}
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    tree = {"state": {name_of(p): dict(state) for p, state in own.items() if state}, "groups": groups}
    return tree | ({"others": others} if others else {})


def targets(
    saved: Mapping[str, tuple[str, tuple[int, ...]]],
    tree: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    path: str,
) -> dict[str, Tensor]:
    """Fresh tensors for the saved state of the parameters that `optimizer` has here, placed as these are.

    Args:
        saved: dtype and whole shape of every tensor that there is.
        tree: what `phalanx.checkpoint.foreign.named_state.flatten` made of `optimizer_tree`.
    """
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            for key in paths(tree["state"].get(name), f"{path}.state.{name}"):
                found[key] = _like(parameter, saved, key)
    _require_groups(tree, optimizer, path)
    for part in ("groups", "others"):
        for key in paths(tree.get(part), f"{path}.{part}"):
            found[key] = _like(None, saved, key)
    return found


def _require_groups(tree: Mapping[str, Any], optimizer: Optimizer, path: str) -> None:
    if len(tree["groups"]) != len(optimizer.param_groups):
        problem = f"has {len(optimizer.param_groups)} parameter groups here and {len(tree['groups'])} in the checkpoint"
        raise UserError(
            problem, cure="build the optimizer as it was, with add_param_group before restore()", field=path
        )


def load(
    tree: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    path: str,
    tensor: Callable[[str], Tensor],
) -> None:
    """Put the state described by `tree` into `optimizer`, for which there are `targets`."""
    groups = rebuild(tree["groups"], f"{path}.groups", tensor)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = rebuild(tree.get("others", {}), f"{path}.others", tensor)
    state: dict[int, Any] = {}
    for number, parameter in enumerate(parameters):
        name = names[parameter]
        if name in tree["state"]:
            state[number] = rebuild(tree["state"][name], f"{path}.state.{name}", tensor)
    numbers = iter(range(len(parameters)))
    counted = [
        group | {"params": [next(numbers) for _ in own["params"]]}
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    _load_plain(optimizer, {"state": {**others, **state}, "param_groups": counted})
    # torch turns loaded state into the dtype of its parameter, which loses digits of fp32 state of bf16 parameters.
    for number, values in state.items():
        own = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(own[key], Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


class _Shell(Optimizer):
    """Takes up a state for a wrapper whose own `load_state_dict` expects another."""


def _load_plain(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what torch's own `state_dict` gives; the groups and ``state`` stay the objects that they were, which others
    may share."""
    groups, values, kind = optimizer.param_groups, optimizer.state, type(optimizer)
    members, loaded = list(groups), optimizer
    both = kind.load_state_dict is not Optimizer.load_state_dict and kind.state_dict is not Optimizer.state_dict
    if "state" in vars(optimizer) and (both or "_optimizer_step_pre_hooks" not in vars(optimizer)):
        # Its own would give the state to an optimizer inside, or it was made without `Optimizer.__init__`.
        loaded = _Shell([{**group} for group in groups], {})
    loaded.load_state_dict(state)
    for group, new in zip(members, [dict(group) for group in loaded.param_groups], strict=True):
        group.clear()
        group.update(new)
    optimizer.param_groups[:] = members
    new_values = dict(loaded.state)
    values.clear()
    values.update(new_values)
    for name, value in (("param_groups", groups), ("state", values)):
        if name in vars(optimizer):
            vars(optimizer)[name] = value


def _like(parameter: Tensor | None, saved: Mapping[str, tuple[str, tuple[int, ...]]], key: str) -> Tensor:
    dtype_name, shape = saved.get(key, ("float32", ()))  # what is missing is reported when it is read
    dtype = getattr(torch, dtype_name)
    if parameter is not None and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def require_savable(name: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor that is not a plain block of memory with values, or whose name no file can hold."""
    problem, cure = "", "keep plain tensors instead, or leave it out (register_buffer(…, persistent=False))"
    if tensor.is_meta:
        problem = "is on the meta device, where there are no values"
        cure = "give the model memory (to_empty) and values before the Checkpointer is made"
    elif tensor.is_quantized:
        problem = "is a quantized tensor, which a checkpoint cannot hold"
    elif tensor.is_nested:
        problem = "is a nested tensor, which a checkpoint cannot hold"
    elif tensor.layout != torch.strided:
        problem = f"is a sparse tensor ({tensor.layout}), which a checkpoint cannot hold"
    printable = name.encode(errors="backslashreplace").decode()
    if printable != name:
        problem, cure = "has half a character (a lone surrogate) in its name, which no file can hold", "rename it"
    if problem:
        raise UserError(problem, cure=cure, field=printable)
