"""What a step sends between hosts, as phases and as flows between NICs.

`Traffic` is handed in, read from a file (`read_traffic`), worked out from a layout (`make_traffic`), or taken from a
prediction (`traffic_of`: which of its parts cross the network, how large they are, and how much is hidden).
`make_flows` says who sends how much to whom in a phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.core.config import read_toml
from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Part, Prediction

Indices = NDArray[np.int64]


Pattern = Literal["ring", "neighbours", "all_to_all", "incast"]
"""Who sends to whom in a group: each to the next one (all-gather, reduce-scatter, all-reduce); to the next and the one
before (pipeline stages, with the last one beside the first); each to all others; all to the first."""

_LARGEST_ALL_TO_ALL = 1_000_000


@dataclass(frozen=True)
class Phase:
    """One kind of communication of a step, by all groups of ranks at a time."""

    name: str
    pattern: Pattern
    ranks: int
    stride: int  # distance of neighbours in a group, in ranks
    rank_bytes: float  # what each member sends in a step, in each direction
    times: int = 1  # how often in a step: messages, or collectives, of which each has its share of the bytes
    exposed_ratio: float = 1.0  # the share of its time that the step waits for while nothing is in its way
    # Work in a step that may hide the rest; None: just as much as hides it while nothing is in its way.
    cover_s: float | None = None

    def __post_init__(self) -> None:
        where = f"phase {self.name}"
        if self.pattern not in get_args(Pattern):
            cure = f"write one of {', '.join(get_args(Pattern))}"
            raise UserError("is no pattern", cure=cure, field=f"{where}: pattern", value=self.pattern)
        for name, least in (("ranks", 1), ("stride", 1), ("times", 1), ("rank_bytes", 0)):
            value = getattr(self, name)
            if not least <= value < 1e18:
                raise UserError("is no size", cure=f"write {least} or more", field=f"{where}: {name}", value=value)
        if not 0 <= self.exposed_ratio <= 1:
            cure = "write a share between 0 and 1"
            raise UserError("is no share", cure=cure, field=f"{where}: exposed_ratio", value=self.exposed_ratio)
        if self.cover_s is not None and not 0 <= self.cover_s < 1e12:
            raise UserError("is no time", cure="write seconds", field=f"{where}: cover_s", value=self.cover_s)

    @property
    def hops(self) -> int:
        """Sends that follow each other in one of its times: around the ring, or one."""
        return self.ranks - 1 if self.pattern == "ring" else 1

    def exposed_s(self, ideal_s: float, now_s: float) -> float:
        """What the step waits for where the phase takes `now_s`, and took `ideal_s` while nothing was in its way."""
        cover = (1 - self.exposed_ratio) * ideal_s if self.cover_s is None else self.cover_s
        return self.exposed_ratio * now_s + max(0.0, (1 - self.exposed_ratio) * now_s - cover)


@dataclass(frozen=True)
class Traffic:
    """All that a step sends between hosts."""

    phases: tuple[Phase, ...]
    step_s: float  # how long a step takes while nothing is in the way of its messages
    source: str  # where these numbers come from

    def __post_init__(self) -> None:
        if not 0 < self.step_s < 1e6:
            raise UserError("is no time of a step", cure="write seconds", field="step_s", value=self.step_s)
        if not self.phases:
            raise UserError("nothing is sent", cure="add a phase", field="phases")

    def check(self, devices: int) -> None:
        """Refuse devices that the groups do not fill."""
        for phase in self.phases:
            block = phase.ranks * phase.stride
            if devices % block:
                cure = f"take a multiple of {block:,} devices ({phase.ranks:,} ranks at distance {phase.stride:,})"
                raise UserError(f"groups of phase {phase.name} are not full", cure=cure, field="devices", value=devices)
            if phase.pattern == "all_to_all" and devices * (phase.ranks - 1) > _LARGEST_ALL_TO_ALL:
                cure = f"take groups of at most {_LARGEST_ALL_TO_ALL // devices + 1} ranks"
                raise UserError("too many pairs", cure=cure, field=f"phase {phase.name}: ranks", value=phase.ranks)


@dataclass(frozen=True)
class TrafficLayout:
    """A model spread over devices, as far as its messages depend on it; ranks are numbered tensor, data, pipeline."""

    parameters: float  # of the whole model
    layers: int
    hidden: int
    sequence: int
    global_batch: int
    tensor: int
    pipeline: int
    data: int
    chunks: int = 1  # model chunks of each pipeline rank
    micro_batch: int = 1
    reduce_bytes: int = 4  # of one gradient as it travels
    gather_bytes: int = 2  # of one weight as it travels
    activation_bytes: int = 2

    @property
    def micro_batches(self) -> int:
        """Forward passes of every stage in one step."""
        return self.global_batch // (self.data * self.micro_batch)


_BACKWARD = 2 / 3  # share of a step's computing that is backward, without recomputing


def make_traffic(layout: TrafficLayout, step_s: float, source: str) -> Traffic:
    """What a step of that layout sends between hosts, and how much of it is hidden, by rules of thumb.

    Gradients of a chunk are reduced, and weights gathered, while the chunks after it are at work on as many
    micro-batches as there are stages (interleaved 1F1B); those of the last, or first, chunk are waited for. Sends of a
    pipeline are hidden but for those that fill and drain it.
    """
    return Traffic((*_data_phases(layout, step_s), *_pipeline_phases(layout, step_s)), step_s, source)


def _data_phases(layout: TrafficLayout, step_s: float) -> tuple[Phase, ...]:
    """Reduce-scatter of gradients and all-gather of weights, once for each model chunk."""
    if layout.data == 1:
        return ()
    held = layout.parameters / (layout.tensor * layout.pipeline) * (layout.data - 1) / layout.data
    block = min(layout.pipeline, layout.micro_batches) / layout.micro_batches
    cover_s = step_s * block * (layout.chunks - 1) / layout.chunks
    shape: dict[str, Any] = {
        "pattern": "ring",
        "ranks": layout.data,
        "stride": layout.tensor,
        "times": layout.chunks,
        "exposed_ratio": 1 / layout.chunks,
    }
    return (
        Phase("data/reduce", rank_bytes=held * layout.reduce_bytes, cover_s=_BACKWARD * cover_s, **shape),
        Phase("data/gather", rank_bytes=held * layout.gather_bytes, cover_s=(1 - _BACKWARD) * cover_s, **shape),
    )


def _pipeline_phases(layout: TrafficLayout, step_s: float) -> tuple[Phase, ...]:
    """Activations to the next stage and gradients back; each tensor rank sends its part."""
    if layout.pipeline == 1:
        return ()
    sends = layout.micro_batches * layout.chunks
    message = layout.micro_batch * layout.sequence * layout.hidden * layout.activation_bytes / layout.tensor
    filling = min(1.0, (layout.pipeline - 1) / sends)
    stride = layout.tensor * layout.data
    phase = Phase(
        "pipeline", "neighbours", layout.pipeline, stride, sends * message, sends, filling, (1 - filling) * step_s
    )
    return (phase,)


def read_traffic(path: Path) -> Traffic:
    """The traffic that a TOML file describes: ``step_s``, and ``[[phase]]`` with the fields of `Phase`."""
    tree = read_toml(path)
    extra = set(tree) - {"step_s", "phase"}
    entries = tree.get("phase", [])
    if extra or "step_s" not in tree or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        cure = "write step_s, and [[phase]] for each kind of communication"
        raise UserError("is no description of traffic", cure=cure, field=str(path), value=sorted(extra))
    phases = tuple(_phase(path, number, entry) for number, entry in enumerate(entries))
    return Traffic(phases, _number(path, "step_s", tree["step_s"]), str(path))


def _phase(path: Path, number: int, entry: Mapping[str, Any]) -> Phase:
    fields = Phase.__dataclass_fields__
    required = ("name", "pattern", "ranks", "stride", "rank_bytes")
    wrong = [key for key in entry if key not in fields] + [key for key in required if key not in entry]
    if wrong:
        cure = f"write {', '.join(required)}, and if you like times, exposed_ratio, cover_s"
        raise UserError("is unknown or missing", cure=cure, field=f"{path}: phase[{number}]", value=wrong[0])
    for key in ("name", "pattern"):
        if not isinstance(entry[key], str):
            raise UserError("is no text", cure="write it in quotes", field=f"{path}: phase[{number}].{key}")
    for key in set(entry) - {"name", "pattern"}:
        _number(path, f"phase[{number}].{key}", entry[key], whole=key in ("ranks", "stride", "times"))
    return Phase(**entry)


def _number(path: Path, key: str, value: object, *, whole: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        cure = f"write it as a {'whole ' if whole else ''}number"
        raise UserError("is no number", cure=cure, field=f"{path}: {key}", value=value)
    return float(value)


@dataclass(frozen=True)
class Flows:
    """Messages between NICs, one entry each."""

    source_host: Indices
    source_nic: Indices
    target_host: Indices
    target_nic: Indices
    num_bytes: NDArray[np.float64]
    group: Indices  # which collective a flow is part of; the flows of one go at the pace of its slowest

    def __len__(self) -> int:
        return len(self.group)

    def repeated(self, times: int) -> Flows:
        """Each flow `times` over, with its share of the bytes."""
        if times == 1:
            return self
        parts = replace(self, num_bytes=self.num_bytes / times)
        return Flows(*(np.repeat(column, times) for column in vars(parts).values()))

    def chosen(self, which: NDArray[np.bool_]) -> Flows:
        """Those of which `which` is true."""
        return Flows(*(column[which] for column in vars(self).values()))

    def moved(self, position: Indices) -> Flows:
        """The same flows where host h stands at `position[h]`."""
        return replace(self, source_host=position[self.source_host], target_host=position[self.target_host])


def make_flows(phase: Phase, devices: int, devices_per_host: int, nics_per_host: int) -> Flows:
    """The messages between hosts of all groups of a phase, for a whole step; nothing for what stays inside hosts.

    Where several members of a group share a host, a ring crosses between hosts once for each of them, each time with
    its share of the bytes and over its own NIC.
    """
    members = _members(phase, devices)
    inside = min(phase.ranks, max(1, devices_per_host // phase.stride))
    source, target, group, share = _PATTERNS[phase.pattern](members, inside)
    source_host, target_host = source // devices_per_host, target // devices_per_host
    source_nic = source % devices_per_host * nics_per_host // devices_per_host
    target_nic = target % devices_per_host * nics_per_host // devices_per_host
    num_bytes = np.full(len(source), phase.rank_bytes * share)
    flows = Flows(source_host, source_nic, target_host, target_nic, num_bytes, group)
    return flows.chosen(source_host != target_host)


FlowPattern = tuple[Indices, Indices, Indices, float]
"""Ranks that send, ranks that receive, their groups, and which share of its bytes a rank sends in each flow."""


def _members(phase: Phase, devices: int) -> Indices:
    """Ranks of each group, (groups, members)."""
    blocks = np.arange(devices, dtype=np.int64).reshape(-1, phase.ranks, phase.stride)
    return blocks.transpose(0, 2, 1).reshape(-1, phase.ranks)


def _ring(members: Indices, inside: int) -> FlowPattern:
    blocks = members.reshape(len(members), -1, inside)
    group = np.repeat(np.arange(len(members)), members.shape[1])
    return blocks.ravel(), np.roll(blocks, -1, axis=1).ravel(), group, 1.0 / inside


def _neighbours(members: Indices, inside: int) -> FlowPattern:
    source, target, group, share = _ring(members, inside)
    return np.r_[source, target], np.r_[target, source], np.r_[group, group], share


def _all_to_all(members: Indices, inside: int) -> FlowPattern:
    groups, ranks = members.shape
    others = [np.roll(members, -step, axis=1).ravel() for step in range(1, ranks)]
    source = np.tile(members.ravel(), ranks - 1)
    group = np.tile(np.repeat(np.arange(groups), ranks), ranks - 1)
    return source, np.concatenate([source[:0], *others]), group, 1.0 / max(ranks - 1, 1)


def _incast(members: Indices, inside: int) -> FlowPattern:
    groups, ranks = members.shape
    target = np.repeat(members[:, 0], ranks - 1)
    return members[:, 1:].ravel(), target, np.repeat(np.arange(groups), ranks - 1), 1.0


_PATTERNS = {"ring": _ring, "neighbours": _neighbours, "all_to_all": _all_to_all, "incast": _incast}


_LEAST_FOR_BYTES = 0.1  # of a phase's time, however large its latency is said to be


def traffic_of(prediction: Prediction, cluster: Cluster) -> Traffic:
    """What a predicted step sends between hosts.

    Bytes are those that the network carries in the predicted time: on an ideal network all takes as long as predicted.
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
