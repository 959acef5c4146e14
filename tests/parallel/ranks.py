"""Several ranks as threads of this process, each with its own groups over one in-memory store, which do things in the
order of NCCL; or over gloo. For what needs real processes (start-up, faults, fork) see tests/launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from support.fake_nccl import FakeNccl
from support.parity.places import in_threads
from torch._C._distributed_c10d import PrefixStore

from phalanx.core.layout import Axis, Layout
from phalanx.parallel.group import Group
from phalanx.parallel.pipeline.schedules import Table
from phalanx.parallel.process_groups import Maker

T = TypeVar("T")
TIMEOUT_S = 120.0


def peak_live(table: Table, rank: int) -> int:
    """Most forward passes of a rank's chunks whose activations it holds at a time: until all gradients are made."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate((change[action.kind] for action in table.actions[rank]), initial=0))


class ThreadGroups:
    """The groups of one rank-thread: `group(*axes)` gives its `Group` over these axes, made once."""

    def __init__(self, layout: Layout, rank: int, store: Any, make: Maker) -> None:
        self.layout, self.rank, self.store, self._make = layout, rank, store, make
        self._groups: dict[Any, Group] = {}

    def group(self, *axes: Axis) -> Group:
        return self.named("·".join(axes), self.layout.members(self.rank, axes), axes)

    def named(self, name: str, ranks: Sequence[int], axes: Sequence[Axis] = ()) -> Group:
        """A group of any ranks, all of which ask for it under one name; one group per name and members."""
        key = (name, tuple(ranks))
        if key not in self._groups:
            index = list(ranks).index(self.rank)
            prefix = PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self.store)

            def make() -> Any:
                return self._make(prefix, index, len(ranks), TIMEOUT_S, name) if len(ranks) > 1 else None

            self._groups[key] = Group(ranks, index, make, axes)
        return self._groups[key]

    def close(self) -> None:
        """Let go of the sockets: a process has only so many, and there are many tests."""
        for group in self._groups.values():
            group.forget()


def run_ranks(layout: Layout | int, body: Callable[[ThreadGroups], T], make: Maker | None = None) -> list[T]:
    """Run `body` once per rank, at the same time, and return what each returned; the first error is raised here.

    Args:
        make: makes one member's process group; by default it does things as NCCL does.
    """
    layout = Layout(replicate=layout) if isinstance(layout, int) else layout
    members: list[ThreadGroups] = []
    make = make or FakeNccl().make

    def main(rank: int, store: Any) -> T:
        members.append(ThreadGroups(layout, rank, store, make))
        return body(next(groups for groups in members if groups.rank == rank))

    try:
        return in_threads(layout, main)
    finally:
        for groups in members:
            groups.close()
