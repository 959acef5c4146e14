"""All that decides how a foreign training loop goes on: models, optimizers, extras and generators as tensors and JSON.

Names: ``model.…`` and ``optimizer.…`` are the same in every layout. ``extra.…`` and ``rng.…`` are rank 0's; other ranks
have their own under ``rank.3.…``, with the JSON of their own in a tensor of bytes, ``rank.3.json``. They get it back
where there are as many ranks as there were; else all get rank 0's, and generators of other ranks stay as they are.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.foreign import named_state
from phalanx.checkpoint.foreign.named_state import require_savable
from phalanx.checkpoint.foreign.wrapped_optimizers import Attributes, holders, own_state, parts
from phalanx.checkpoint.format.shard_plan import Role
from phalanx.core.errors import UserError
from phalanx.core.layout import Axis, Shard


def generator_tensors() -> dict[str, Tensor]:
    """The state of torch's generators (of the host, and of the present CUDA device), numpy's and Python's."""
    _, state, gauss = random.getstate()
    of_python = torch.tensor([*state, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64)
    tensors = {"torch": torch.get_rng_state(), "python": of_python}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    of_numpy: Any = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] == "MT19937":  # the usual one; another has no such state
        legacy: Any = np.random.get_state(legacy=True)
        _, keys, position, has_gauss, gauss = legacy
        tensors["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss, _bits(gauss)], dtype=torch.int64)
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


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _float(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


def placed(name: str, tensor: Tensor) -> tuple[Tensor, Shard | None]:
    """The memory of a tensor on this rank, and which block of the whole it is; None where it is not a DTensor.

    Raises:
        UserError: it cannot be saved, holds partial sums, or its mesh lacks this rank.
    """
    require_savable(name, tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        problem = "is a DTensor of which this rank has no block" if coordinate is None else "holds partial sums"
        raise UserError(problem, cure="redistribute it before it is saved", field=name)
    local = tensor.to_local().detach()
    boxes = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    offsets = tuple(boxes[0].offsets) if boxes and local.numel() else (0,) * tensor.dim()
    pairs = zip(coordinate, tensor.placements, strict=True)
    owner = all(place == 0 for place, placement in pairs if placement.is_replicate())
    axes: tuple[Axis, ...] = () if tuple(local.shape) == tuple(tensor.shape) else ("shard",)
    return local, Shard(tuple(tensor.shape), offsets, tuple(local.shape), axes, owner)


def is_indirect(tensor: Tensor) -> bool:
    """Whether bytes cannot be read into it: elements share memory (``expand``), or are conjugated or negated on use."""
    return not isinstance(tensor, DTensor) and (bool(_expanded(tensor)) or tensor.is_conj() or tensor.is_neg())


def overwrite(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Give `tensor`, which may be indirect, the values of `saved`; through the memory that its elements share.

    Raises:
        UserError: elements that share memory have different values in `saved`; nothing is changed then.
    """
    own, new = tensor.detach(), saved
    for dim in _expanded(tensor):
        own, new = own.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    if own.shape != saved.shape:
        as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (new.expand_as(saved), saved)]
        if not torch.equal(*as_bytes):
            problem = "is expanded here, so that its elements share memory, and has different values in the checkpoint"
            raise UserError(problem, cure="make it a tensor of its own (contiguous())", field=name)
    own.copy_(new)


def _expanded(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""By name of a tensor: its dtype (``float32``) and the shape of the whole."""

FORMAT = "phalanx.foreign.1"
_BLOB_STEP = 4096


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be taken out and put back: schedulers, samplers, loaders, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of dicts, lists, tuples, tensors, arrays, numbers, strings and None."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take up a state that `state_dict` gave."""


@dataclass
class Collected:
    """The state of one moment, as it is saved by this rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name; the blocks held here
    shards: dict[str, Shard] = field(default_factory=dict)  # of those that are blocks of a whole
    roles: dict[str, Role] = field(default_factory=dict)  # of those that are examined
    trees: dict[str, Any] = field(default_factory=dict)  # JSON by object (model, optimizer, extra.sampler)
    table: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Tensor], role: Role = "other") -> None:
        """Take in some tensors, DTensors among them."""
        for name, tensor in tensors.items():
            if name in self.tensors:
                raise UserError("two tensors would have this name", cure="rename one of the extras", field=name)
            local, shard = placed(name, tensor)
            self.tensors[name] = local
            self.table[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if shard is not None:
                self.shards[name] = shard
            if role != "other" and (tensor.is_floating_point() or tensor.is_complex()):
                self.roles[name] = role


class TrainingState:
    """Models, optimizers and extras of a training loop, as `Checkpointer` takes them; UserError: something in it cannot
    be saved."""

    def __init__(self, model: Any, optimizer: Any, extra: dict[str, Any] | None, rank: int, world_size: int) -> None:
        self.models: dict[str, nn.Module] = {}
        self.given: dict[str, Optimizer] = {}
        self.members: dict[str, Optimizer] = {}  # those given and those inside them
        self.optimizers: dict[str, Optimizer] = {}  # those of them that have a state
        self.attributes: dict[str, Attributes] = {}
        self.extra = {} if extra is None else extra
        self.add(model, optimizer, {})
        self.rank, self._world_size = rank, world_size
        self._blob_bytes = 0

    def require_any(self) -> None:
        """Raise UserError where nothing was given so far."""
        if not (self.models or self.optimizers or self.extra):
            raise UserError("nothing to save was given", cure="give model=, optimizer= or extra=")

    def add(self, model: Any, optimizer: Any, extra: Mapping[str, Any]) -> None:
        """Add what was not there yet when this was made."""
        self.models |= _named(model, "model", nn.Module)
        self.given |= _named(optimizer, "optimizer", Optimizer)
        for key, given in self.given.items():
            self.members |= parts(key, given)
        self.optimizers = holders(self.members)
        for key, each in self.members.items():
            if key not in self.attributes:
                self.attributes[key] = Attributes(each, lambda: named_state.parameter_names(self.models))
        self.extra.update(extra)

    def collect(self) -> Collected:
        """The state of this moment; its tensors are those that training works on, not copies.

        Raises:
            UserError: a state holds something that cannot be saved; names its path.
        """
        found = Collected()
        names = named_state.parameter_names(self.models)
        for key, model in self.models.items():
            found.trees[key] = _collect_model(key, model, found)
        for key, member in self.members.items():
            own = own_state(member)
            if own is not None:
                self._collect_value(f"{key}.own", own, found)
                continue
            if attributes := self.attributes[key].state_dict():
                self._collect_value(f"{key}.attributes", attributes, found)
            if key in self.optimizers:
                self._collect_optimizer(key, self.optimizers[key], names, found)
        for name, value in self.extra.items():
            path = f"extra.{name}"
            if isinstance(value, nn.Module):
                found.trees[path] = _collect_model(path, value, found)
                continue
            self._collect_value(path, value.state_dict() if isinstance(value, Stateful) else value, found)
        found.add({self._own(f"rng.{name}"): tensor for name, tensor in generator_tensors().items()})
        if self.rank:
            found.add({f"rank.{self.rank}.json": self._blob(found)})
        return found

    def _collect_optimizer(self, key: str, optimizer: Optimizer, names: Mapping[Tensor, str], found: Collected) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if key not in self.given and any(parameter not in names for parameter in parameters):
            # Of copies of parameters, in fp32 for example.
            self._collect_value(f"{key}.own", optimizer.state_dict(), found)
            return
        tensors: dict[str, Tensor] = {}
        tree = named_state.optimizer_tree(optimizer, names, key)
        found.trees[key] = named_state.flatten(tree, key, tensors)
        found.add(tensors, "optimizer")

    def _collect_value(self, path: str, value: Any, found: Collected) -> None:
        own: dict[str, Tensor] = {}
        found.trees[path] = named_state.flatten(value, path, own)
        found.add({n if isinstance(tensor, DTensor) else self._own(n): tensor for n, tensor in own.items()})

    def require_seen(self, found: Collected) -> None:
        """Raise UserError for an optimizer of which no state was found, though it has some where nobody can save it."""
        for key in self.given:
            inner = [path for path in self.members if path == key or path.startswith(f"{key}.")]
            trees = [found.trees[path] for path in inner if path in found.trees]
            others = [path for path in found.trees if path.startswith((f"{key}.own", f"{key}.attributes"))]
            if others or any(tree["state"] or "others" in tree for tree in trees):
                continue
            for path in inner:
                if name := self.attributes[path].hidden():
                    problem = f"parameters are trained, and no state was seen in optimizer.state, but in {name!r}"
                    cure = "give it, or what it keeps there, a state_dict() and load_state_dict() that hold this state"
                    raise UserError(problem, cure=cure, field=path)

    def plain(self, found: Collected, step: int) -> dict[str, Any]:
        """What rank 0 writes as the JSON state."""
        table = {name: [dtype, list(shape)] for name, (dtype, shape) in found.table.items()}
        return {
            "format": FORMAT,
            "step": step,
            "world_size": self._world_size,
            "blob_bytes": self._blob_bytes,
            "objects": found.trees,
            "tensors": table,
        }

    def reserve(self, highest: Callable[[int], int]) -> None:
        """Fix how much room the JSON of a rank has, the same on all; called by all together. `highest` gives the
        highest of all ranks' numbers."""
        self._blob_bytes = 0
        needed = 2 * len(self._json(self.collect())) + _BLOB_STEP if self._world_size > 1 else 0
        self._blob_bytes = highest(-(-needed // _BLOB_STEP) * _BLOB_STEP)

    def has_blobs(self, state: Mapping[str, Any]) -> bool:
        """Whether ranks have JSON of their own in the checkpoint, which they take back; the same on all."""
        return self._world_size > 1 and state["world_size"] == self._world_size

    def blob_target(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """What to read first on this rank, where it has JSON of its own in the checkpoint."""
        if self.rank == 0 or not self.has_blobs(state):
            return {}
        return {f"rank.{self.rank}.json": torch.empty(int(state["blob_bytes"]), dtype=torch.uint8)}

    def _own(self, name: str) -> str:
        return f"rank.{self.rank}.{name}" if self.rank else name

    def _json(self, found: Collected) -> bytes:
        table = {name: [dtype, list(shape)] for name, (dtype, shape) in found.table.items()}
        return json.dumps({"objects": found.trees, "tensors": table}, separators=(",", ":")).encode()

    def _blob(self, found: Collected) -> Tensor:
        """The JSON of a rank other than the first, filled up with spaces, which JSON does not mind; where it has grown
        out of its room it is longer, so that the ranks agree on a new one."""
        text = self._json(found)
        return torch.frombuffer(bytearray(text.ljust(self._blob_bytes)), dtype=torch.uint8)


def _named(given: Any, key: str, kind: type) -> dict[str, Any]:
    if given is None:
        return {}
    named = {f"{key}.{name}": value for name, value in given.items()} if isinstance(given, Mapping) else {key: given}
    for name, value in named.items():
        if not isinstance(value, kind):
            problem = f"is a {type(value).__qualname__}, not a {kind.__module__}.{kind.__qualname__}"
            raise UserError(problem, cure=f"give a {kind.__name__}, or put it into extra=", field=name)
    return named


def model_tensors(path: str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model by name, each once where several names share it, and what else its state dict has;
    UserError, with `path`: one of them cannot be saved."""
    inner = named_state.unwrapped(model)
    if next(inner.parameters(), None) is None and not inner.state_dict():
        return {}, {}  # which torch takes for a mistake
    state = get_model_state_dict(inner)
    tensors: dict[str, Tensor] = {}
    seen: set[Any] = set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            require_savable(f"{path}.{name}", value)
            local = value.to_local() if isinstance(value, DTensor) else value
            place = (local.data_ptr(), local.shape, local.stride(), local.dtype)
            if not local.numel() or place not in seen:
                tensors[name] = value
            seen.add(place)
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def load_rest(model: nn.Module, rest: Mapping[str, Any]) -> None:
    """Put back what is not a tensor in the state dict of a model whose tensors are restored already."""
    if rest:
        inner = named_state.unwrapped(model)
        set_model_state_dict(inner, {**get_model_state_dict(inner), **rest})


def _collect_model(path: str, model: nn.Module, found: Collected) -> Any:
    tensors, rest = model_tensors(path, model)
    trained = {
        named_state.clean(name) for name, p in named_state.unwrapped(model).named_parameters() if p.requires_grad
    }
    found.add({f"{path}.{name}": tensor for name, tensor in tensors.items() if name in trained}, "trained")
    found.add({f"{path}.{name}": tensor for name, tensor in tensors.items() if name not in trained})
    others: dict[str, Tensor] = {}
    tree = {name: named_state.flatten(value, f"{path}.{name}", others) for name, value in rest.items()}
    found.add(others)
    return tree
