"""The traffic of a predicted step: which of its parts cross the network, how large they are, and how much is hidden."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.network.traffic import Pattern, Phase, Traffic
from phalanx.plan.types import Part, Prediction

_LEAST_FOR_BYTES = 0.1
"""Of a phase's time, however large its latency is said to be."""


def traffic_of(prediction: Prediction, cluster: Cluster) -> Traffic:
    """What a predicted step sends between hosts.

    Bytes are those that the network carries in the predicted time: on an ideal network all takes as long as predicted.

    Raises:
        UserError: nothing is sent between hosts.
    """
    strategy = prediction.strategy
    tensor, context, data = int(strategy.tensor), int(strategy.context), int(strategy.data)
    found = [
        _timed(prediction, cluster, "data", "ring", data * context, tensor, 2 * int(strategy.chunks)),
        _pipeline(prediction),
        _timed(prediction, cluster, "tensor", "ring", tensor, 1, _passes(prediction)),
        _timed(prediction, cluster, "context", "ring", context, tensor, _passes(prediction)),
        _timed(
            prediction, cluster, "expert", "all_to_all", int(strategy.expert), tensor * context, _passes(prediction)
        ),
    ]
    phases = tuple(phase for phase in found if phase is not None)
    if not phases:
        cure = f"take more devices than the {cluster.devices_per_host} of a host, or another layout"
        raise UserError("all messages of this job stay inside hosts", cure=cure)
    return Traffic(phases, prediction.step_s, f"predicted for {prediction.cluster}")


def _timed(
    prediction: Prediction, cluster: Cluster, path: str, pattern: Pattern, ranks: int, stride: int, times: int
) -> Phase | None:
    """The phase of all parts below `path`; None where its groups stay inside hosts, or take no time."""
    exposed_s, hidden_s = _seconds(prediction.parts, path), _seconds(prediction.hidden, path)
    total_s = exposed_s + hidden_s
    if ranks * stride <= cluster.devices_per_host or ranks == 1 or not total_s:
        return None
    inside = min(ranks, max(1, cluster.devices_per_host // stride))
    hops = ranks - 1 if pattern == "ring" else 1
    carried_s = max(total_s - times * hops * cluster.value("network.latency_s"), _LEAST_FOR_BYTES * total_s)
    rank_bytes = carried_s * cluster.device_bytes_per_s
    rank_bytes *= inside if pattern == "ring" else (ranks - 1) / (ranks - inside)
    cover_s = max(hidden_s, _between_chunks_s(prediction)) if path == "data" else None
    return Phase(path, pattern, ranks, stride, rank_bytes, times, min(1.0, exposed_s / total_s), cover_s)


def _between_chunks_s(prediction: Prediction) -> float:
    """Work between the first and the last of a rank's chunks, forward and backward.

    Interleaved 1F1B has each chunk at work on as many micro-batches as there are stages before the next one's turn.
    """
    strategy = prediction.strategy
    micro_batches, chunks = int(strategy.micro_batches(prediction.job.global_batch)), int(strategy.chunks)
    blocks = min(int(strategy.pipeline), micro_batches) / micro_batches
    return prediction.seconds("compute") * blocks * (chunks - 1) / chunks


def _pipeline(prediction: Prediction) -> Phase | None:
    """Sends between stages, from their own sizes; behind computing there is room for many times as many."""
    job, strategy = prediction.job, prediction.strategy
    if int(strategy.pipeline) == 1:
        return None
    exposed_s = _seconds(prediction.parts, "pipeline/sends")
    total_s = exposed_s + _seconds(prediction.hidden, "pipeline/sends")
    tokens = int(strategy.micro_batch) * job.sequence / int(strategy.context)
    message = tokens * job.model.hidden * job.software.sent_bytes / int(strategy.tensor)
    sends = int(strategy.micro_batches(job.global_batch)) * int(strategy.chunks)
    return Phase(
        name="pipeline",
        pattern="neighbours",
        ranks=int(strategy.pipeline),
        stride=int(strategy.data * strategy.context * strategy.tensor),
        rank_bytes=sends * message,
        times=sends,
        exposed_ratio=min(1.0, exposed_s / total_s) if total_s else 0.0,
        cover_s=prediction.seconds("compute"),
    )


def _passes(prediction: Prediction) -> int:
    """Collectives of one kind in a step: one for each layer, forward and backward."""
    job, strategy = prediction.job, prediction.strategy
    layers = max(1, job.model.layers // int(strategy.pipeline))
    return 2 * layers * int(strategy.micro_batches(job.global_batch))


def _seconds(parts: tuple[Part, ...], path: str) -> float:
    return sum(part.seconds for part in _below(parts, path))


def _below(parts: tuple[Part, ...], path: str) -> Iterator[Part]:
    return (part for part in parts if part.path == path or part.path.startswith(path + "/"))
