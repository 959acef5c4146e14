"""What one optimizer step of a job costs on a cluster: one pure function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.memory import rank_memory
from phalanx.plan.residual import with_residual
from phalanx.plan.step.check import check
from phalanx.plan.step.constants import constants
from phalanx.plan.step.exchange import both, data_time
from phalanx.plan.step.layers import Known, known_costs
from phalanx.plan.step.marks import Marks
from phalanx.plan.step.parts import computed_s, hidden_s, parts
from phalanx.plan.step.stages import Stages, model_flops, stages_of, weights_of
from phalanx.plan.step.start_up import start_up_s
from phalanx.plan.step.timeline import timeline
from phalanx.plan.step.weights import Weights
from phalanx.plan.types import Job, Prediction, Strategy


def predict(job: Job, strategy: Strategy, cluster: Cluster, known: Known | None = None) -> Prediction:
    """Time and memory of one step of `job`, spread as `strategy` says over `cluster`.

    Exact in how passes follow each other; as exact as `cluster`'s numbers in how long each takes. The parts are those
    of the pipeline rank that computes longest, and sum to the step's time.

    Args:
        known: costs of layers from predictions of the same job on the same cluster; what is new is added.

    Raises:
        UserError: the job cannot be spread like that.
    """
    job = with_residual(job, cluster)
    check(job, strategy, cluster)
    pieces = known_costs(job, strategy, cluster, {} if known is None else known)
    line = timeline(job, strategy, cluster, pieces, stages_of(job, strategy, pieces.kinds))
    weights = weights_of(job.model, line.stages.different, pieces.kinds, strategy.tensor, strategy.expert)
    rank = int(line.time.busy_s.argmax())
    share = line.stages.shares[rank]
    exchanges = [both(job, strategy, cluster, each) for each in weights]
    data, held = data_time(job, strategy, line, weights, exchanges), _fullest(line.stages, weights)
    exposed: dict[str, float] = {
        **computed_s(share, pieces, line.micro_batches),
        "pipeline/bubble": float(line.time.bubble_s[rank]),
        "pipeline/imbalance": float(line.time.imbalance_s[rank]),
        "pipeline/sends": float(line.time.sends_s[rank]),
        "data/gather": data.lead_s,
        "data/reduce": data.tail_s,
    }
    exposed |= constants(job, strategy, cluster, held, float(line.time.busy_s[rank]), sum(exposed.values()))
    exposed["efficiency"] = sum(exposed.values()) * (1 / job.added.efficiency - 1)
    hidden = {
        **hidden_s(share, pieces, line.micro_batches),
        "data": data.hidden_s,
        "pipeline/sends": max(float(line.time.sent_s[rank] - line.time.sends_s[rank]), 0.0),
    }
    step_s, flops, marks = sum(exposed.values()), model_flops(job), Marks(job, cluster)
    peak = strategy.world_size * cluster.device.peak_flops_per_s(job.precision)
    return Prediction(
        job=job,
        strategy=strategy,
        cluster=cluster.name,
        devices=strategy.world_size,
        step_s=step_s,
        parts=parts(exposed, marks),
        hidden=parts(hidden, marks),
        memory=rank_memory(job, strategy),
        start_up=parts(start_up_s(job, strategy, cluster, held), marks),
        model_flops=flops,
        mfu=flops / (step_s * peak),
        stages=line.stage_times,
    )


def _fullest(stages: Stages, weights: Sequence[Weights]) -> Weights:
    """The weights of the pipeline rank that has most of them."""
    totals = np.array([each.total for each in weights])[stages.places].sum(axis=0)
    return sum((weights[place] for place in stages.places[:, totals.argmax()]), Weights())
