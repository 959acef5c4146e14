"""What the kernel shows of this host below /proc and /sys: small files, the processor, free memory.

Memory that is to be had heeds the limits of control groups of either version.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def read_text(path: Path) -> str | None:
    """A small file of the kernel, stripped; None where it is missing or does not answer."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """A file of the kernel that holds one number; else None."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def list_folder(folder: Path) -> list[Path]:
    """Its entries in order of name; none where it is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def boot_id(proc: Path = PROC) -> str:
    """Changes with every boot; empty where the system does not have it."""
    return read_text(proc / "sys/kernel/random/boot_id") or ""


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def parse_cpu_ticks(stat: str) -> tuple[int, int] | None:
    """Time of all cores since the boot in clock ticks, from /proc/stat (see proc(5)): busy, and all.

    Busy are the hypervisor's other guests, too; guests of this host are within what programs used.
    """
    words = stat.partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, idle, wait, interrupt, soft, stolen = map(int, words[1:9])
    busy = user + nice + system + interrupt + soft + stolen
    return busy, busy + idle + wait


def own_groups(proc: Path = PROC) -> dict[str, str]:
    """This process's control groups: the path in each hierarchy by the name of its controller; version 2 has none."""
    found = {}
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


@dataclass(frozen=True)
class Mount:
    """A file system at a place of the tree."""

    root: str  # which part of it is there
    point: str
    options: tuple[str, ...]  # of this place, and after them those of the file system
    kind: str  # such as ``ext4``


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of /proc/self/mountinfo (see proc(5)), in the order in which they were made."""
    found = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        words, more = before.split(), after.split()
        if separator and len(words) >= 6 and len(more) >= 3:
            root, point = (word.replace("\\040", " ") for word in words[3:5])
            found.append(Mount(root, point, (*words[5].split(","), *more[2].split(",")), more[0]))
    return found


def cpu_line(name: str) -> str:
    """What ``/proc/cpuinfo`` has first under `name`, such as ``model name``; empty where there is nothing."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    # Names of the files: where they are, limit and use (bytes), and in memory.stat the cache of files.
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
    """Memory that could be taken now without swapping; None: not known."""
    on_host = parse_meminfo(read_text(proc / "meminfo") or "").get("MemAvailable")
    limits = [on_host]
    own = own_groups(proc)
    for controller, files in _FILES.items():
        if controller in own:
            # The limits of this process's group and of each that it lies in. In a container the path may be that of the
            # host, where the container sees its group as the root: groups that are not there are passed over, and the
            # root is always looked at.
            group = Path(own[controller].lstrip("/"))
            limits += [_left_in(groups / files.root / nested, files) for nested in (group, *group.parents)]
    known = [value for value in limits if value is not None]
    return min(known) if known else None


def _left_in(group: Path, files: _Files) -> int | None:
    # Version 1 shows "no limit" as a number beyond any machine's memory, which is never the least of all limits.
    limit, used = read_number(group / files.limit), read_number(group / files.used)
    if limit is None or used is None:
        return None
    stat = dict(line.split(maxsplit=1) for line in (read_text(group / "memory.stat") or "").splitlines() if " " in line)
    return max(limit - used + sum(int(stat.get(name, 0)) for name in files.cached), 0)
