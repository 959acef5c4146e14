"""Several ranks as threads of this process, each with its own gloo groups over one in-memory store: fast, and real
communication. For what needs real processes (start-up, faults, fork) see tests/launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from support.parity.places import in_threads
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo

from phalanx.core.layout import Axis, Layout
from phalanx.parallel.group import Group

T = TypeVar("T")
TIMEOUT = timedelta(seconds=30)


class OneAtATime:
    """A process group that does what is started in it as NCCL does: in that order, each when the one before is done."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._queue = inner, ThreadPoolExecutor(1)

    def name(self) -> str:
        return "one at a time"

    def __getattr__(self, operation: str) -> Any:
        def start(*arguments: Any) -> Any:
            return _Queued(self._queue.submit(lambda: getattr(self._inner, operation)(*arguments).wait()))

        return start


class _Queued:
    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def wait(self) -> None:
        self._result.result()

    def is_completed(self) -> bool:
        return self._result.done()


class ThreadGroups:
    """The groups of one rank-thread: `group(*axes)` gives its `Group` over these axes, made once."""

    def __init__(self, layout: Layout, rank: int, store: Any, *, in_order: bool = False) -> None:
        self.layout, self.rank, self.store, self._in_order = layout, rank, store, in_order
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
                made = ProcessGroupGloo(prefix, index, len(ranks), TIMEOUT) if len(ranks) > 1 else None
                return OneAtATime(made) if self._in_order else made

            self._groups[key] = Group(ranks, index, make, axes)
        return self._groups[key]

    def close(self) -> None:
        """Let go of the sockets: a process has only so many, and there are many tests."""
        for group in self._groups.values():
            group.forget()


def run_ranks(layout: Layout | int, body: Callable[[ThreadGroups], T], *, in_order: bool = False) -> list[T]:
    """Run `body` once per rank, at the same time, and return what each returned; the first error is raised here.

    Args:
        in_order: groups are `OneAtATime`.
    """
    layout = Layout(replicate=layout) if isinstance(layout, int) else layout
    members: list[ThreadGroups] = []

    def main(rank: int, store: Any) -> T:
        members.append(ThreadGroups(layout, rank, store, in_order=in_order))
        return body(next(groups for groups in members if groups.rank == rank))

    try:
        return in_threads(layout, main)
    finally:
        for groups in members:
            groups.close()
