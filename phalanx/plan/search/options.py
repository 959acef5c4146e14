"""Where layouts are searched, and what is tried of each choice when nobody says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.plan.search.constraints import CHOICES, Constraints
from phalanx.plan.types import Job

if TYPE_CHECKING:
    from phalanx.plan.hardware import Cluster

# The config's default. Sizes hardly matter to a step's time; who wants to know gives several.
_BUCKET_BYTES = 25_000_000


@dataclass(frozen=True)
class Machine:
    """Devices that a job is to be spread over.

    Attributes:
        devices: all of them are used.
        memory_bytes: of each.
        kind: what they are; fused overlap needs GPUs.
    """

    devices: int
    devices_per_host: int
    memory_bytes: float
    kind: Literal["gpu", "cpu"] = "gpu"

    @classmethod
    def of(cls, cluster: Cluster) -> Machine:
        """All devices of `cluster`."""
        device = cluster.device
        return cls(cluster.devices, cluster.devices_per_host, device.memory_bytes, device.kind)


def options_of(job: Job, machine: Machine, asked: Constraints) -> Mapping[str, tuple[Any, ...]]:
    """What is tried of each choice: what `asked` names, else all that `phalanx train` can run on `machine`.

    A program other than ours is searched with the same choices, and with recomputed attention alone, where it does not
    keep scores on the chip.
    """
    ours: dict[str, tuple[Any, ...]] = {
        "schedule": CHOICES["schedule"],
        "zero": CHOICES["zero"],
        "recompute": ("none", "elementwise", "mlp", "full"),
        "sequence_parallel": (True,),
        "tensor_overlap": ("none", "chunked", "fused") if machine.kind == "gpu" else ("none", "chunked"),
        "context_method": CHOICES["context_method"],
        "bucket_bytes": (_BUCKET_BYTES,),
    }
    if not job.software.fused_attention:
        ours["recompute"] = ("none", "attention", "full")
    return {**ours, **asked.choices}
