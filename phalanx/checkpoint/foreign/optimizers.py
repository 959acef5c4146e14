"""Models and optimizers under names that do not depend on how they are wrapped or spread.

The state of an optimizer is named after its parameters (``optimizer.state.layers.0.weight.exp_avg``), not numbered as
torch does. `torch.distributed.checkpoint.state_dict` names it so too, but steps an optimizer that has no state yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from phalanx.checkpoint.foreign import trees
from phalanx.core.errors import UserError

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
    """The state of an optimizer as a tree: ``state`` by name of the parameter, and ``groups``.

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
    return {"state": {name_of(p): dict(state) for p, state in optimizer.state.items() if state}, "groups": groups}


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
        tree: what `phalanx.checkpoint.foreign.trees.flatten` made of `optimizer_tree`.
    """
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            for key in trees.paths(tree["state"].get(name), f"{path}.state.{name}"):
                found[key] = _like(parameter, saved, key)
    for key in trees.paths(tree["groups"], f"{path}.groups"):
        found[key] = _like(None, saved, key)
    return found


def load(
    tree: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    path: str,
    tensor: Callable[[str], Tensor],
) -> None:
    """Put the state described by `tree` into `optimizer`.

    Raises:
        UserError: it has other groups of parameters than the one that was saved.
    """
    groups = trees.rebuild(tree["groups"], f"{path}.groups", tensor)
    if len(groups) != len(optimizer.param_groups):
        problem = f"has {len(optimizer.param_groups)} parameter groups here and {len(groups)} in the checkpoint"
        raise UserError(problem, cure="build the optimizer as it was", field=path)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for number, parameter in enumerate(parameters):
        name = names[parameter]
        if name in tree["state"]:
            state[number] = trees.rebuild(tree["state"][name], f"{path}.state.{name}", tensor)
    numbers = iter(range(len(parameters)))
    counted = [
        group | {"params": [next(numbers) for _ in own["params"]]}
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": counted})
    _keep_dtypes(optimizer, parameters, state)


def _keep_dtypes(optimizer: Optimizer, parameters: list[Tensor], state: Mapping[int, Any]) -> None:
    """torch turns loaded state into the dtype of its parameter, which loses digits of fp32 state of bf16 parameters."""
    for number, values in state.items():
        own = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(own[key], Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def _like(parameter: Tensor | None, saved: Mapping[str, tuple[str, tuple[int, ...]]], key: str) -> Tensor:
    dtype_name, shape = saved.get(key, ("float32", ()))  # what is missing is reported by whoever reads
    dtype = getattr(torch, dtype_name)
    if parameter is not None and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)
