"""What a run keeps in memory whatever its batch, and what there is."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.host import PROC, available_bytes, read_text
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table
from phalanx.optim.config import OptimConfig
from phalanx.optim.groups import assign, moment_bytes

# fp32 moments, or for AdamW of `optim.state_bits` (CAME's factors are vectors: next to nothing).
_MOMENTS = {"adamw": 2, "lamb": 2, "came": 1, "muon": 1}


def standing_bytes(model: ModelConfig, optim: OptimConfig) -> dict[str, int]:
    """Memory that a run takes whatever its batch: fp32 weights, their gradients and the state of the optimizer.

    Raises:
        UserError: the vocabulary is not known, or a group of the optimizer fits no parameter.
    """
    table = parameter_table(model)
    kinds = assign(optim, {name: len(parameter.shape) for name, parameter in table.items()})
    elements = sum(parameter.size for parameter in table.values())
    bits = optim.state_bits
    state = sum(_MOMENTS[kinds[name].kind] * moment_bytes(parameter.shape, bits) for name, parameter in table.items())
    return {"weights": 4 * elements, "gradients": 4 * elements, f"{optim.name} state": state}


def require_memory(needed: Mapping[str, int], available_bytes: int | None, where: str) -> None:
    """Refuse a run whose `standing_bytes` alone do not fit into the memory of `where`; None: that is unknown."""
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
    less = ""
    if any(needed.get(f"{name} state", 0) > needed.get("weights", 0) for name in ("adamw", "lamb")):
        less = ", or optim.name=came (half state)"
    if less and "adamw state" in needed:
        less = ", or optim.state_bits=8 (a quarter of the state)" + less
    return f"make model.hidden or model.layers smaller{less}"


def host_available_bytes() -> int | None:
    """Memory this process could still get without swapping: the system's, its control groups' and its own limits."""
    limits = [available_bytes()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = (read_text(PROC / "self/statm") or "").split()
    if limit != resource.RLIM_INFINITY and pages:
        # Address space that the allocator holds without using it is free: `use_huge_pages` takes much at once.
        unused, in_heap = 0, False
        for line in (read_text(PROC / "self/smaps") or "").splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                in_heap = line.endswith("[heap]")
            elif in_heap and name in ("Size:", "Rss:"):
                unused += int(values[0]) * (1024 if name == "Size:" else -1024)
        limits.append(max(limit - int(pages[0]) * resource.getpagesize(), 0) + max(unused, 0))
    return min((value for value in limits if value is not None), default=None)
