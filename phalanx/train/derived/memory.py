"""What a run keeps in memory, told before it is taken and when it was not to be had. Torch-free."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.kernel_files import parse_meminfo
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table
from phalanx.optim.config import OptimConfig
from phalanx.optim.groups import assign

# Bytes of optimizer state per parameter, all fp32: two moments, or one (CAME's factors are vectors: next to nothing).
_STATE_BYTES = {"adamw": 8, "lamb": 8, "came": 4, "muon": 4}


def standing_bytes(model: ModelConfig, optim: OptimConfig) -> dict[str, int]:
    """Memory that a run takes whatever its batch: fp32 weights, their gradients and the state of the optimizer.

    Activations are not in it: they depend on the micro-batch and on recomputation.

    Raises:
        UserError: the vocabulary is not known, or a group of the optimizer fits no parameter.
    """
    table = parameter_table(model)
    kinds = assign(optim, {name: len(parameter.shape) for name, parameter in table.items()})
    elements = sum(parameter.size for parameter in table.values())
    state = sum(_STATE_BYTES[kinds[name].kind] * parameter.size for name, parameter in table.items())
    return {"weights": 4 * elements, "gradients": 4 * elements, f"{optim.name} state": state}


def require_memory(needed: Mapping[str, int], available_bytes: int | None, where: str) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone do not fit.

    Args:
        needed: what `standing_bytes` says.
        available_bytes: memory that could be had; None where that is unknown.
        where: whose memory, for the message.

    Raises:
        UserError: they do not fit.
    """
    if available_bytes is None or sum(needed.values()) <= available_bytes:
        return
    raise UserError(
        f"the model does not fit: {described(needed)} are {units.size(sum(needed.values()))}, and {where} has "
        f"{units.size(available_bytes)} to give",
        cure=smaller_model(needed),
        field="model",
    )


def described(needed: Mapping[str, int]) -> str:
    """``weights 1.00 GiB, gradients 1.00 GiB, adamw state 2.00 GiB``."""
    return ", ".join(f"{name} {units.size(value)}" for name, value in needed.items())


def smaller_model(needed: Mapping[str, int]) -> str:
    """What makes the standing memory smaller."""
    halves = "" if any(name in needed for name in ("came state", "muon state")) else ", or optim.name=came (half state)"
    return f"make model.hidden or model.layers smaller{halves}"


def host_available_bytes() -> int | None:
    """Memory this process could still get without swapping: the system's, its control groups' and its own limits."""
    limits = [
        parse_meminfo(_read("/proc/meminfo")).get("MemAvailable"),
        *_control_group_bytes(),
        _address_space_bytes(),
    ]
    known = [value for value in limits if value is not None]
    return min(known) if known else None


@dataclass(frozen=True)
class _GroupFiles:
    """What a version of control groups calls its files: where they are, limit and use (bytes), and the cached share."""

    root: Path
    limit: str
    used: str
    cache: str


_VERSION_2 = _GroupFiles(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file")
_VERSION_1 = _GroupFiles(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def _control_group_bytes() -> Iterator[int | None]:
    """What the limits of this process's control groups leave: of its own, and of each that it lies in.

    In a container the path that the kernel tells may be that of the host, where the container sees its group as the
    root: groups that are not there are passed over, and the root is always looked at.
    """
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            files = _VERSION_2 if number == "0" else _VERSION_1
            group = Path(path.lstrip("/"))
            yield from (_left_in(files.root / nested, files) for nested in (group, *group.parents))


def _left_in(group: Path, files: _GroupFiles) -> int | None:
    """What the limit of one group leaves, None without one; its page cache counts as free.

    (Version 1 has no word for "no limit": it shows a number beyond any machine's memory, which is the least of none.)
    """
    limit, used = _read(group / files.limit).strip(), _read(group / files.used).strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    cached = [
        line.split()[1] for line in _read(group / "memory.stat").splitlines() if line.startswith(f"{files.cache} ")
    ]
    return max(int(limit) - int(used) + (int(cached[0]) if cached else 0), 0)


def _address_space_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return max(limit - int(pages[0]) * resource.getpagesize(), 0) + _unused_heap_bytes()


def _unused_heap_bytes() -> int:
    """Address space that the allocator holds already without using it (`use_huge_pages` takes much at once)."""
    unused, in_heap = 0, False
    for line in _read("/proc/self/smaps").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            in_heap = line.endswith("[heap]")
        elif in_heap and name in ("Size:", "Rss:"):
            unused += int(values[0]) * (1024 if name == "Size:" else -1024)
    return max(unused, 0)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
