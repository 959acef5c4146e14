"""How much memory is to be had: on this host, and within the limits of control groups of either version. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.kernel_files import PROC, own_groups, parse_meminfo, read_number, read_text

GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    """What a version of control groups calls its files: where they are, limit and use (bytes), the cache of files."""

    root: str
    limit: str
    used: str
    cached: tuple[str, ...]


# Cached files are given up for others' memory. "file" and "cache" would count what is in a tmpfs or a memfd as well,
# which is not: the two lists of files leave that out. (The names of version 1 with "total" are those of the hierarchy.)
_FILES = {
    "": _Files(".", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": _Files(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Memory that could be taken now without swapping; None: not known.

    Args:
        proc, groups: where the kernel tells of the host and of control groups.
    """
    on_host = parse_meminfo(read_text(proc / "meminfo") or "").get("MemAvailable")
    limits = [on_host, *_in_groups(proc, groups)]
    known = [value for value in limits if value is not None]
    return min(known) if known else None


def _in_groups(proc: Path, groups: Path) -> Iterator[int | None]:
    """What the limits of this process's control groups leave: of its own, and of each that it lies in.

    In a container the path that the kernel tells may be that of the host, where the container sees its group as the
    root: groups that are not there are passed over, and the root is always looked at.
    """
    own = own_groups(proc)
    for controller, files in _FILES.items():
        if controller in own:
            group = Path(own[controller].lstrip("/"))
            yield from (_left_in(groups / files.root / nested, files) for nested in (group, *group.parents))


def _left_in(group: Path, files: _Files) -> int | None:
    """What the limit of one group leaves, None without one.

    (Version 1 has no word for "no limit": it shows a number beyond any machine's memory, which is the least of none.)
    """
    limit, used = read_number(group / files.limit), read_number(group / files.used)
    if limit is None or used is None:
        return None
    told = dict(line.split(maxsplit=1) for line in (read_text(group / "memory.stat") or "").splitlines() if " " in line)
    return max(limit - used + sum(int(told.get(name, 0)) for name in files.cached), 0)
