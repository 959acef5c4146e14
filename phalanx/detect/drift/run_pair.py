"""Two runs side by side: figures of steps, norms of layers, settings, samples and checkpoints that both have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.core.errors import UserError
from phalanx.detect.corruption.digest_file import read_digests
from phalanx.detect.drift.batch_of_step import places_of, samples_of_step
from phalanx.detect.drift.metrics_entries import figure, read_entries
from phalanx.telemetry.layer_norms import read_norms
from phalanx.telemetry.run_list import flattened, read_config

FIGURES = ("tokens", "lr", "loss", "grad_norm", "skipped")

_OF_NO_NUMBER = ("run.", "logging.", "telemetry.", "checkpoint.", "alerts.", "evaluate.")
"""Settings that change no number of a step."""
_MOST_SAMPLES = 1 << 17

SettingKind = Literal["layout", "data", "model", "optimizer", "schedule", "seed", "other", "no number"]


@dataclass(frozen=True)
class Setting:
    """One that differs; None: it is not set there."""

    key: str
    a: Any
    b: Any

    @property
    def kind(self) -> SettingKind:
        """What it changes."""
        first, _, last = self.key.partition(".")
        if self.key.startswith(_OF_NO_NUMBER):
            return "no number"
        if last.endswith("seed"):
            return "seed"
        if first == "data":
            # Where the corpus lies does not change what is in it.
            return "no number" if last in ("folder", "tokenizer.path", "workers") else "data"
        if self.key in ("train.steps", "train.tokens") or self.key.startswith("optim.schedule"):
            return "schedule"
        known: dict[str, SettingKind] = {"parallel": "layout", "model": "model", "optim": "optimizer"}
        return known.get(first, "other")


@dataclass(frozen=True)
class TensorDifference:
    """Of a tensor in two checkpoints; `relative`: the largest difference as a share of the largest value; NaN: shapes
    differ, or A is all zero."""

    name: str
    differing: int
    elements: int
    max_abs: float
    relative: float


@dataclass(frozen=True)
class CheckpointDifference:
    """Two checkpoints of the same step: how many tensors are equal to the last bit, and the others."""

    step: int
    equal: int
    differing: tuple[TensorDifference, ...] = ()
    one_sided: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPair:
    """What is known of both.

    Attributes:
        a, b: their folders, for commands.
        figures: by step, of both: `FIGURES` by name; steps that only one has are left out.
        lengths: last step of each.
        settings: that differ; None: those of a run cannot be read.
        norms: by step that both have: (quantity, layer) -> values of both.
        samples_from: the first step that reads other samples; 0: all that could be compared are the same; None: they
            could not be compared.
        digests: by step of which both have digests of their state: by quantity the tensors whose digests differ, in the
            order of the model; none: they are all equal.
        checkpoints: that were compared, in rising order: up to the first in which a tensor differs.
        missing: what is not there, with the cure after a semicolon.
    """

    a: str
    b: str
    figures: Mapping[int, tuple[Mapping[str, float], Mapping[str, float]]]
    lengths: tuple[int, int] = (0, 0)
    settings: tuple[Setting, ...] | None = ()
    norms: Mapping[int, Mapping[tuple[str, str], tuple[float, float]]] = field(default_factory=dict)
    samples_from: int | None = None
    digests: Mapping[int, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    checkpoints: tuple[CheckpointDifference, ...] = ()
    missing: tuple[str, ...] = ()


def read_pair(
    a: Path,
    b: Path,
    checkpoint_steps: Sequence[int] = (),
    compare: Callable[[int], CheckpointDifference] | None = None,
) -> RunPair:
    """Read both.

    Args:
        checkpoint_steps: of checkpoints that both have.
        compare: compares those of a step; called in rising order until a tensor differs.

    Raises:
        UserError: a run has no figures, and there is no checkpoint that both have.
    """
    checkpoints = _compared(sorted(checkpoint_steps), compare)
    left, right = _figures(a), _figures(b)
    if not checkpoints:
        for path, found in ((a, left), (b, right)):
            if not found:
                cure = "give two runs with metrics.jsonl, or with a checkpoint of the same step"
                raise UserError("no figures of steps in its metrics.jsonl", cure=cure, value=str(path))
    both = sorted(left.keys() & right.keys())
    missing = []
    settings = _settings(a, b)
    if settings is None:
        missing.append("settings of both runs; give folders that `phalanx train` wrote")
    norms = _norms(a, b)
    digests = _digests(a, b)
    if not norms and not digests:
        missing.append("what names a layer or tensor; train both with telemetry.digests_every=1 or norms_every=1")
    if not checkpoints:
        missing.append("checkpoints of the same step; save both at the same steps (checkpoint.every_steps)")
    samples_from, why = _first_other_samples(a, b, left, right, settings)
    if why:
        missing.append(why)
    return RunPair(
        str(a),
        str(b),
        {step: (left[step], right[step]) for step in both},
        (max(left, default=0), max(right, default=0)),
        settings,
        norms,
        samples_from,
        digests,
        checkpoints,
        tuple(missing),
    )


def _compared(
    steps: Sequence[int], compare: Callable[[int], CheckpointDifference] | None
) -> tuple[CheckpointDifference, ...]:
    found = []
    for step in steps if compare is not None else ():
        assert compare is not None
        found.append(compare(step))
        if found[-1].differing or found[-1].one_sided:
            break
    return tuple(found)


def _figures(run: Path) -> dict[int, dict[str, float]]:
    try:
        entries = [entry for entry in read_entries(run) if entry["kind"] == "step"]
    except FileNotFoundError:
        return {}
    return {entry["step"]: {name: figure(entry, name) for name in FIGURES} for entry in entries}


def _settings(a: Path, b: Path) -> tuple[Setting, ...] | None:
    try:
        old, new = (dict(flattened(read_config(path))) for path in (a, b))
    except UserError:
        return None
    return tuple(
        Setting(key, old.get(key), new.get(key))
        for key in dict.fromkeys((*old, *new))
        if (key in old) != (key in new) or old.get(key) != new.get(key)
    )


def _norms(a: Path, b: Path) -> dict[int, dict[tuple[str, str], tuple[float, float]]]:
    tables: list[dict[int, dict[tuple[str, str], float]]] = []
    for run in (a, b):
        by_step: dict[int, dict[tuple[str, str], float]] = {}
        for row in read_norms(run).to_pylist():
            by_step.setdefault(row["step"], {})[row["quantity"], row["layer"]] = row["value"]
        tables.append(by_step)
    left, right = tables
    return {
        step: {key: (left[step][key], right[step][key]) for key in left[step] if key in right[step]}
        for step in sorted(left.keys() & right.keys())
    }


def _digests(a: Path, b: Path) -> dict[int, dict[str, tuple[str, ...]]]:
    """Tensors whose digests differ, by step and quantity; digests of tensors that only one has are left out."""
    left, right = read_digests(a), read_digests(b)
    return {
        step: {
            quantity: tuple(
                tensor
                for tensor, digest in digests.items()
                if digest != right[step].of.get(quantity, {}).get(tensor, digest)
            )
            for quantity, digests in left[step].of.items()
            # Those of quantised moments depend on how they are split over ranks.
            if quantity != "optimizer" or left[step].layout == right[step].layout
        }
        for step in sorted(left.keys() & right.keys())
    }


def _first_other_samples(
    a: Path,
    b: Path,
    left: Mapping[int, Mapping[str, float]],
    right: Mapping[int, Mapping[str, float]],
    settings: tuple[Setting, ...] | None,
) -> tuple[int | None, str]:
    """The first step that reads other samples (0: none does; None: not known), and why that is not known."""
    last = min(max(left, default=0), max(right, default=0))
    if settings is None or not last:
        return None, ""
    begins = _begins(a, left, last), _begins(b, right, last)
    is_one_order = not any(one.kind in ("data", "seed") for one in settings)
    if begins[0] is None or begins[1] is None:
        return None, "samples of the steps; neither tokens of steps nor settings say how large batches are"
    if is_one_order and begins[0] == begins[1]:
        return 0, ""
    most = min(begins[0][-1], begins[1][-1], _MOST_SAMPLES)
    try:
        orders = [places_of(run, 0, most) for run in (a, b)]
    except UserError as error:
        return None, f"samples of the steps ({error.problem}); compare where the prepared corpora are"
    other = next((place for place, (one, two) in enumerate(zip(*orders, strict=True)) if one != two), math.inf)
    for step in range(1, last + 1):
        is_same_size = begins[0][step] == begins[1][step]
        if not is_same_size or begins[0][step] > other:
            return step, ""
    return 0, ""


def _begins(run: Path, figures: Mapping[int, Mapping[str, float]], last: int) -> list[int] | None:
    """How many samples were read up to each step, from step 0; None: not known."""
    try:
        settings = read_config(run)
        length = int(settings["data"]["sequence_length"])
        read = [0]
        for step in range(1, last + 1):
            before = 0.0 if step == 1 else figures.get(step - 1, {}).get("tokens", math.nan)
            after = figures.get(step, {}).get("tokens", math.nan)
            start, count = samples_of_step(settings, length, step, before, after)
            read.append(start + count)
    except (UserError, KeyError, TypeError, ValueError):
        return None
    return read
