"""Putting the newest good state back into the objects of a foreign training loop, by all ranks together.

Where all weights are replaced anyway, `UndrawnParameters` makes a model without drawing its random weights first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from phalanx.checkpoint.all_ranks import agreed
from phalanx.checkpoint.foreign import named_state
from phalanx.checkpoint.foreign.training_state import (
    FORMAT,
    Collected,
    Stateful,
    TrainingState,
    is_indirect,
    load_rest,
    model_tensors,
    overwrite,
    set_generators,
)
from phalanx.checkpoint.restoring.compatibility import Differences
from phalanx.checkpoint.restoring.restore import Opened, Targets, Wanted
from phalanx.checkpoint.restoring.source import Restored
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.core.peers import Peers

# Those of torch.nn.init that ask modes too: within what a mode was asked about, it is not asked again.
_OF_INIT = (init.uniform_, init.normal_, init.kaiming_uniform_)
_OF_TENSORS = (
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_),
    *(Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_),
)
_DRAWS = frozenset((*_OF_INIT, *_OF_TENSORS))


class UndrawnParameters(TorchFunctionMode):
    """While this is entered, no random numbers are drawn for parameters, which become zero in place of that.

    All else is done: buffers, constants, tied weights, and what is drawn into a parameter's ``.data``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every call of torch comes here first."""
        named = dict(kwargs or {})
        target = args[0] if args else named.get("tensor")
        if func in _DRAWS and isinstance(target, nn.Parameter):
            target.detach().zero_()  # much cheaper, and nothing that is computed from it goes on for ever
            return target
        return func(*args, **named)


T = TypeVar("T")
_SHOWN = 8
_CURE = "build the model and the extras as they were when it was saved, or give another folder to begin anew"


Restore = Callable[[Wanted], "Restored | None"]
"""Takes back the newest good state, from a session or storage alone; not strict. None: there is nothing good."""


def look(restore: Restore) -> Any:
    """The JSON of the newest good state, all of which was read and checked; None where there is none."""

    def nothing(opened: Opened) -> Targets:
        opened.verify()
        return Targets({})

    seen = restore(nothing)
    return None if seen is None else seen.state


def put_back(
    restore: Restore, training: TrainingState, peers: Peers, report: Callable[[str], None], *, strict: bool
) -> Restored | None:
    """Put back the newest good state; None where there is none. `strict` as of `Checkpointer.restore`.

    What to read depends on what was saved: of each state that is tried, first the JSON of this rank is read, where it
    has its own, then all the rest.

    Raises:
        UserError: it does not fit, or was written by something else; nothing is changed then.
    """
    made: list[Putting] = []

    def wanted(opened: Opened) -> Targets:
        made.clear()
        if not isinstance(opened.state, dict) or opened.state.get("format") != FORMAT:  # the same on all ranks
            problem = f"the checkpoint of step {opened.step} was not written by this interface"
            raise UserError(problem, cure="resume it with what wrote it, or give another folder")
        blob = training.blob_target(opened.state)
        if training.has_blobs(opened.state):
            opened.read(blob)
        own = b"".join(tensor.numpy().tobytes() for tensor in blob.values())
        state = opened.state if training.has_blobs(opened.state) else _with_other_ranks(opened)
        agreed(peers, lambda: made.append(Putting(training, state, own, strict=strict)))
        return Targets(*made[0].targets(), partial(_require_fit, opened.step, training, strict), _CURE)

    restored = restore(wanted)
    if restored is None:
        return None
    agreed(peers, made[0].finish)
    for what, names in (("objects", made[0].left), ("tensors", restored.differences.missing)):
        if names:
            report(f"{len(names)} {what} not in the checkpoint, left as they were: {', '.join(names[:_SHOWN])}")
    return restored


def _with_other_ranks(opened: Opened) -> dict[str, Any]:
    """The state with what other ranks than the first knew of optimizers, where the first did not know it all: each
    may have had the state of its own parameters only."""
    state = opened.state
    kept = [
        key for key, tree in state["objects"].items() if isinstance(tree, dict) and {"state", "groups"} <= set(tree)
    ]
    prefixes = tuple(f"{key}.state." for key in kept)
    if not prefixes or all(name in state["tensors"] for name in opened.tensors if name.startswith(prefixes)):
        return dict(state)
    names = [f"rank.{rank}.json" for rank in range(1, state["world_size"])]
    blobs = {name: torch.empty(int(state["blob_bytes"]), dtype=torch.uint8) for name in names}
    opened.read(blobs)
    trees, tensors = dict(state["objects"]), dict(state["tensors"])
    for blob in blobs.values():
        other = json.loads(blob.numpy().tobytes())
        tensors = {**other["tensors"], **tensors}
        for key in kept:
            states = other["objects"].get(key, {}).get("state", {})
            trees[key] = {**trees[key], "state": {**states, **trees[key]["state"]}}
    return {**state, "objects": trees, "tensors": tensors}


def _require_fit(step: int, training: TrainingState, strict: bool, differences: Differences) -> None:
    """Refuse names on one side only, of the objects that are given."""
    prefixes = tuple(f"{key}." for key in training.models)
    unexpected = [name for name in differences.unexpected if prefixes and name.startswith(prefixes)]
    both = (("missing in the checkpoint", differences.missing), ("only in the checkpoint", unexpected))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
        for what, names in both
        if names
    ]
    if strict and problems:
        cure = "build the model as it was, or restore with strict=False"
        raise UserError(f"the checkpoint of step {step} does not fit: {'; '.join(problems)}", cure=cure)


class Putting:
    """Putting a saved state back, on one rank: `targets` are to be filled, then `finish` gives the objects their state.

    Args:
        state: rank 0's JSON.
        own: this rank's JSON, where it has its own; else empty.
        strict: whether every object given must be in the checkpoint; else those that are not (`left`) stay as they are.

    Raises:
        UserError: an object is not in the checkpoint.
    """

    def __init__(self, training: TrainingState, state: Mapping[str, Any], own: bytes, *, strict: bool = True) -> None:
        self._training, self._rank, self._strict = training, training.rank, strict
        mine = json.loads(own) if own else state
        self._is_own = bool(own) or self._rank == 0
        self.trees: dict[str, Any] = {**state["objects"], **mine["objects"]}
        self.left: list[str] = []
        both = {**state["tensors"], **mine["tensors"]}
        self.table: dict[str, tuple[str, tuple[int, ...]]] = {n: (d, tuple(s)) for n, (d, s) in both.items()}
        self._read: dict[str, Tensor] = {}
        self._indirect: dict[str, Tensor] = {}
        self._fill()

    def targets(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """What is to be filled: tensors of training, and fresh ones for what is put back by `finish`."""
        found = Collected()
        found.add(self._read)
        return found.tensors, found.shards

    def finish(self) -> None:
        """All targets are filled: give the objects their state."""
        names = named_state.parameter_names(self._training.models)
        for name, tensor in self._indirect.items():
            overwrite(name, tensor, self._read[name])
        for key, model in self._there(self._modules()).items():
            load_rest(
                model, {n: named_state.rebuild(t, f"{key}.{n}", self._tensor) for n, t in self.trees[key].items()}
            )
        for key, optimizer in self._there(self._optimizers()).items():
            named_state.load(self.trees[key], optimizer, names, key, self._tensor)
        for path, value in self._there(self._values()).items():
            saved = named_state.rebuild(self.trees[path], path, self._tensor)
            if isinstance(value, Stateful):
                value.load_state_dict(saved)
            elif isinstance(value, Tensor):
                overwrite(path, value, saved)
            else:
                self._training.extra[path.removeprefix("extra.")] = saved
        prefix = self._own("rng.")
        set_generators({n.removeprefix(prefix): t for n, t in self._read.items() if n.startswith(prefix)})

    def _modules(self) -> dict[str, nn.Module]:
        extra = {f"extra.{name}": value for name, value in self._training.extra.items() if isinstance(value, nn.Module)}
        return {**self._training.models, **extra}

    def _fill(self) -> None:
        names = named_state.parameter_names(self._training.models)
        for key, model in self._there(self._modules()).items():
            tensors = {f"{key}.{name}": tensor for name, tensor in model_tensors(key, model)[0].items()}
            indirect = {name: tensor for name, tensor in tensors.items() if is_indirect(tensor)}
            self._indirect |= indirect
            self._read |= tensors | {name: torch.empty_like(tensor) for name, tensor in indirect.items()}
            self._fresh(path for n, tree in self.trees[key].items() for path in named_state.paths(tree, f"{key}.{n}"))
        for key, optimizer in self._there(self._optimizers()).items():
            self._read |= named_state.targets(self.table, self.trees[key], optimizer, names, key)
        for path, value in self._there(self._values()).items():
            self._fill_extra(path, value)
        if self._is_own:
            self._fresh(name for name in self.table if name.startswith(self._own("rng.")))

    def _fill_extra(self, path: str, value: Any) -> None:
        shape = self.table.get(self._own(path), ("", ()))[1]
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and tuple(value.shape) != shape:
            raise UserError(f"has shape {tuple(value.shape)} here and {shape} there", cure=_CURE, field=path)
        present: dict[str, Tensor] = {}
        named_state.flatten(value.state_dict() if isinstance(value, Stateful) else value, path, present)
        spread = {name: tensor for name, tensor in present.items() if isinstance(tensor, DTensor)}
        for name in named_state.paths(self.trees[path], path):
            if name in spread:
                self._read[name] = torch.empty_like(spread[name])
            else:
                self._fresh([self._own(name)])

    def _values(self) -> dict[str, Any]:
        extra = self._training.extra.items()
        given = {f"extra.{name}": value for name, value in extra if not isinstance(value, nn.Module)}
        own: dict[str, Any] = {f"{key}.own": optimizer for key, optimizer in self._training.members.items()}
        own |= {f"{key}.attributes": attributes for key, attributes in self._training.attributes.items()}
        return {**{path: value for path, value in own.items() if path in self.trees}, **given}

    def _optimizers(self) -> dict[str, Optimizer]:
        """Those whose state was saved by name; not those that have a format of their own, and what is inside these."""
        own = tuple(f"{key}." for key in self._training.optimizers if f"{key}.own" in self.trees)
        return {key: each for key, each in self._training.optimizers.items() if not f"{key}.".startswith(own or "/")}

    def _there(self, objects: Mapping[str, T]) -> dict[str, T]:
        """Those of `objects` that are in the checkpoint; UserError: one is not, though all have to be."""
        absent = [path for path in objects if path not in self.trees]
        if absent and self._strict:
            there = ", ".join(sorted(self.trees))
            cure = f"restore only what is there ({there}), give it the name it had, or restore with strict=False"
            raise UserError("is not in the checkpoint", cure=cure, field=absent[0])
        self.left = sorted({*self.left, *absent})
        return {path: value for path, value in objects.items() if path in self.trees}

    def _own(self, name: str) -> str:
        return f"rank.{self._rank}.{name}" if self._rank and self._is_own else name

    def _fresh(self, names: Iterable[str]) -> None:
        for name in names:
            dtype, shape = self.table[name]
            self._read[name] = torch.empty(shape, dtype=getattr(torch, dtype))

    def _tensor(self, path: str) -> Tensor:
        return self._read[path] if path in self._read else self._read[self._own(path)]
