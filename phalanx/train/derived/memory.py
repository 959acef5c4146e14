"""What a run keeps in memory, told before it is taken and when it was not to be had. Torch-free."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.free_memory import available_bytes
from phalanx.core.kernel_files import PROC, read_text
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
    limits = [available_bytes(), _address_space_bytes()]
    known = [value for value in limits if value is not None]
    return min(known) if known else None


def _address_space_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = (read_text(PROC / "self/statm") or "").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return max(limit - int(pages[0]) * resource.getpagesize(), 0) + _unused_heap_bytes()


def _unused_heap_bytes() -> int:
    """Address space that the allocator holds already without using it (`use_huge_pages` takes much at once)."""
    unused, in_heap = 0, False
    for line in (read_text(PROC / "self/smaps") or "").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            in_heap = line.endswith("[heap]")
        elif in_heap and name in ("Size:", "Rss:"):
            unused += int(values[0]) * (1024 if name == "Size:" else -1024)
    return max(unused, 0)
