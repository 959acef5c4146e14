"""Several ranks as threads of this process, each with its own gloo groups over one in-memory store: fast, and real
communication. For what needs real processes (start-up, faults, fork) see tests/launch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroupGloo

from phalanx.core.layout import Axis, Layout
from phalanx.parallel.group import Group

T = TypeVar("T")
TIMEOUT = timedelta(seconds=30)


class ThreadGroups:
    """The groups of one rank-thread: `group(*axes)` gives its `Group` over these axes, made once."""

    def __init__(self, layout: Layout, rank: int, store: Any) -> None:
        self.layout, self.rank, self._store = layout, rank, store
        self._groups: dict[Any, Group] = {}

    def group(self, *axes: Axis) -> Group:
        return self.named("·".join(axes), self.layout.members(self.rank, axes), axes)

    def named(self, name: str, ranks: Sequence[int], axes: Sequence[Axis] = ()) -> Group:
        """A group of any ranks, all of which ask for it under one name; one group per name and members."""
        key = (name, tuple(ranks))
        if key not in self._groups:
            index = list(ranks).index(self.rank)
            prefix = PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self._store)
            self._groups[key] = Group(
                ranks,
                index,
                lambda: ProcessGroupGloo(prefix, index, len(ranks), TIMEOUT) if len(ranks) > 1 else None,
                axes,
            )
        return self._groups[key]

    def close(self) -> None:
        """Let go of the sockets: a process has only so many, and there are many tests."""
        for group in self._groups.values():
            group.forget()


def run_ranks(layout: Layout | int, body: Callable[[ThreadGroups], T]) -> list[T]:
    """Run `body` once per rank, at the same time, and return what each returned; the first error is raised here."""
    layout = Layout(replicate=layout) if isinstance(layout, int) else layout
    store = HashStore()
    results: list[Any] = [None] * layout.world_size
    errors: list[tuple[int, BaseException]] = []
    order = itertools.count()

    members = [ThreadGroups(layout, rank, store) for rank in range(layout.world_size)]

    def main(rank: int) -> None:
        try:
            results[rank] = body(members[rank])
        except BaseException as error:
            errors.append((next(order), error))

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(layout.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for groups in members:
        groups.close()
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results
