"""What reports say, however they are rendered: a prediction and what a reader compares it with.

`PredictionReport` is a prediction with its device, prices and remarks; `make_tree` the parts of a step as a tree whose
numbers add up as they are printed; `toml_keys` a layout as text to paste into a config, and `foreign` what such a
config cannot say; `limits_of` what keeps a layout from being faster. `text`, `as_json` and `page` render them.

The second half is the same as plain values for JSON: stable keys, with units in their names.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from phalanx.plan.jobs import settings_of
from phalanx.plan.memory.rank import is_reserved_known
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import SearchResult
from phalanx.plan.types import INTERVAL_SHARE, Job, Mark, Part, Prediction, RankMemory, Strategy


@dataclass(frozen=True)
class PredictionReport:
    """A prediction, and what it is held against."""

    prediction: Prediction
    name: str
    parameters: int
    device: str
    device_memory_bytes: float
    total_tokens: int = 0  # of the whole run; 0: not known
    usd_per_device_hour: float | None = None  # price; None: not known
    remarks: tuple[str, ...] = ()
    reliefs: tuple[Prediction, ...] = ()  # where it does not fit, layouts on the same ranks that do, the fastest first

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank whose fullest rank holds most."""
        return max(self.prediction.memory, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank holds no more than its device has."""
        return self.fullest.total <= self.device_memory_bytes

    @property
    def run_s(self) -> float | None:
        """Time to train on all tokens without any failure, seconds."""
        return self.total_tokens / self.prediction.tokens_per_s if self.total_tokens else None

    @property
    def device_hours(self) -> float | None:
        """Hours of that, of all devices together."""
        return None if self.run_s is None else self.run_s / 3600 * self.prediction.devices

    @property
    def cost_usd(self) -> float | None:
        """Price of that, US dollars."""
        if self.device_hours is None or self.usd_per_device_hour is None:
            return None
        return self.device_hours * self.usd_per_device_hour


def changed_settings(old: Strategy, new: Strategy) -> str:
    """What to give on the command line to come from one layout to another on the same ranks."""
    before, after = settings_of(old), settings_of(new)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    # `settings_of` leaves defaults out, and so would not name a stage that goes back to the default.
    if new.zero != old.zero:
        changed["parallel.zero"] = int(new.zero)
    return " ".join(f"{key}={value}" for key, value in changed.items())


MEMORY_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "workspace",
    "loss_head",
    "communication",
    "fragmentation",
)
"""Fields of `RankMemory` that add up to its total."""


def pipeline_ranks_shown(ranks: tuple[RankMemory, ...], most: int = 4) -> list[RankMemory]:
    """All pipeline ranks where they are few, else the first, the fullest, a middle one and the last."""
    if len(ranks) <= most:
        return list(ranks)
    fullest = max(range(len(ranks)), key=lambda place: ranks[place].total)
    return [ranks[place] for place in sorted({0, fullest, len(ranks) // 2, len(ranks) - 1})]


_MARKS: tuple[Mark, ...] = ("measured", "derived", "assumed")


@dataclass
class Node:
    """A part, or a group of parts."""

    name: str
    path: str
    seconds: float = 0.0  # of it and all below it
    part: Part | None = None  # the part of just this path; None for a mere group
    children: list[Node] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """This node and all below it, with how deep each lies."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def make_tree(parts: Sequence[Part]) -> Node:
    """The parts under one root called ``step``, those that cost most first; parts without any time are left out.

    A path that is a part and has parts below it, such as ``optimizer`` beside ``optimizer/norms``, keeps what is its
    own in a child called ``rest``.
    """
    root = Node("step", "")
    nodes: dict[str, Node] = {"": root}
    for part in parts:
        # A part of no time has no place in a report, and its source would be listed for nothing.
        if part.seconds:
            _put(nodes, part)
    for node in list(nodes.values()):
        if node.part is not None and node.children:
            # Otherwise the numbers below a node would not add up to it.
            node.children.append(Node("rest", node.path, node.part.seconds, node.part))
            node.part = None
    _order(root)
    return root


def _put(nodes: dict[str, Node], part: Part) -> None:
    node = nodes[""]
    node.seconds += part.seconds
    names = part.path.split("/")
    for depth, name in enumerate(names, 1):
        path = "/".join(names[:depth])
        if path not in nodes:
            nodes[path] = Node(name, path)
            node.children.append(nodes[path])
        node = nodes[path]
        node.seconds += part.seconds
    node.part = part if node.part is None else _joined(node.part, part)


def _joined(one: Part, other: Part) -> Part:
    source = one.source if one.source == other.source else f"{one.source}; {other.source}"
    # Of two marks the weaker one holds for both together.
    mark = max(one.mark, other.mark, key=_MARKS.index)
    return Part(one.path, one.seconds + other.seconds, mark, source)


def _order(node: Node) -> None:
    # "rest" comes last, however large it is: it explains what the parts above it leave.
    node.children.sort(key=lambda child: (child.name == "rest", -child.seconds))
    for child in node.children:
        _order(child)


def marks_of(node: Node) -> set[Mark]:
    """How the parts at and below a node are known."""
    return {below.part.mark for _, below in node.walk() if below.part is not None}


def pruned(node: Node, least_s: float) -> Node:
    """The tree without its smallest leaves: those of a group are one, and a group that is small has none."""
    if not node.children:
        return node
    # Absolute values, since an efficiency above 1 is a part of negative time.
    if node.path and abs(node.seconds) < least_s:
        return _as_leaf(node, node.name, node.path)
    # A single small part stays under its own name: "1 small one" would take as much room.
    small = [child for child in node.children if abs(child.seconds) < least_s and node.path]
    kept = [pruned(child, least_s) for child in node.children if len(small) < 2 or child not in small]
    if len(small) >= 2:
        group = Node("", node.path, sum(child.seconds for child in small), None, small)
        kept.append(_as_leaf(group, f"{len(small)} small ones", f"{node.path}/…"))
    return Node(node.name, node.path, node.seconds, node.part, kept)


def _as_leaf(node: Node, name: str, path: str) -> Node:
    parts = [below.part for _, below in node.walk() if below.part is not None]
    mark = max((part.mark for part in parts), key=_MARKS.index)
    source = "; ".join(dict.fromkeys(part.source for part in parts))
    return Node(name, path, node.seconds, Part(path, node.seconds, mark, source))


def rounded(root: Node, unit_s: float) -> dict[int, int]:
    """Every node's time in whole units, such that the printed numbers of a group add up to the group's.

    The total is rounded as usual; among parts, those that lost most by rounding down get what is missing.

    Args:
        unit_s: the last printed digit, seconds.
    """
    leaves = [node for _, node in root.walk() if not node.children]
    # The largest-remainder method.
    wanted = round(root.seconds / unit_s)
    units = {id(node): math.floor(node.seconds / unit_s) for node in leaves}
    by_loss = sorted(leaves, key=lambda node: node.seconds / unit_s % 1, reverse=True)
    for node in by_loss[: max(wanted - sum(units.values()), 0)]:
        units[id(node)] += 1
    # From the leaves upwards: children come behind their parents in the walk.
    for node in reversed([node for _, node in root.walk()]):
        if node.children:
            units[id(node)] = sum(units[id(child)] for child in node.children)
    return units


def printed(root: Node) -> tuple[str, dict[int, str]]:
    """Every node's time as it is printed, all in one unit, to about a thousandth of the whole."""
    unit, scale, decimals = precision_of(root.seconds)
    ticks = rounded(root, 10.0**-decimals / scale)
    return unit, {key: f"{count * 10.0**-decimals:,.{decimals}f}" for key, count in ticks.items()}


def precision_of(total_s: float) -> tuple[str, float, int]:
    """Unit, units per second and decimals that suit a time of this length."""
    if total_s >= 1:
        return "seconds", 1.0, 3 if total_s < 100 else 1
    return ("ms", 1e3, 2) if total_s < 0.1 else ("ms", 1e3, 1)


# A bucket for each model chunk: more than any chunk has.
_WHOLE_CHUNK_BYTES = 1_000_000_000_000


def toml_keys(job: Job, strategy: Strategy) -> str:
    """The sections ``[parallel]`` and ``[train]`` that give `strategy`; settings with their defaults are left out.

    What `foreign` names is not in them.
    """
    # 0 is not a setting of `phalanx train`; a bucket that is larger than any chunk comes to the same.
    one_bucket = strategy.bucket_bytes == 0
    settings = settings_of(replace(strategy, bucket_bytes=_WHOLE_CHUNK_BYTES) if one_bucket else strategy)
    settings["train.global_batch"] = job.global_batch
    sections: dict[str, list[str]] = {"parallel": [], "train": []}
    for key, value in settings.items():
        section, name = key.split(".")
        sections[section].append(f"{name} = {json.dumps(value)}")
    return "\n\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items() if lines) + "\n"


def foreign(strategy: Strategy) -> tuple[str, ...]:
    """What `phalanx train` cannot do of `strategy`, in words; empty where it can do all."""
    reasons = {
        "recompute = attention: phalanx train recomputes none, all but matrix products, the MLP's first too, or all": (
            strategy.recompute == "attention"
        ),
        "sequence_parallel = false: phalanx train always splits rows between tensor ranks": (
            strategy.tensor > 1 and not strategy.sequence_parallel
        ),
        "expert parallel: phalanx train has no mixtures of experts": strategy.expert > 1,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


# The longest path that a part begins with names it.
_NAMES = {
    "compute": "computing",
    "compute/recompute": "computing again in backward passes",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchange between experts",
    "pipeline": "sends between stages",
    "pipeline/bubble": "pipeline bubble",
    "data": "data-parallel tail",
    "optimizer": "optimizer",
    "norms": "gradient norm and synchronisation",
    "loader": "data loader",
    "stragglers": "waiting for the slowest rank",
}
_FULL = 0.85


@dataclass(frozen=True)
class StepLimit:
    """One thing that limits a layout."""

    words: str  # such as ``data-parallel tail 0.48 s of 6.34 s``
    seconds: float  # of a step; 0 for memory
    share: float  # of the step, or of the memory that may be filled


def limits_of(prediction: Prediction, limit_bytes: float, count: int = 3) -> tuple[StepLimit, ...]:
    """The `count` largest parts of a step besides computing, and memory where little is left of it; largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for part in prediction.parts:
        seconds[_name(part.path)] += part.seconds
    # Computing is what a step is for.
    seconds.pop(_NAMES["compute"], None)
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    parts = [
        StepLimit(f"{name} {value:.3g} s of {prediction.step_s:.3g} s", value, value / prediction.step_s)
        for name, value in largest
        if value > 0
    ]
    return (*parts, *_memory(prediction, limit_bytes))


def _memory(prediction: Prediction, limit_bytes: float) -> tuple[StepLimit, ...]:
    used = memory_bytes(prediction)
    if used < _FULL * limit_bytes:
        return ()
    return (StepLimit(f"memory {used / 2**30:.3g} of {limit_bytes / 2**30:.3g} GiB", 0.0, used / limit_bytes),)


def _name(path: str) -> str:
    pieces = path.split("/")
    # The longest known beginning of the path first.
    heads = ["/".join(pieces[:length]) for length in range(len(pieces), 0, -1)]
    return next((_NAMES[head] for head in heads if head in _NAMES), pieces[0])


VERSION = 1  # grows when a key goes or changes its meaning; new keys leave it as it is


def finite(value: Any) -> Any:
    """The same, with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    # JSON has neither infinity nor NaN; Python would write both, and other readers fail on them.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def prediction_json(report: PredictionReport) -> dict[str, Any]:
    """Everything that is known of a prediction. `parts` sum to `step_s`; `hidden` is beside that sum."""
    prediction, job = report.prediction, report.prediction.job
    return {
        "version": VERSION,
        "name": report.name,
        "cluster": prediction.cluster,
        "device": report.device,
        "devices": prediction.devices,
        "parameters": report.parameters,
        "job": {
            "model": asdict(job.model),
            "sequence_tokens": job.sequence,
            "global_batch_sequences": job.global_batch,
            "precision": job.precision,
            "optimizer": job.optimizer,
            "state_bits": job.state_bits,
            "software": asdict(job.software),
        },
        "strategy": strategy_json(prediction.strategy),
        "step_s": prediction.step_s,
        "step_interval_s": None if prediction.interval_s is None else list(prediction.interval_s),
        "interval_share_ratio": None if prediction.interval_s is None else INTERVAL_SHARE,
        "not_judged": prediction.unjudged or None,
        "efficiency_ratio": prediction.job.added.efficiency,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu_ratio": prediction.mfu,
        "model_flops_per_step": prediction.model_flops,
        "run_tokens": report.total_tokens or None,
        "run_s": report.run_s,
        "run_device_hours": report.device_hours,
        "cost_usd": report.cost_usd,
        "fits": report.fits,
        "is_reserved_known": is_reserved_known(job.software),
        "device_memory_bytes": report.device_memory_bytes,
        "parts": [part_json(part) for part in prediction.parts],
        "hidden": [part_json(part) for part in prediction.hidden],
        "memory": [
            {
                "pipeline_rank": rank.pipeline_rank,
                **{f"{kind}_bytes": float(getattr(rank, kind)) for kind in MEMORY_KINDS},
                "total_bytes": float(rank.total),
            }
            for rank in prediction.memory
        ],
        "start_up": [part_json(part) for part in prediction.start_up],
        "reliefs": [
            {
                "settings": changed_settings(prediction.strategy, one.strategy),
                "step_s": one.step_s,
                "fullest_bytes": float(memory_bytes(one)),
            }
            for one in report.reliefs
        ],
        "notes": [*report.remarks, *prediction.notes],
    }


def part_json(part: Part) -> dict[str, Any]:
    """A part, with `seconds`, how it is known, and what it rests on."""
    return {"path": part.path, "seconds": float(part.seconds), "mark": part.mark, "source": part.source}


def strategy_json(strategy: Strategy) -> dict[str, Any]:
    """Every field of a strategy, integers being plain ones."""
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    return {name: value if isinstance(value, str | bool) else int(value) for name, value in values.items()}


def search_json(result: SearchResult) -> dict[str, Any]:
    """Everything that a search found, best first."""
    sensitivities = [
        {
            "choice": choice.choice,
            "value": choice.value,
            "spread_s": choice.spread_s,
            "outcomes": [
                {
                    "value": outcome.value,
                    "best_step_s": None if outcome.best is None else outcome.best.step_s,
                    "proven": outcome.proven,
                    "least_bytes": outcome.least_bytes,
                    "alone_step_s": None if outcome.alone is None else outcome.alone.step_s,
                }
                for outcome in choice.outcomes
            ],
        }
        for choice in result.sensitivities
    ]
    return {
        "version": VERSION,
        "machine": asdict(result.machine),
        "asked": [bound.text for bound in result.asked.bounds],
        "limit_bytes": result.limit_bytes,
        "candidates": result.candidates,
        "fitting": result.fitting,
        "predicted": result.predicted,
        "proven": result.proven,
        "lower_s": result.lower_s,
        "seconds": result.seconds,
        **{
            name: [layout_json(prediction, result.limit_bytes) for prediction in getattr(result, name)]
            for name in ("best", "shapes", "pareto")
        },
        "unlimited": layout_json(result.unlimited, result.limit_bytes),
        "sensitivities": sensitivities,
        "removed": [asdict(rule) for rule in result.removed],
    }


def layout_json(prediction: Prediction, limit_bytes: float) -> dict[str, Any]:
    """One layout that a search found, without its parts."""
    return {
        "strategy": strategy_json(prediction.strategy),
        "step_s": float(prediction.step_s),
        "tokens_per_s": float(prediction.tokens_per_s),
        "mfu_ratio": float(prediction.mfu),
        "memory_bytes": float(memory_bytes(prediction)),
        "limits": [limit.words for limit in limits_of(prediction, limit_bytes)],
        "toml": toml_keys(prediction.job, prediction.strategy),
        "not_possible_yet": list(foreign(prediction.strategy)),
    }
