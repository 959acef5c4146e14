"""How far a part of a step's time can be trusted: as far as the weakest number that it rests on."""

from __future__ import annotations

from functools import lru_cache

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.step.constants import IN_STEP
from phalanx.plan.types import Job, Mark, weakest

_PRODUCTS = frozenset(("attention_projections", "mlp", "merged_in", "merged_out", "head", "experts", "router"))
_NUMBERS = {
    "compute/host": ("device", "host_launch_s"),
    "compute/gaps": ("device", "kernel_gap_s"),
    "context": ("cluster", "network.nic_bytes_per_s"),
    "pipeline/sends": ("cluster", "network.nic_bytes_per_s"),
    "data": ("cluster", "network.achieved_ratio"),
    "loader": ("cluster", "loader.step_s"),
    "stragglers": ("cluster", "stragglers.rank_sigma_ratio"),
    "sync": ("cluster", "network.latency_s"),
}
_COLLECTIVES = {"tensor": "all_gather", "expert": "all_to_all"}


class Marks:
    """How far the parts of a job on a cluster can be trusted; few numbers stand behind many parts."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job, self._cluster = job, cluster
        self._depends_on = job.software.fused_attention, cluster.hosts == 1
        self._known: dict[tuple[str, str], tuple[Mark, str]] = {}

    def of(self, path: str) -> tuple[Mark, str]:
        """The mark of a part and the source of its weakest number."""
        if path == "efficiency":
            return "assumed", "--efficiency, as given"
        number = _number(path, *self._depends_on)
        if path == "loader" and not self._job.software.loader_hidden and IN_STEP in self._cluster.numbers:
            number = ("cluster", IN_STEP)
        if number not in self._known:
            mark, source = self._look_up(*number)
            self._known[number] = weakest([mark]), source
        return self._known[number]

    def _look_up(self, where: str, what: str) -> tuple[Mark, str]:
        if where == "cluster":
            return self._cluster.mark_of(what)
        return self._cluster.device.mark_of(what, self._job.precision)


@lru_cache(maxsize=512)
def _number(path: str, fused_attention: bool, one_host: bool) -> tuple[str, str]:
    """The number, of ``device`` or ``cluster``, that a part rests on."""
    top = path.split("/")[0]
    for prefix in (path, top):
        if prefix in _NUMBERS:
            where, key = _NUMBERS[prefix]
            return (where, "all_reduce") if one_host and key.startswith("network.") else (where, key)
    if top in _COLLECTIVES:
        return "cluster", _COLLECTIVES[top]
    if path == "compute/attention" and fused_attention:
        return "device", "attention"
    if path.removeprefix("compute/") in _PRODUCTS or path in ("compute/attention", "pipeline/bubble"):
        return "device", "gemm"
    return "device", "stream"
