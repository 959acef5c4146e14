"""Where the ranks of a layout are: threads, which do things in the order of NCCL, or processes, over gloo."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from phalanx.core.layout import Layout
from phalanx.launch.environment import Worker
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.process_groups import Maker
from support.fake_nccl import FakeNccl
from support.parity.runs import CPU, Piece, on_rank, whole
from support.parity.task import Case, Seen
from support.processes import from_processes, hand_back, meet

T = TypeVar("T")
TIMEOUT_S = 120.0


def in_threads(layout: Layout, body: Callable[[int, Store], T]) -> list[T]:
    """Run ``body(rank, store)`` once per rank at the same time; what each returned, or the first error."""
    store = HashStore()
    results: list[Any] = [None] * layout.world_size
    errors: list[tuple[int, BaseException]] = []
    order = itertools.count()

    def main(rank: int) -> None:
        try:
            results[rank] = body(rank, store)
        except BaseException as error:
            errors.append((next(order), error))

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(layout.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results


def by_threads(cases: Sequence[Case], make: Maker | None = None) -> list[Seen]:
    """What the ranks of a layout did in each of `cases`, which are of one layout, as threads of this process.

    Args:
        make: makes one member's process group; by default it does things as NCCL does.
    """
    make = make or FakeNccl().make
    pieces = in_threads(cases[0].spread.layout, lambda rank, store: _pieces(cases, rank, store, make))
    return [whole(ranks) for ranks in zip(*pieces, strict=True)]


def by_processes(cases: Sequence[Case]) -> list[Seen]:
    """The same as real processes, started as `phalanx train` starts them.

    Raises:
        RuntimeError: a rank failed; it has said why.
    """
    layout = cases[0].spread.layout
    pieces = from_processes(layout.world_size, __name__, cases, layout)
    return [whole(ranks) for ranks in zip(*pieces, strict=True)]


def process_rank(worker: Worker, cases: Sequence[Case], folder: str) -> None:
    """One of the processes."""
    store = meet(worker, TIMEOUT_S)
    hand_back(worker, folder, _pieces(cases, worker.rank, store))
    Mesh(Layout(replicate=worker.world_size), worker.rank, store, CPU).named("end", range(worker.world_size)).barrier()


def _pieces(cases: Sequence[Case], rank: int, store: Store, make: Maker | None = None) -> list[Piece]:
    pieces = []
    for number, case in enumerate(cases):
        mesh = Mesh(case.spread.layout, rank, PrefixStore(str(number), store), CPU, TIMEOUT_S, TIMEOUT_S, make=make)
        pieces.append(on_rank(case, mesh))
        mesh.close()
    return pieces
