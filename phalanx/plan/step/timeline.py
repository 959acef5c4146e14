"""When the stages of one step compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.parallel.config import Schedule
from phalanx.plan.communication.sends import send_s
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.pipeline.costs import StageCosts, StepTime
from phalanx.plan.pipeline.evaluate import evaluate, evaluate_few
from phalanx.plan.step.layers import Costs
from phalanx.plan.step.stages import Stages, stage_passes
from phalanx.plan.types import Job, StageTimes, Strategy
from phalanx.plan.work.operations import Passes


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step in time, up to the last backward pass.

    Attributes:
        passes: of one micro-batch, by different stage.
        time: of the pipeline; of the one rank's passes where there is no pipeline.
        stage_times: of a pipeline, what `time` was worked out of.
    """

    stages: Stages
    passes: Sequence[Passes]
    micro_batches: int
    time: StepTime
    stage_times: StageTimes | None = None


def timeline(job: Job, strategy: Strategy, cluster: Cluster, costs: Costs, stages: Stages) -> Timeline:
    """When every stage computes, exactly."""
    passes = [stage_passes(stage, costs) for stage in stages.different]
    micro_batches = strategy.micro_batches(job.global_batch)
    if strategy.pipeline == 1:
        return Timeline(stages, passes, micro_batches, _alone(passes[0], micro_batches))
    send = float(send_s(job, strategy, cluster, costs.local))
    time = _evaluated(
        strategy.schedule,
        strategy.pipeline,
        strategy.chunks,
        micro_batches,
        tuple((p.forward, p.backward, p.again + p.backward_input, p.backward_weight) for p in passes),
        stages.alike.tobytes(),
        send,
        not job.software.pipeline_overlap,
    )
    return Timeline(stages, passes, micro_batches, time, _stage_times(stages, passes, send, job))


def _stage_times(stages: Stages, passes: Sequence[Passes], send_s: float, job: Job) -> StageTimes:
    of_each = [passes[number] for number in stages.alike]
    return StageTimes(
        forward_s=tuple([float(p.forward) for p in of_each]),
        backward_s=tuple([float(p.backward) for p in of_each]),
        backward_input_s=tuple([float(p.again + p.backward_input) for p in of_each]),
        backward_weight_s=tuple([float(p.backward_weight) for p in of_each]),
        send_s=send_s,
        blocking=not job.software.pipeline_overlap,
    )


@lru_cache(maxsize=1024)
def _evaluated(
    schedule: Schedule,
    ranks: int,
    chunks: int,
    micro_batches: int,
    passes: tuple[tuple[float, float, float, float], ...],
    alike: bytes,
    send_s: float,
    blocking: bool,
) -> StepTime:
    """Once for all layouts that differ only in how data-parallel ranks share state, which are next to each other.

    Args:
        passes: of each different stage: forward, backward, and the latter for inputs and for weights.
        alike: as in `Stages`, as bytes, which hash faster than numbers do.
    """
    which = np.frombuffer(alike, dtype=np.int64)
    forward, backward, backward_input, backward_weight = np.array(passes, dtype=np.float64)[which].T
    sends = np.full(len(which) - 1, send_s)
    stage_costs = StageCosts(forward, backward, backward_input, backward_weight, sends, blocking=blocking)
    if schedule == "1f1b" and micro_batches < ranks:
        return evaluate_few(ranks, micro_batches, stage_costs)
    return evaluate(schedule, ranks, chunks, micro_batches, stage_costs)


def _alone(passes: Passes, micro_batches: int) -> StepTime:
    """One rank that does all micro-batches, one after another."""
    span, none = float(passes.total * micro_batches), np.zeros(1)
    return StepTime(
        span_s=span,
        busy_s=np.array([span]),
        bubble_s=none,
        imbalance_s=none,
        sends_s=none,
        sent_s=none,
        end_s=np.array([span]),
        first_forward_begin_s=np.zeros((1, 1)),
        last_backward_end_s=np.array([[span]]),
        in_flight=np.ones((1, 1), dtype=np.int64),
    )
