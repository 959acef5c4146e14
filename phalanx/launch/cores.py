"""Which cores of the host each local rank computes on.

A share is a run of whole physical cores in the order of NUMA nodes, as many for every rank: ranks wait for each other
at every collective, so a larger share would only wait longer. Hardware threads of one core stay together, and only one
arithmetic thread is started per core, because both threads of a core share its vector units.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.host import read_number

MOST_PER_CPU = 16
_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Core:
    """One physical core: where it sits, and the numbers of its hardware threads."""

    node: int
    package: int
    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """Hardware threads that one rank runs on (None: all, ranks outnumber cores), and how many arithmetic threads."""

    cpus: frozenset[int] | None
    threads: int


def wanted_threads(environ: Mapping[str, str]) -> int:
    """Arithmetic threads that ``OMP_NUM_THREADS`` asks for, the first number of a list; 0: it asks for none."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else 0


def require_threads(threads: int, field: str) -> None:
    """UserError: so many arithmetic threads would take what others need, and be slower than one per core."""
    cpus = os.cpu_count() or 1
    if threads > MOST_PER_CPU * cpus:
        problem = f"is more than {MOST_PER_CPU} times the {cpus} CPUs of this machine"
        raise UserError(problem, cure=f"set it to {cpus} or less", field=field, value=threads)


def ignored_threads(environ: Mapping[str, str]) -> str:
    """What is wrong with ``OMP_NUM_THREADS``, so that it is not heeded; empty: nothing, or it is not set."""
    given = environ.get("OMP_NUM_THREADS", "")
    is_heeded = wanted_threads(environ) or not given.strip()
    return "" if is_heeded else f"OMP_NUM_THREADS = {given!r} is no number of threads and is ignored"


def read_cores(cpus: Iterable[int], system: Path = _SYSTEM) -> list[Core]:
    """The physical cores that `cpus` belong to, by NUMA node, package and number, holding those of `cpus` alone.

    A CPU of which the system says nothing counts as a core of its own.
    """
    nodes = {}
    for folder in (system / "node").glob("node[0-9]*"):
        for link in folder.glob("cpu[0-9]*"):
            nodes[int(link.name.removeprefix("cpu"))] = int(folder.name.removeprefix("node"))
    found: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(cpus):
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        number = _number(topology / "core_id", cpu)
        found.setdefault((nodes.get(cpu, 0), _number(topology / "physical_package_id", 0), number), []).append(cpu)
    return sorted(Core(*place, tuple(numbers)) for place, numbers in found.items())


def share_cores(cores: list[Core], count: int) -> list[Share]:
    """Divide `cores` among `count` ranks; what does not divide is left to helpers such as loaders."""
    each = len(cores) // count
    if each == 0:
        return [Share(None, 1)] * count
    runs = (cores[rank * each : (rank + 1) * each] for rank in range(count))
    return [Share(frozenset(cpu for core in run for cpu in core.cpus), each) for run in runs]


def local_shares(count: int) -> list[Share]:
    """What each of `count` ranks gets of the cores that this process may use."""
    return share_cores(read_cores(allowed_cpus()), count)


def allowed_cpus() -> frozenset[int]:
    """Hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def bind(share: Share) -> None:
    """Keep this process, and those it starts, on its share; nothing where the system cannot."""
    if share.cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cpus)


def bind_started_elsewhere(local_rank: int, local_world_size: int) -> Share:
    """Bind a worker that torchrun or srun started, unless they did: then its mask is smaller than its parent's."""
    mine = allowed_cpus()
    if hasattr(os, "sched_getaffinity") and mine < frozenset(os.sched_getaffinity(os.getppid())):
        return Share(mine, len(read_cores(mine)))
    share = local_shares(local_world_size)[local_rank]
    bind(share)
    return share


def _number(path: Path, default: int) -> int:
    number = read_number(path)
    return default if number is None else number
