"""What steps take beyond what the model explains, and how far predictions are off: learnt from published steps.

The numbers come from `phalanx.plan.validate.left_out`, which learns them from the tables that nobody had looked at when
the planner was made; a test holds them against it.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.load import EFFICIENCY
from phalanx.plan.types import Job, Residual

LEARNT = Residual(kernels=3.63, spread=0.115)
"""Of a program and a cluster that nobody has measured."""

OWN_SPREAD = 0.056
"""Of a program on a cluster whose efficiency is known: how far steps of one publication lie around their median."""

_DEVICES = frozenset(("a100_sxm_80gb", "h100_sxm", "h200_sxm"))
"""What it is learnt on, and the one whose cores are the same. Devices that were measured have no such residual."""

_LEAST, _MOST = 0.1, 2.0


def with_residual(job: Job, cluster: Cluster) -> Job:
    """The same with what is to be added on `cluster`, unless it says so itself."""
    return job if job.residual is not None else replace(job, residual=residual_of(cluster))


def residual_of(cluster: Cluster, efficiency: float | None = None) -> Residual:
    """What is to be added to predictions on `cluster`.

    Args:
        efficiency: of a program there, as `phalanx plan validate --tables FILE` says; None: what the cluster's file
            says, if it does.

    Raises:
        UserError: the efficiency cannot be right.
    """
    learnt = LEARNT if cluster.device.name in _DEVICES else Residual()
    if efficiency is None:
        if EFFICIENCY not in cluster.numbers:
            return learnt
        efficiency = cluster.value(EFFICIENCY)
    if not _LEAST <= efficiency <= _MOST:
        raise UserError(
            "is no share of the predicted speed",
            cure=f"give predicted over measured seconds, from {_LEAST} to {_MOST:g}, such as 0.93 "
            "(phalanx plan validate --tables FILE says it of your own steps)",
            field="--efficiency",
            value=efficiency,
        )
    return Residual(learnt.kernels, efficiency, OWN_SPREAD if learnt.spread else 0.0)
