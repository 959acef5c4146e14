"""The mesh: the groups of one rank over a layout's axes, each made by its members alone when it is first needed.

MegaScale (arXiv 2402.15627, section 3.5) took 1047 s to make the groups of 2,048 ranks, because each was made by all
ranks with a barrier of all of them; without those it was under 5 s. Here there is no barrier at all: the members of a
group meet on the store under a key that only they use, and other ranks do nothing. See docs/groups.md.

Making a group waits for its members. Where ranks would first use their groups in different orders, such as the pairs
of a pipeline, they must be made by `Mesh.prepare`: it does so in an order on which all ranks agree, so that no two
ranks wait for each other in different groups.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from phalanx.core.layout import AXES, Axis, Layout
from phalanx.core.phases import Phases
from phalanx.parallel import process_groups
from phalanx.parallel.group import Group, RankPlace, Waits
from phalanx.telemetry.spans import Recorder

_Key = tuple[str, tuple[int, ...]]


class Mesh:
    """The groups of `rank`; implements `phalanx.parallel.group.Groups`."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        # where members meet, see `phalanx.parallel.rendezvous.open_store`; each attempt needs a fresh one
        store: Store,
        device: torch.device,  # where the tensors of collectives are: NCCL on CUDA, gloo on a CPU
        timeout_s: float = 600.0,  # longest wait in a collective, seconds, from `after_first_step` on
        first_timeout_s: float = 1800.0,  # the same until then, and for members to come when a group is made
        *,
        host: str | None = None,  # name of this host, for messages; its own by default
        make: process_groups.Maker | None = None,  # makes one backend; torch's by default
        phases: Phases | None = None,  # where the seconds that each group took are added, as ``mesh/<axes or name>``
        waits: Waits | None = None,  # where it is counted how long this rank waits for others
        recorder: Recorder | None = None,  # where collectives are recorded
    ) -> None:
        layout.coordinates(rank)  # raises for a rank that the layout does not have
        self._layout, self._rank, self._store, self._device = layout, rank, store, device
        self._timeout_s, self._later_timeout_s = first_timeout_s, timeout_s
        self._place = RankPlace(rank, host or socket.gethostname(), layout)
        self._make = make or process_groups.maker(device)
        self.phases, self._waits, self._recorder = phases or Phases(), waits, recorder
        self._lock = threading.Lock()
        self._groups: dict[tuple[_Key, tuple[Axis, ...]], Group] = {}
        self._backends: dict[_Key, Any] = {}
        self._registered: dict[_Key, ProcessGroup] = {}

    @property
    def layout(self) -> Layout:
        """Which rank sits where."""
        return self._layout

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def device(self) -> torch.device:
        """Where the tensors of collectives are."""
        return self._device

    def group(self, *axes: Axis) -> Group:
        """The group of this rank over `axes`, in any order; of one rank where none of them has more.

        Axes of one rank change nothing, so ``group("shard", "context")`` shares the torch process group of
        ``group("shard")`` where context is 1; what each has carried is counted apart.
        """
        used = [axis for axis in AXES if axis in axes and self._layout.size(axis) > 1]
        return self._get(("axes:" + "·".join(used), self._layout.members(self._rank, axes)), axes)

    def named(self, name: str, ranks: Sequence[int], axes: Sequence[Axis] = ()) -> Group:
        """A group of `ranks`, this one among them, that all of them ask for under `name`.

        Groups of different names or different ranks have nothing in common, also if their members are the same.

        Raises:
            ValueError: this rank is not among `ranks`, or one is there twice.
        """
        if self._rank not in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks = {list(ranks)}: rank {self._rank} must be among them, and none of them twice")
        return self._get(("named:" + name, tuple(ranks)), tuple(axes))

    def prepare(self, *groups: Group) -> None:
        """Make these groups now, or all that have been asked for; every member must do so too.

        Raises:
            CollectiveError: not all members of a group came in time.
        """
        wanted = {id(group) for group in groups} if groups else None
        chosen = [(key, g) for (key, _), g in self._groups.items() if wanted is None or id(g) in wanted]

        def order(pair: tuple[_Key, Group]) -> tuple[bool, str, str]:
            # Groups over axes first. The others by a digest: in the order of their ranks the pairs of a pipeline would
            # be made one after another, each waiting for the one before; in an arbitrary order few wait for few.
            name = pair[0][0]
            return name.startswith("named:"), name if name.startswith("axes:") else "", _digest(pair[0])

        for _, group in sorted(chosen, key=order):
            if group.size > 1:
                _ = group.backend

    def after_first_step(self) -> None:
        """From now on `timeout_s` is the longest wait, also in groups that are there already."""
        self._timeout_s = self._later_timeout_s
        for backend in self._backends.values():
            process_groups.set_timeout(backend, self._timeout_s)

    def registered(self, group: Group) -> str:
        """The name under which torch finds `group`, for operators that take a name; made if it is not there yet."""
        key = next(key for (key, _), known in self._groups.items() if known is group)
        if key not in self._registered:
            place = meeting_place(*key)
            store = PrefixStore(place, self._store)
            self._registered[key] = process_groups.register(group.backend, store, group.ranks, place, self._device)
        return self._registered[key].group_name

    def close(self) -> None:
        """Let go of all groups, without meeting or waiting for anyone; using one later raises `CollectiveError`."""
        for process_group in self._registered.values():
            process_groups.unregister(process_group)
        self._registered.clear()
        busy = {key for (key, _), group in self._groups.items() if group.is_busy}
        for group in self._groups.values():
            group.forget()
        while self._backends:
            key, backend = self._backends.popitem()
            process_groups.let_go(backend, is_busy=key in busy)

    def _get(self, key: _Key, axes: tuple[Axis, ...]) -> Group:
        if (key, axes) not in self._groups:
            ranks = key[1]
            make = None if len(ranks) == 1 else lambda: self._backend(key)
            index, where = ranks.index(self._rank), (self._waits, self._recorder)
            self._groups[key, axes] = Group(ranks, index, make, axes, self._place, *where)
        return self._groups[key, axes]

    def _backend(self, key: _Key) -> Any:
        name, ranks = key
        with self._lock:
            if key not in self._backends:
                with self.phases.phase(f"mesh/{name.partition(':')[2]}"):
                    place = meeting_place(*key)
                    store = PrefixStore(place, self._store)
                    store.set_timeout(timedelta(seconds=self._timeout_s))  # how long a member waits for others' keys
                    index = ranks.index(self._rank)
                    self._backends[key] = self._make(store, index, len(ranks), self._timeout_s, place)
        return self._backends[key]


def meeting_place(name: str, ranks: tuple[int, ...]) -> str:
    """Where the members of a group meet: short whatever their number, and of this group alone."""
    return f"{name}/{_digest((name, ranks))}"


def _digest(key: _Key) -> str:
    name, ranks = key
    return hashlib.blake2b(f"{name}/{','.join(map(str, ranks))}".encode(), digest_size=8).hexdigest()


class GroupCopies:
    """The members of a data-parallel group over `axes` as `phalanx.core.peers.Copies`; its back end is on `device`."""

    def __init__(self, group: Group, axes: tuple[Axis, ...], device: torch.device) -> None:
        self.axes, self._group, self._device = axes, group, device

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self._group.index

    @property
    def size(self) -> int:
        """Members."""
        return self._group.size

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give the contiguous `tensor` of member `source` to all, in place."""
        carried = tensor.to(self._device)
        self._group.broadcast(carried, source).wait()
        if carried is not tensor and source != self.index:
            tensor.copy_(carried)
