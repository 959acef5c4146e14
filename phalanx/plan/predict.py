"""What one optimizer step of a job costs on a cluster: `predict`, a pure function.

It checks the job, costs its stages, runs them through the pipeline schedule (`timeline`), adds what of the data-
parallel exchange nothing hides (`data_time`) and what a step costs besides, and marks each part with the weakest number
that it rests on (`Marks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.parallel.config import Schedule
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.jobs import check
from phalanx.plan.memory.rank import rank_memory, reserved_note
from phalanx.plan.operations import Passes
from phalanx.plan.overheads import IN_STEP, start_up_s, step_overheads, unjudged, with_residual
from phalanx.plan.pipeline.step_time import Array, StageCosts, StepTime, evaluate, evaluate_few
from phalanx.plan.stages import (
    Costs,
    DataExchange,
    Known,
    Stages,
    Weights,
    data_exchange,
    gather_lead_s,
    held_by,
    known_costs,
    model_flops,
    reduce_tail_s,
    send_s,
    stage_passes,
    stages_of,
    weights_of,
)
from phalanx.plan.types import Job, Mark, Part, Prediction, StageTimes, Strategy, weakest


def predict(job: Job, strategy: Strategy, cluster: Cluster, known: Known | None = None) -> Prediction:
    """Time and memory of one step of `job`, spread as `strategy` says over `cluster`.

    Exact in how passes follow each other; as exact as `cluster`'s numbers in how long each takes. The parts are those
    of the pipeline rank that computes longest, and sum to the step's time.

    Args:
        known: costs of layers from predictions of the same job on the same cluster; what is new is added.
    """
    check(job, strategy, cluster)
    job = with_residual(job, cluster)
    pieces = known_costs(job, strategy, cluster, {} if known is None else known)
    line = timeline(job, strategy, cluster, pieces, stages_of(job, strategy, pieces.kinds))
    weights = weights_of(job.model, line.stages.different, pieces.kinds, strategy.tensor, strategy.expert)
    # The rank that computes longest sets the pace: its passes, and what it waits for, are the whole step, so that the
    # parts in the report add up to it.
    rank = int(line.time.busy_s.argmax())
    share = line.stages.shares[rank]
    exchanges = [weights_exchange(job, strategy, cluster, each) for each in weights]
    data = data_time(job, strategy, line, weights, exchanges)
    # Updates and norms wait for the rank with most weights, which need not be the one that computes longest.
    totals = np.array([each.total for each in weights])[line.stages.places].sum(axis=0)
    held: Weights = sum((weights[place] for place in line.stages.places[:, totals.argmax()]), Weights())
    exposed: dict[str, float] = {
        **_summed(((cost.exposed, times) for cost, times in held_by(share, pieces)), line.micro_batches),
        "pipeline/bubble": float(line.time.bubble_s[rank]),
        "pipeline/imbalance": float(line.time.imbalance_s[rank]),
        "pipeline/sends": float(line.time.sends_s[rank]),
        "data/gather": data.lead_s,
        "data/reduce": data.tail_s,
    }
    # These need the sums so far: slow ranks stretch the passes, and a loader hides behind everything before it.
    exposed |= step_overheads(job, strategy, cluster, held, float(line.time.busy_s[rank]), sum(exposed.values()))
    # An efficiency that the user gives says nothing about where time is lost: it stretches the whole step.
    exposed["efficiency"] = sum(exposed.values()) * (1 / job.added.efficiency - 1)
    hidden = {
        **_summed(((cost.hidden, times) for cost, times in held_by(share, pieces)), line.micro_batches),
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
        unjudged=unjudged(job, cluster),
        notes=tuple(filter(None, (reserved_note(job.software), _zero3_note(strategy, cluster)))),
    )


_ZERO3_HOSTS = 16  # that ZeRO-3 was judged on at most


def _zero3_note(strategy: Strategy, cluster: Cluster) -> str:
    hosts = strategy.world_size / cluster.devices_per_host
    if strategy.zero != 3 or hosts <= _ZERO3_HOSTS:
        return ""
    return (
        f"ZeRO-3 over {hosts:,.0f} hosts: its exchanges are predicted to hide behind computing, as on up to "
        f"{_ZERO3_HOSTS} hosts they do; on 48 and more, published steps took 1.4 to 4 times as long"
    )


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """One step in time, up to the last backward pass."""

    stages: Stages
    passes: Sequence[Passes]  # of one micro-batch, by different stage
    micro_batches: int
    time: StepTime  # of the pipeline; of the one rank's passes where there is no pipeline
    stage_times: StageTimes | None = None  # of a pipeline, what `time` was worked out of


def timeline(job: Job, strategy: Strategy, cluster: Cluster, costs: Costs, stages: Stages) -> StepTimeline:
    """When every stage computes, exactly."""
    passes = [stage_passes(stage, costs) for stage in stages.different]
    micro_batches = strategy.micro_batches(job.global_batch)
    # Without a pipeline there is nothing to schedule: the passes follow each other.
    if strategy.pipeline == 1:
        return StepTimeline(stages, passes, micro_batches, _without_pipeline(passes[0], micro_batches))
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
    of_each = [passes[number] for number in stages.alike]
    stage_times = StageTimes(
        forward_s=tuple([float(p.forward) for p in of_each]),
        backward_s=tuple([float(p.backward) for p in of_each]),
        backward_input_s=tuple([float(p.again + p.backward_input) for p in of_each]),
        backward_weight_s=tuple([float(p.backward_weight) for p in of_each]),
        send_s=send,
        blocking=not job.software.pipeline_overlap,
    )
    return StepTimeline(stages, passes, micro_batches, time, stage_times)


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
    # The key of this cache is what the schedule depends on, and nothing else: a search asks for the same pipeline with
    # many ways to shard state.
    which = np.frombuffer(alike, dtype=np.int64)
    forward, backward, backward_input, backward_weight = np.array(passes, dtype=np.float64)[which].T
    sends = np.full(len(which) - 1, send_s)
    stage_costs = StageCosts(forward, backward, backward_input, backward_weight, sends, blocking=blocking)
    # Phalanx refuses so few; other programs run them.
    if schedule == "1f1b" and micro_batches < ranks:
        return evaluate_few(ranks, micro_batches, stage_costs)
    return evaluate(schedule, ranks, chunks, micro_batches, stage_costs)


def _without_pipeline(passes: Passes, micro_batches: int) -> StepTime:
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


@dataclass(frozen=True)
class DataTime:
    """Seconds of one pipeline rank."""

    lead_s: float  # its first forward passes wait for weights
    tail_s: float  # its gradients are still being reduced after its last backward pass
    hidden_s: float  # exchanged while it computed


def data_time(
    job: Job, strategy: Strategy, line: StepTimeline, weights: Sequence[Weights], exchanges: Sequence[DataExchange]
) -> DataTime:
    """Of the pipeline rank that is done with it last. `weights`, `exchanges`: of every different stage."""
    places = line.stages.places
    reduce_s = np.array([float(each.reduce_s) for each in exchanges])[places]
    gather_s = np.array([float(each.gather_s) for each in exchanges])[places]
    reduced_s, gathered_s = reduce_s.sum(axis=0), gather_s.sum(axis=0)
    lead_s, after_s = gathered_s, reduced_s
    if job.software.data_overlap:
        lead_s, after_s = _not_covered(job, strategy, line, weights, reduce_s, gather_s)
    # A rank that ends early reduces its gradients while others still compute; only what outlasts them is seen.
    early_s = line.time.span_s - line.time.end_s  # others still compute
    tail_s = np.maximum(after_s - early_s, 0.0)
    rank = int((lead_s + tail_s).argmax())
    lead, tail = float(lead_s[rank]), float(tail_s[rank])
    if not job.software.data_overlap:
        return DataTime(lead, tail, float(reduced_s[rank]) - tail)
    return DataTime(lead, tail, max(float(reduced_s[rank] + gathered_s[rank]) - lead - tail, 0.0))


def _not_covered(
    job: Job, strategy: Strategy, line: StepTimeline, weights: Sequence[Weights], reduce_s: Array, gather_s: Array
) -> tuple[Array, Array]:
    """What first forward passes wait for weights, and how long gradients are reduced after the end, by rank.

    Args:
        reduce_s, gather_s: by chunk and rank.
    """
    places, time = line.stages.places, line.time
    buckets = np.ones(places.shape[1])
    if strategy.bucket_bytes:
        num_bytes = np.array([each.total for each in weights])[places].max(axis=0) * job.software.reduce_bytes
        buckets = np.maximum(np.rint(num_bytes / strategy.bucket_bytes), 1.0)
    backward_s = np.array([float(each.backward) for each in line.passes])[places]
    after_s = reduce_tail_s(reduce_s, time.last_backward_end_s.T, backward_s, buckets)
    if job.software.first_gather_hidden:
        return np.zeros_like(after_s), after_s
    gather_s[0] /= buckets  # the first layers are needed first
    return gather_lead_s(gather_s, time.first_forward_begin_s.T), after_s


def weights_exchange(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> DataExchange:
    """Dense weights are shared by all data-parallel ranks, experts by those that hold the same ones."""
    dense = data_exchange(job, strategy, cluster, weights.dense)
    if not weights.experts:
        return dense
    ranks = strategy.data * strategy.context // strategy.expert
    experts = data_exchange(job, strategy, cluster, weights.experts, ranks)
    return DataExchange(dense.reduce_s + experts.reduce_s, dense.gather_s + experts.gather_s)


def _summed(pieces: Iterable[tuple[Mapping[str, Passes], int]], micro_batches: int) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for by_path, times in pieces:
        for path, passes in by_path.items():
            total[path] += micro_batches * times * float(passes.total)
    return total


def parts(seconds: Mapping[str, float], marks: Marks) -> tuple[Part, ...]:
    """Parts with their marks, those without any time left out."""
    return tuple([Part(path, float(value), *marks.of(path)) for path, value in seconds.items() if value])


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
        # On one host no message goes over a network: the number is the host's measured all-reduce.
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
