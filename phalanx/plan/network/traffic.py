"""What a step sends between hosts, as a value: handed in, read from a file, or worked out from a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from phalanx.core.errors import UserError
from phalanx.plan.toml_tree import read_tree

Pattern = Literal["ring", "neighbours", "all_to_all", "incast"]
"""Who sends to whom in a group: each to the next one (all-gather, reduce-scatter, all-reduce); to the next and the one
before (pipeline stages, with the last one beside the first); each to all others; all to the first."""

_LARGEST_ALL_TO_ALL = 1_000_000


@dataclass(frozen=True)
class Phase:
    """One kind of communication of a step, by all groups of ranks at a time.

    Attributes:
        ranks: members of a group.
        stride: distance of neighbours in a group, in ranks.
        rank_bytes: what each member sends in a step, in each direction.
        times: how often in a step: messages, or collectives, of which each has its share of the bytes.
        exposed_ratio: the share of its time that the step waits for while nothing is in its way.
        cover_s: work in a step that may hide the rest; None: just as much as hides it while nothing is in its way.
    """

    name: str
    pattern: Pattern
    ranks: int
    stride: int
    rank_bytes: float
    times: int = 1
    exposed_ratio: float = 1.0
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
    """All that a step sends between hosts.

    Attributes:
        step_s: how long a step takes while nothing is in the way of its messages.
        source: where these numbers come from.
    """

    phases: tuple[Phase, ...]
    step_s: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.step_s < 1e6:
            raise UserError("is no time of a step", cure="write seconds", field="step_s", value=self.step_s)
        if not self.phases:
            raise UserError("nothing is sent", cure="add a phase", field="phases")

    def check(self, devices: int) -> None:
        """Refuse devices that the groups do not fill.

        Raises:
            UserError: they do not, or there would be more flows than can be looked at.
        """
        for phase in self.phases:
            block = phase.ranks * phase.stride
            if devices % block:
                cure = f"take a multiple of {block:,} devices ({phase.ranks:,} ranks at distance {phase.stride:,})"
                raise UserError(f"groups of phase {phase.name} are not full", cure=cure, field="devices", value=devices)
            if phase.pattern == "all_to_all" and devices * (phase.ranks - 1) > _LARGEST_ALL_TO_ALL:
                cure = f"take groups of at most {_LARGEST_ALL_TO_ALL // devices + 1} ranks"
                raise UserError("too many pairs", cure=cure, field=f"phase {phase.name}: ranks", value=phase.ranks)


@dataclass(frozen=True)
class Layout:
    """A model spread over devices, as far as its messages depend on it; ranks are numbered tensor, data, pipeline.

    Attributes:
        parameters: of the whole model.
        chunks: model chunks of each pipeline rank.
        reduce_bytes: of one gradient as it travels.
        gather_bytes: of one weight as it travels.
    """

    parameters: float
    layers: int
    hidden: int
    sequence: int
    global_batch: int
    tensor: int
    pipeline: int
    data: int
    chunks: int = 1
    micro_batch: int = 1
    reduce_bytes: int = 4
    gather_bytes: int = 2
    activation_bytes: int = 2

    @property
    def micro_batches(self) -> int:
        """Forward passes of every stage in one step."""
        return self.global_batch // (self.data * self.micro_batch)


_BACKWARD = 2 / 3
"""Share of a step's computing that is backward, without recomputing."""


def make_traffic(layout: Layout, step_s: float, source: str) -> Traffic:
    """What a step of that layout sends between hosts, and how much of it is hidden, by rules of thumb.

    Gradients of a chunk are reduced, and weights gathered, while the chunks after it are at work on as many
    micro-batches as there are stages (interleaved 1F1B); those of the last, or first, chunk are waited for. Sends of a
    pipeline are hidden but for those that fill and drain it.
    """
    return Traffic((*_data_phases(layout, step_s), *_pipeline_phases(layout, step_s)), step_s, source)


def _data_phases(layout: Layout, step_s: float) -> tuple[Phase, ...]:
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


def _pipeline_phases(layout: Layout, step_s: float) -> tuple[Phase, ...]:
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
    """The traffic that a TOML file describes: ``step_s``, and ``[[phase]]`` with the fields of `Phase`.

    Raises:
        UserError: it cannot be read, or a key is unknown, missing, or cannot be.
    """
    tree = read_tree(path)
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
