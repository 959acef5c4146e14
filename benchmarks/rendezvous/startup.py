"""What every rank of `phalanx train` says to the store until its first step is done, out of the trainer's own code.

The trainer runs in this process as one rank of the layout, on a tiny model, up to the end of its first step: whatever
it asks of a mesh is written down, and answered by groups in which nobody else is. That is done for four ranks; the
others do the same at their own places, which a test holds true. What the members of a group say to the store while they
meet is what NCCL's stand-in says, see `rendezvous.nccl`.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from support import tiny
from torch import Tensor
from torch.distributed import HashStore

from phalanx.core.config import load
from phalanx.core.layout import AXES, Axis, Layout
from phalanx.ipc.rank_tree import children_of, parent_of
from phalanx.launch.environment import Worker
from phalanx.parallel.mesh import Mesh, meeting_place
from phalanx.train import ranks as training_ranks
from phalanx.train.config import RunConfig
from phalanx.train.ranks import Ranks
from phalanx.train.session import run_session
from rendezvous.nccl import RANKS_PER_ROOT, NcclRendezvous, root_index
from rendezvous.wire import MAGIC, Kind, Request

Key = tuple[str, tuple[int, ...]]
"""A group's name and ranks, as `Mesh` knows them."""

PREFIX = b"attempt0/"


class FirstStepError(Exception):
    """The first step is done: the recording ends."""


@dataclass
class Mirror:
    """Peers that all say what this one says."""

    size: int
    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def collect(self, value: Any) -> list[Any] | None:
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        return value

    def lowest(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass

    def ask_highest(self, value: int) -> Callable[[], int]:
        return lambda: value


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@dataclass
class Nobody:
    """A process group whose other members say nothing: what they would send is zero."""

    index: int
    members: int

    def name(self) -> str:
        return "nobody"

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.members

    def _set_default_timeout(self, timeout: Any) -> None:
        pass

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Done:
        return _Done()

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Done:
        out.view(self.members, -1).copy_(x.reshape(1, -1).expand(self.members, -1).clone())
        return _Done()

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> _Done:
        out.copy_(x.reshape(self.members, -1)[self.index].view(out.shape))
        return _Done()

    def alltoall_base(self, out: Tensor, x: Tensor, out_rows: list[int], rows: list[int]) -> _Done:
        out.zero_()
        return _Done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Done:
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Done:
        tensors[0].zero_()
        return _Done()

    def barrier(self) -> _Done:
        return _Done()


@cache
def groups_of_rank(layout: Layout, rank: int, **settings: Any) -> list[Key]:
    """The groups that the trainer makes as `rank` until its first step is done, in order.

    Args:
        settings: of the run, such as ``parallel__zero=3``.
    """
    made: list[Key] = []

    def note(mesh: Mesh, key: Key) -> Nobody:
        if key not in mesh._backends:
            made.append(key)
            mesh._backends[key] = Nobody(key[1].index(rank), len(key[1]))
        return mesh._backends[key]  # type: ignore[no-any-return]

    def at_place(of_layout: Layout, _: int, *told: Any, **named: Any) -> Mesh:
        return Mesh(of_layout, rank, *told, **named)

    def stop(_: Ranks) -> None:
        raise FirstStepError

    with tempfile.TemporaryDirectory() as folder:
        config = load(RunConfig, None, _overrides(Path(folder), layout, settings)).value
        size = layout.world_size
        ranks = Ranks(Mirror(size), Worker(0, 0, size, size, "127.0.0.1", 1), _store=HashStore())
        with (
            patch.object(Mesh, "_backend", note),
            patch.object(training_ranks, "Mesh", at_place),
            patch.object(Ranks, "after_step", stop),
        ):
            try:
                run_session(config, Path("tiny.toml"), Console(quiet=True), ranks)
            except FirstStepError:
                return made
            finally:
                ranks.close()
    raise AssertionError("the run ended before its first step")


class Everyone:
    """The groups of every rank: what the trainer makes on the first rank of the first three stages and of the last,
    moved to each other rank's own place. Of the stages in between every other one is alike.

    Args:
        layout: of all ranks.
        recorded: the layout in which the trainer runs, of as many stages; `layout` by default. A smaller one is
            quicker: a group that spans an axis there does so here.
        settings: of the run.
    """

    def __init__(self, layout: Layout, recorded: Layout | None = None, **settings: Any) -> None:
        self.layout, small = layout, recorded or layout
        assert small.pipeline == layout.pipeline
        last = layout.pipeline - 1
        self._of_stage = {
            stage: [
                _stretched(key, small, layout)
                for key in groups_of_rank(small, small.rank(small.coordinates(0)._replace(pipeline=stage)), **settings)
            ]
            for stage in {0, min(1, last), min(2, last), last}
        }
        self._apart = {id(key): _axes_apart(key[1], layout) for keys in self._of_stage.values() for key in keys}
        self._moved: dict[tuple[int, ...], Key] = {}
        self._one: dict[Key, Key] = {}

    def groups(self, rank: int) -> list[Key]:
        """Those of one rank, in the order in which it makes them; equal ones are one object, being slow to hash."""
        here = self.layout.coordinates(rank)
        stage = here.pipeline if here.pipeline in self._of_stage else 2 - here.pipeline % 2
        found = []
        for key in self._of_stage[stage]:
            shift = {axis: getattr(here, axis) for axis in self._apart[id(key)]}
            if "pipeline" in shift:
                shift["pipeline"] -= stage
            found.append(self._around(key, shift))
        return found

    def _around(self, key: Key, shift: dict[Axis, int]) -> Key:
        """A group moved so far along some axes."""
        known = id(key), *shift.values()
        if known not in self._moved:
            moved = _renamed(key, {member: _shifted(member, shift, self.layout) for member in key[1]})
            self._moved[known] = self._one.setdefault(moved, moved)
        return self._moved[known]


def all_meet(everyone: Everyone) -> bool:
    """Whether ranks that make their groups one by one, each when all its members have come, all get through."""
    size = everyone.layout.world_size
    left = {rank: iter(everyone.groups(rank)) for rank in range(size)}
    here: dict[int, list[int]] = {}
    free = list(range(size))
    while free:
        rank = free.pop()
        key = next(left[rank], None)
        if key is None:
            del left[rank]
            continue
        members = here.setdefault(id(key), [])
        members.append(rank)
        if len(members) == len(key[1]):
            free += here.pop(id(key))
    return not left


def scripts(everyone: Everyone) -> list[list[Request]]:
    """What every rank says to the store: to connect, to meet all ranks in a tree, and in each of its groups."""
    size, meetings = everyone.layout.world_size, _Meetings()
    said = [[*connecting(), *joining(rank, size)] for rank in range(size)]
    for rank, script in enumerate(said):
        for key in everyone.groups(rank):
            script += meetings.of(key, bisect_left(key[1], rank))
    return said


def joining(rank: int, size: int) -> list[Request]:
    """What `phalanx.ipc.tree_peers.TreePeers` says: where it listens, and where its parent does."""
    said = _Said("")
    if children_of(rank, size):
        said.set(f"peers/{rank}", json.dumps(["10.100.200.300", 65000, "0" * 32, "node0123"]))
    if (parent := parent_of(rank)) is not None:
        said.get(f"peers/{parent}")
    return said.requests


def connecting() -> list[Request]:
    """What a client of a TCPStore says first."""
    return [Request(Kind.VALIDATE, (), (MAGIC.to_bytes(4, "little"),)), Request(Kind.PING, (), (bytes(4),))]


def answered_bytes(said: Sequence[Sequence[Request]]) -> int:
    """Bytes of the answers: values are as long as those that were set."""
    lengths = {r.keys[0]: len(r.values[0]) for script in said for r in script if r.kind is Kind.SET}
    known: dict[int, int] = {}
    for script in said:
        for r in script:
            if id(r) not in known:
                wait = {Kind.WAIT: 1, Kind.PING: 4}.get(r.kind, 0)
                reads = r.kind in (Kind.GET, Kind.MULTI_GET)
                known[id(r)] = wait + (sum(8 + lengths[key] for key in r.keys) if reads else 0)
    return sum(known[id(r)] for script in said for r in script)


def sent_bytes(said: Sequence[Sequence[Request]]) -> int:
    """Bytes of the requests."""
    known = {id(r): r for script in said for r in script}
    lengths = {key: len(r.encode()) for key, r in known.items()}
    return sum(lengths[id(r)] for script in said for r in script)


class _Meetings:
    """The requests of members of groups; those of members who say the same are the same objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[Request]] = {}
        self._places: dict[int, str] = {}

    def of(self, key: Key, index: int) -> list[Request]:
        size, number = len(key[1]), id(key)
        if number not in self._places:
            self._places[number] = meeting_place(*key)
        root = root_index(index, size, math.ceil(size / RANKS_PER_ROOT))
        if (number, root) not in self._known:
            said = _Said(self._places[number] + "/")
            NcclRendezvous(said, index, size, 0.0, "")
            self._known[number, root] = said.requests
        return self._known[number, root]


@dataclass
class _Said:
    """A store that writes down what a `TCPStore` client would send."""

    prefix: str
    requests: list[Request] = field(default_factory=list)

    def set(self, key: str, value: str) -> None:
        self.requests.append(Request(Kind.SET, (self._key(key),), (value.encode(),)))

    def get(self, key: str) -> None:
        self.requests += [Request(Kind.WAIT, (self._key(key),)), Request(Kind.GET, (self._key(key),))]

    def multi_get(self, keys: Sequence[str]) -> None:
        wanted = tuple(map(self._key, keys))
        self.requests += [Request(Kind.WAIT, wanted), Request(Kind.MULTI_GET, wanted)]

    def _key(self, key: str) -> bytes:
        return b"/" + PREFIX + (self.prefix + key).encode()


def _axes_apart(ranks: tuple[int, ...], layout: Layout) -> tuple[Axis, ...]:
    """The axes along which there are several such groups, one beside the other."""
    whole, several = set(ranks), [axis for axis in AXES if layout.size(axis) > 1]
    return tuple(axis for axis in several if {_shifted(rank, {axis: 1}, layout) for rank in ranks} != whole)


def _stretched(key: Key, small: Layout, layout: Layout) -> Key:
    """The same group in a larger layout: along the axes that it spans, it has all ranks."""
    if small == layout:
        return key
    apart = _axes_apart(key[1], small)
    spanned = [axis for axis in AXES if axis not in apart and axis != "pipeline"]
    to = {member: layout.rank(small.coordinates(member)) for member in key[1]}
    name, ranks = _renamed(key, to)
    members = {member for rank in ranks for member in layout.members(rank, spanned)}
    return name, tuple(sorted(members))


def _renamed(key: Key, to: dict[int, int]) -> Key:
    """With other ranks, also in the name."""
    name = re.sub(r"\d+", lambda found: str(to.get(int(found[0]), found[0])), key[0])
    return name, tuple(sorted(to.values()))


def _shifted(rank: int, shift: dict[Axis, int], layout: Layout) -> int:
    place = layout.coordinates(rank)
    to = {axis: (getattr(place, axis) + by) % layout.size(axis) for axis, by in shift.items()}
    return layout.rank(place._replace(**to))


def _overrides(folder: Path, layout: Layout, settings: dict[str, Any]) -> list[str]:
    samples = layout.size("replicate", "shard")
    wanted = {
        "parallel.pipeline": layout.pipeline,
        "parallel.replicate": layout.replicate,
        "parallel.shard": layout.shard,
        "parallel.context": layout.context,
        "parallel.tensor": layout.tensor,
        "parallel.host_loader": False,
        "model.layers": max(2, layout.pipeline),
        "model.heads": max(2, layout.tensor),
        "model.hidden": 8 * max(2, layout.tensor),
        "model.vocab_multiple": 64,
        "train.steps": 2,
        "train.global_batch": samples * max(1, layout.pipeline),
        "train.micro_batch": 1,
        "checkpoint.mode": "blocking",
    }
    tiny.write_corpus(folder, documents=max(120, samples * layout.pipeline))
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return tiny.overrides(folder, folder / "run", tiny.SETTINGS | wanted | given)
