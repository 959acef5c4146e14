"""Small files in which the kernel tells of a host, below /proc and /sys. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def read_text(path: Path) -> str | None:
    """A small file of the kernel, stripped; None where it is not there or does not answer."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """A file of the kernel that holds one number; None where it does not."""
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
    """Changes with every boot; empty where the system does not tell."""
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
    """Time of all cores since the boot in clock ticks, from /proc/stat (see proc(5)): busy, and all; None: not told.

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
    """A file system at a place of the tree.

    Attributes:
        root: which part of it is there.
        options: of this place, and after them those of the file system.
        kind: such as ``ext4``.
    """

    root: str
    point: str
    options: tuple[str, ...]
    kind: str


def parse_mounts(mountinfo: str) -> list[Mount]:
    """What /proc/self/mountinfo tells (see proc(5)), in the order in which they were mounted."""
    found = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        words, more = before.split(), after.split()
        if separator and len(words) >= 6 and len(more) >= 3:
            root, point = (word.replace("\\040", " ") for word in words[3:5])
            found.append(Mount(root, point, (*words[5].split(","), *more[2].split(",")), more[0]))
    return found
