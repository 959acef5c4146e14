"""What a job does at each moment, as activities of its pipeline stages, and which values of metrics they cause.

A step of 3D parallelism: stage s waits for its first micro-batch, computes, waits for the others to drain (both waits
grow with s), then all stages exchange gradients and update. Waiting for a peer means a kernel that spins: the GPU is
busy by its duty cycle, and its tensor cores rest. Activities are shares of time, averaged over one second, on a grid of
`FINE_PER_S` a second, so that clocks and scrapes may be off by parts of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

FINE_PER_S = 4

ACTIVITIES = ("compute", "point_to_point", "gradients", "update", "wait", "alive", "load", "save", "boot")
"""Arithmetic; activations between stages; gradient exchange; optimizer; spinning for a peer; processes exist; data are
read; a checkpoint is written; processes start."""

_COMPUTE, _P2P, _GRADIENTS, _UPDATE, _WAIT, _ALIVE, _LOAD, _SAVE, _BOOT = range(len(ACTIVITIES))

_UPDATE_SHARE = 0.03


@dataclass(frozen=True)
class JobLoad:
    """The shape of a step.

    Attributes:
        step_s: seconds of a healthy step.
        stages: of the pipeline.
        bubble: share of the step that the last stage waits at each of its ends.
        gradient_share: of the step, in which gradients are exchanged and nothing hides it.
        step_jitter: standard deviation of a step's length over its mean.
    """

    step_s: float
    stages: int
    bubble: float
    gradient_share: float
    step_jitter: float


@dataclass(frozen=True)
class Phase:
    """What the job does for a while instead of plain training.

    Attributes:
        kind: ``evaluation`` (forward only), ``checkpoint``, ``restart`` (no processes, then they start), ``hang`` (all
            spin), ``slow_compute`` and ``slow_gradients`` (all wait for one), ``stopped``.
        start_s: since the table's first sample.
        end_s: the same.
        slowdown: how many times as long a step takes, of the slow kinds.
    """

    kind: str
    start_s: float
    end_s: float
    slowdown: float = 1.0


def activities(
    load: JobLoad, phases: Sequence[Phase], duration_s: float, margin_s: float, random: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What stages do, and what that stage's machine does that the others wait for while steps are slow by compute.

    Args:
        phases: of which later ones win where they overlap.
        margin_s: so much is made before the first and after the last sample.

    Returns:
        two of shape [stages, activities, moments]; the first moment is at ``-margin_s``.
    """
    moments = int((duration_s + 2 * margin_s) * FINE_PER_S)
    of_stages = np.zeros((load.stages, len(ACTIVITIES), moments), np.float32)
    of_slow = np.zeros_like(of_stages)
    at_s, end_s = -margin_s, duration_s + margin_s
    while at_s < end_s:
        phase = _phase_at(phases, at_s)
        length_s = load.step_s * (phase.slowdown if phase else 1) * max(0.3, 1 + load.step_jitter * random.normal())
        if phase is None or phase.kind.startswith("slow"):
            until_s = min(at_s + length_s, _next_break(phases, at_s))
            _step(of_stages, load, phase, at_s + margin_s, length_s, is_slow=False)
            _step(of_slow, load, phase, at_s + margin_s, length_s, is_slow=True)
        elif phase.kind == "evaluation":
            until_s = min(at_s + 0.35 * length_s, phase.end_s)
            for each in (of_stages, of_slow):
                _forward(each, load, at_s + margin_s, until_s + margin_s)
        else:
            until_s = phase.end_s
            for each in (of_stages, of_slow):
                _pause(each, phase, at_s + margin_s, until_s + margin_s)
        at_s = max(until_s, at_s + 1 / FINE_PER_S)
    return _second_means(of_stages), _second_means(of_slow)


def _phase_at(phases: Sequence[Phase], at_s: float) -> Phase | None:
    for phase in reversed(phases):
        if phase.start_s <= at_s < phase.end_s:
            return phase
    return None


def _next_break(phases: Sequence[Phase], at_s: float) -> float:
    """A step ends at once where the job hangs or is stopped; all else begins between steps."""
    hard = [one.start_s for one in phases if one.kind in ("hang", "stopped", "restart") and one.start_s > at_s]
    return min(hard, default=float("inf"))


def _cells(from_s: float, to_s: float, moments: int) -> slice:
    return slice(min(moments, round(from_s * FINE_PER_S)), min(moments, round(to_s * FINE_PER_S)))


def _step(
    out: NDArray[np.float32], load: JobLoad, phase: Phase | None, at_s: float, length_s: float, *, is_slow: bool
) -> None:
    moments = out.shape[-1]
    slowdown = phase.slowdown if phase else 1.0
    gradients = load.gradient_share / slowdown
    if phase and phase.kind == "slow_gradients":
        gradients = 1 - (1 - load.gradient_share) / slowdown
    update = _UPDATE_SHARE / slowdown
    passes = 1 - gradients - update
    work = (1 - load.gradient_share - _UPDATE_SHARE) / slowdown  # of the healthy machines
    clear = _cells(at_s, at_s + length_s, moments)
    out[:, :, clear] = 0
    out[:, _ALIVE, clear] = out[:, _LOAD, clear] = 1
    rest = _cells(at_s + passes * length_s, at_s + (1 - update) * length_s, moments)
    out[:, _GRADIENTS, rest] = load.gradient_share / slowdown / gradients  # the same bytes, however long it takes
    out[:, _COMPUTE, rest] = 0.05
    out[:, _WAIT, rest] = 1 - load.gradient_share / slowdown / gradients  # the kernel spins until bytes come
    out[:, _UPDATE, _cells(at_s + (1 - update) * length_s, at_s + length_s, moments)] = 1
    for stage in range(load.stages):
        edge = load.bubble * stage / max(1, load.stages - 1) / slowdown
        stretch = passes / work if is_slow else 1.0
        first_s, end_s = at_s + edge * length_s, at_s + (work * stretch - edge) * length_s
        active = _cells(first_s, end_s, moments)
        out[stage, _WAIT, _cells(at_s, at_s + passes * length_s, moments)] = 1
        out[stage, _WAIT, active] = 1 - 1 / stretch  # a slow GPU is busy all the time
        out[stage, _COMPUTE, active] = 1 / stretch
        out[stage, _P2P, active] = 1 / stretch if load.stages > 1 else 0


def _forward(out: NDArray[np.float32], load: JobLoad, from_s: float, to_s: float) -> None:
    cells = _cells(from_s, to_s, out.shape[-1])
    out[:, :, cells] = 0
    out[:, _ALIVE, cells] = 1
    out[:, _LOAD, cells] = 2
    out[:, _WAIT, cells] = 0.2
    out[:, _COMPUTE, cells] = 0.75
    out[:, _P2P, cells] = 0.4 if load.stages > 1 else 0


def _pause(out: NDArray[np.float32], phase: Phase, from_s: float, to_s: float) -> None:
    cells = _cells(from_s, to_s, out.shape[-1])
    out[:, :, cells] = 0
    if phase.kind == "hang":
        out[:, _ALIVE, cells] = out[:, _WAIT, cells] = 1
    elif phase.kind == "checkpoint":
        out[:, _ALIVE, cells] = out[:, _SAVE, cells] = 1
        out[:, _WAIT, cells] = 0.3
    elif phase.kind == "restart":
        middle_s = from_s + 0.4 * (to_s - from_s)
        boots = _cells(middle_s, to_s, out.shape[-1])
        out[:, _BOOT, boots] = 1
        out[:, _ALIVE, boots] = np.linspace(0, 1, boots.stop - boots.start, dtype=np.float32)


def _second_means(fine: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the second that ends at each moment, as exporters average."""
    sums = np.cumsum(fine, axis=-1, dtype=np.float64)
    means = fine.copy()
    means[..., FINE_PER_S:] = (sums[..., FINE_PER_S:] - sums[..., :-FINE_PER_S]) / FINE_PER_S
    return means


STATES: Mapping[str, NDArray[np.float32]] = MappingProxyType(
    {
        "dead": np.zeros(len(ACTIVITIES), np.float32),
        "blocked": np.array([0, 0, 0, 0, 0, 1, 0, 0, 0], np.float32),
        "spinning": np.array([0, 0, 0, 0, 1, 1, 0, 0, 0], np.float32),
    }
)
"""Of processes that no longer do what the job does: they are gone, wait on the host, or wait on the GPU."""


@dataclass(frozen=True)
class MetricModel:
    """How a metric follows the activities, and how it scatters.

    Attributes:
        idle: its value where nothing runs.
        of: what one unit of each activity adds.
        relative_noise: standard deviation from second to second over the value.
        noise: the same in the metric's unit, whatever the value.
        slow_noise: of what stays for tens of seconds, over the value.
        host_spread: of the machines' constant factors.
        is_rate: packets: noise multiplies (it is log-normal).
    """

    idle: float
    of: Mapping[str, float]
    relative_noise: float
    noise: float
    slow_noise: float
    host_spread: float
    is_rate: bool = False


def _model(idle: float, noise: tuple[float, float, float, float], *, rate: bool = False, **of: float) -> MetricModel:
    assert of.keys() <= set(ACTIVITIES), of
    return MetricModel(idle, MappingProxyType(of), *noise, is_rate=rate)


MODELS: Mapping[str, MetricModel] = MappingProxyType(
    {
        "cpu_usage": _model(
            0.02, (0.05, 0.006, 0.03, 0.02),
            alive=0.06, compute=0.07, gradients=0.05, wait=0.06, load=0.05, save=0.16, boot=0.3,
        ),
        "pfc_tx_packet_rate": _model(
            1.0, (0.22, 1.0, 0.15, 0.08), rate=True, gradients=260.0, point_to_point=90.0, save=60.0
        ),
        "gpu_duty_cycle": _model(
            0.0, (0.012, 0.002, 0.004, 0.002), compute=0.98, gradients=0.97, update=0.95, wait=0.99, save=0.1
        ),
        "gpu_power_draw": _model(
            85, (0.02, 2.0, 0.008, 0.012), alive=25, compute=370, gradients=140, update=220, wait=110
        ),
        "gpu_tensor_core_activity": _model(0.0, (0.03, 0.002, 0.008, 0.004), compute=0.48, update=0.01),
        "gpu_graphics_engine_activity": _model(
            0.0, (0.012, 0.002, 0.004, 0.002), compute=0.97, gradients=0.96, update=0.96, wait=0.99, save=0.08
        ),
        "gpu_nvlink_bandwidth": _model(
            0.0, (0.03, 2e8, 0.008, 0.004), compute=110e9, gradients=60e9, point_to_point=8e9, save=1e9
        ),
        "memory_usage": _model(0.08, (0.004, 0.001, 0.004, 0.01), alive=0.22, save=0.05, boot=0.03),
        "disk_usage": _model(0.42, (0.0, 0.0002, 0.0005, 0.05), save=0.002),
        "tcp_throughput": _model(2e6, (0.15, 1e6, 0.06, 0.02), load=45e6, save=1.1e9, boot=3e8),
        "tcp_rdma_throughput": _model(
            2e6, (0.04, 5e7, 0.01, 0.005), gradients=170e9, point_to_point=24e9, load=45e6, save=1.1e9
        ),
        "gpu_memory_used": _model(6e8, (0.0005, 1e6, 0.0005, 0.004), alive=61e9, compute=3e9),
        "gpu_temperature": _model(
            31, (0.004, 0.3, 0.006, 0.03), alive=2, compute=31, gradients=13, update=19, wait=10
        ),
        "gpu_sm_activity": _model(
            0.0, (0.02, 0.003, 0.006, 0.003), compute=0.76, gradients=0.25, update=0.8, wait=0.14
        ),
        "gpu_clocks": _model(1.2e9, (0.003, 1e6, 0.003, 0.003), alive=0.21e9, compute=-0.03e9),
        "gpu_fp_engine_activity": _model(0.0, (0.03, 0.002, 0.008, 0.004), compute=0.11, gradients=0.02, update=0.3),
        "gpu_memory_bandwidth_utilization": _model(
            0.0, (0.02, 0.003, 0.006, 0.003), compute=0.34, gradients=0.2, update=0.75, wait=0.01
        ),
        "pcie_bandwidth": _model(
            1e7, (0.05, 5e7, 0.01, 0.005), compute=1.5e9, gradients=21e9, point_to_point=3e9, save=9e9, boot=4e9
        ),
        "pcie_usage": _model(
            0.0, (0.05, 0.001, 0.01, 0.005), compute=0.024, gradients=0.33, point_to_point=0.047, save=0.14, boot=0.06
        ),
        "ecn_packet_rate": _model(
            1.0, (0.4, 1.0, 0.2, 0.08), rate=True, gradients=700.0, point_to_point=150.0, save=100.0
        ),
        "cnp_packet_rate": _model(
            1.0, (0.4, 1.0, 0.2, 0.08), rate=True, gradients=500.0, point_to_point=110.0, save=80.0
        ),
    }
)  # fmt: skip
"""Levels of hosts with eight GPUs of 400 W and 200 Gbit/s each; ours, from data sheets and the papers."""


def levels(model: MetricModel, of_stage: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values that activities [rows, activities, moments] cause: [rows, moments]."""
    factors = np.array([model.of.get(name, 0.0) for name in ACTIVITIES], np.float32)
    found: NDArray[np.float32] = np.float32(model.idle) + np.einsum("a,ram->rm", factors, of_stage, dtype=np.float32)
    return found


def lag(fine: NDArray[np.float32], time_constant_s: float) -> NDArray[np.float32]:
    """A first-order delay along the last axis, as of temperatures."""
    keep = np.float32(np.exp(-1 / (time_constant_s * FINE_PER_S)))
    lagged = np.empty_like(fine)
    now = fine[:, : 20 * FINE_PER_S].mean(axis=-1)
    for moment in range(fine.shape[-1]):
        now = keep * now + (1 - keep) * fine[:, moment]
        lagged[:, moment] = now
    return lagged
