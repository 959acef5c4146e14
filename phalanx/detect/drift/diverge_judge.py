"""The first step at which two runs differ, and in which tensor.

A step has an order of events: its samples are read, the forward pass gives activations and the loss, the backward pass
gradients and their norm, the update new weights and, at times, a checkpoint. What was compared and is equal bounds from
below where the runs part, what differs bounds it from above; the earliest that differs is named. Samples and settings
come first: runs that read other text, or are told to do other things, do not differ in arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Culprit, CulpritKind, Detection, JudgeVerdict, Onset
from phalanx.detect.drift.run_pair import CheckpointDifference, RunPair, Setting

JUDGE = "diverge"

_MOST_NAMED = 6
_TOLERANCES = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_MOMENTS = {"samples": 0, "weight": 1, "activation": 2, "loss": 3, "gradient": 4, "grad_norm": 5, "lr": 6, "update": 7}
"""Events of a step in their order."""


class DivergePolicy(Config):
    """What counts as a difference."""

    tolerance: float = Field(
        0.0, ge=0, lt=1, description="relative difference up to which numbers count as equal; 0: to the last bit"
    )


@dataclass(frozen=True)
class _Difference:
    """At `moment` of `step` something differs; `agreed` is where the same evidence was equal last, 0: never."""

    step: int
    moment: str
    sentence: str
    why: str
    kind: CulpritKind
    name: str
    agreed: int = 0
    relative: float = math.nan

    @property
    def place(self) -> tuple[int, int]:
        """To find the earliest."""
        return self.step, _MOMENTS[self.moment]


def judge(pair: RunPair, policy: DivergePolicy) -> JudgeVerdict:
    """Find where two runs part."""
    found = sorted(_differences(pair, policy.tolerance), key=lambda one: one.place)
    agreement = [_agreement(pair, name) for name in ("loss", "grad_norm")] if pair.figures else []
    tables: dict[str, list[Mapping[str, Any]]] = {
        "settings": [{"key": one.key, "kind": one.kind, "a": one.a, "b": one.b} for one in pair.settings or ()],
        "agreement": [row for row in agreement if row],
        "evidence": [
            {"step": one.step, "moment": one.moment, "name": one.name, "agreed": one.agreed, "relative": one.relative}
            for one in found
        ],
        "tensors": [{"step": one.step, **vars(tensor)} for one in pair.checkpoints for tensor in one.differing],
    }
    looked_at = _looked_at(pair, policy.tolerance, tables["agreement"])
    if not found:
        nothing = not pair.figures and not pair.checkpoints
        return JudgeVerdict(JUDGE, (), pair.missing if nothing else (), looked_at, tables)
    detection = _describe(pair, policy, found, tables["agreement"])
    return JudgeVerdict(JUDGE, (detection,), pair.missing, looked_at, tables)


def _differences(pair: RunPair, tolerance: float) -> Iterator[_Difference]:
    """The first of each kind of evidence."""
    if pair.samples_from:
        yield _Difference(
            pair.samples_from,
            "samples",
            f"they read other samples since step {pair.samples_from:,}",
            f"order of samples: {'equal before that' if pair.samples_from > 1 else 'other samples from the first'}",
            "batch",
            f"batch of step {pair.samples_from}",
            pair.samples_from - 1,
        )
    yield from _of_figures(pair, tolerance)
    yield from _of_norms(pair, tolerance)
    if not tolerance:  # a digest says whether bits differ, not by how much
        yield from _of_digests(pair)
    for one in pair.checkpoints:
        if (found := _of_checkpoint(pair, one, tolerance)) is not None:
            yield found
            return


def _of_figures(pair: RunPair, tolerance: float) -> Iterator[_Difference]:
    names = {"tokens": "number of tokens", "lr": "learning rate", "loss": "loss", "grad_norm": "gradient's norm"}
    moments = {"tokens": "samples", "lr": "lr", "loss": "loss", "grad_norm": "grad_norm"}
    for name, said in names.items():
        agreed = 0
        for step, (one, two) in pair.figures.items():
            if _is_equal(one[name], two[name], tolerance):
                agreed = step
                continue
            both = f"{one[name]!r} and {two[name]!r}"
            yield _Difference(
                step,
                moments[name],
                f"the {said} differs at step {step:,}",
                f"{said} of step {step}: {both}{f'; equal until step {agreed}' if agreed else ''}",
                "batch" if name == "tokens" else "operation",
                {"loss": "forward", "grad_norm": "backward", "lr": "schedule", "tokens": f"batch of step {step}"}[name],
                agreed,
                _relative(one[name], two[name]),
            )
            break


def _of_norms(pair: RunPair, tolerance: float) -> Iterator[_Difference]:
    """Norms of a step are those of the weights that it used, its activations, and its gradients."""
    agreed = dict.fromkeys(("weight", "activation", "gradient"), 0)
    done: set[str] = set()
    for step, norms in pair.norms.items():
        for quantity in ("weight", "activation", "gradient"):
            layers = [
                layer
                for (of, layer), (one, two) in norms.items()
                if of == quantity and not _is_equal(one, two, tolerance)
            ]
            if quantity in done:
                continue
            if not layers:
                agreed[quantity] = step
                continue
            done.add(quantity)
            # The backward pass begins at the last layer.
            layer = layers[-1] if quantity == "gradient" else layers[0]
            one, two = norms[quantity, layer]
            count = sum(of == quantity for of, _ in norms)
            since = f"; equal until step {agreed[quantity]}" if agreed[quantity] else ""
            yield _Difference(
                step,
                quantity,
                f"the {quantity}s of {layer} differ at step {step:,}",
                f"norms of {quantity}s, step {step}: {len(layers)} of {count} layers differ, in the order of the step"
                f" first {layer} ({one!r} and {two!r}){since}",
                "tensor",
                f"{layer} ({quantity})",
                agreed[quantity],
                _relative(one, two),
            )


def _of_digests(pair: RunPair) -> Iterator[_Difference]:
    """Digests of a step: of the gradients that its update was made from, and of the state after it."""
    agreed = dict.fromkeys(("gradient", "weight", "optimizer"), 0)
    done: set[str] = set()
    for step, unlike in pair.digests.items():
        for quantity, tensors in unlike.items():
            if quantity in done:
                continue
            if not tensors:
                agreed[quantity] = step
                continue
            done.add(quantity)
            first = tensors[-1] if quantity == "gradient" else tensors[0]
            since = f"; equal until step {agreed[quantity]}" if agreed.get(quantity) else ""
            what = "gradient" if quantity == "gradient" else "state after the update"
            yield _Difference(
                step,
                "gradient" if quantity == "gradient" else "update",
                f"the {what} of {_several(tensors, first)} differs at step {step:,}",
                f"digests of {quantity}, step {step}: {len(tensors)} tensors differ, first {first}{since}",
                "tensor",
                first,
                agreed.get(quantity, 0),
            )


def _of_checkpoint(pair: RunPair, one: CheckpointDifference, tolerance: float) -> _Difference | None:
    tensors = [
        tensor
        for tensor in one.differing
        if not tolerance or math.isnan(tensor.relative) or tensor.relative > tolerance
    ]
    if not tensors and not one.one_sided:
        return None
    equal = [other.step for other in pair.checkpoints if other.step < one.step]
    agreed = max(equal, default=0)
    since = f"; all are equal in that of step {agreed}" if agreed else ""
    if not tensors:
        names = ", ".join(one.one_sided[:_MOST_NAMED])
        text = f"the checkpoints of step {one.step:,} hold other tensors"
        return _Difference(one.step, "update", text, f"only in one: {names}", "tensor", one.one_sided[0], agreed)
    worst = max(tensors, key=lambda tensor: tensor.relative if math.isfinite(tensor.relative) else math.inf)
    names = _several([tensor.name for tensor in tensors], tensors[0].name)
    return _Difference(
        one.step,
        "update",
        f"the checkpoint of step {one.step:,} differs in {names}",
        f"checkpoint of step {one.step}: {len(tensors)} of {one.equal + len(one.differing)} tensors differ, most of all"
        f" {worst.name} ({worst.differing:,} of {worst.elements:,} elements, by up to {worst.max_abs:.3g}){since}",
        "tensor",
        tensors[0].name if len(tensors) > 1 else worst.name,
        agreed,
        worst.relative,
    )


def _several(names: Any, first: str) -> str:
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more tensor{'s' * (len(names) > 2)}"


def _describe(
    pair: RunPair, policy: DivergePolicy, found: list[_Difference], agreement: list[Mapping[str, Any]]
) -> Detection:
    first = found[0]
    settings = [one for one in pair.settings or () if one.kind != "no number"]
    where = _where(pair, found)
    sentence = f"the runs part at step {first.step:,}: {first.sentence}{where}"
    if first.moment == "samples":
        sentence += ", so that their data differs before any arithmetic"
    why = [one.why for one in found[:5]]
    if settings:
        why.append("settings that differ: " + ", ".join(map(_setting, settings[:_MOST_NAMED])))
    elif pair.settings is not None:
        why.append("no setting differs that changes a number: versions, device or number of threads may, or a fault")
    if pair.samples_from == 0:
        why.append("all steps that both have read the same samples")
    for row in agreement:
        why.append(
            f"{row['figure']}: largest relative difference {row['largest']:.3g} at step {row['largest_step']};"
            f" within 1e-6 until step {row['until_1e-06']}, 1e-3 until step {row['until_0.001']}"
        )
    figures: dict[str, float | int | str] = {
        "step": first.step,
        "moment": first.moment,
        "agreed": first.agreed,
        "tolerance": policy.tolerance,
    }
    if math.isfinite(first.relative):
        figures["relative"] = first.relative
    return Detection(
        "runs differ",
        sentence,
        (Culprit(first.kind, first.name),),
        Onset(step=first.step),
        1.0,
        tuple(why),
        _then(pair, first, settings, policy),
        "none" if settings else "watch",
        figures,
    )


def _where(pair: RunPair, found: list[_Difference]) -> str:
    """What bounds the first difference further."""
    first = found[0]
    if first.moment == "loss" and first.step > 1:
        equal = [one.step for one in pair.checkpoints if not one.differing and not one.one_sided]
        norms = pair.norms.get(first.step, {})
        weights = [values for (quantity, _), values in norms.items() if quantity == "weight"]
        if first.step - 1 in equal or (weights and all(one == two for one, two in weights)):
            return ", in its forward pass: the weights before it are equal"
        return f", by its forward pass or by the update of step {first.step - 1:,}"
    if first.moment == "grad_norm":
        return ", in its backward pass or the sum over ranks: the loss of that step is equal"
    if first.moment == "weight":
        return f", by an update from step {first.agreed:,} on" if first.agreed else ""
    if first.moment == "gradient" and any(one.moment == "activation" for one in found):
        return ""
    if first.moment == "update" and first.agreed:
        return f", by a step after {first.agreed:,}"
    return ""


def _then(pair: RunPair, first: _Difference, settings: list[Setting], policy: DivergePolicy) -> tuple[str, ...]:
    actions = []
    again = f"phalanx detect diverge {pair.a} {pair.b}"
    expected = [one for one in settings if one.kind in ("layout", "other")]
    if expected and not policy.tolerance and first.moment not in ("samples", "lr"):
        actions.append(
            f"other layouts and kernels sum in another order: ask how far they agree, `{again} --tolerance 1e-5`"
        )
    if first.moment == "samples":
        actions.append(f"look at what they read: `phalanx detect loss {pair.a} --batch {first.step}`, and of {pair.b}")
    elif first.moment == "lr":
        actions.append(f"see their schedules: `phalanx runs diff {pair.a} {pair.b}`")
    elif first.kind != "tensor":
        near = max(first.step - 1, 1)
        actions.append(
            f"train both again to step {first.step} with telemetry.digests_every=1 and norms_every=1, and a"
            f" checkpoint of step {near}: they name the tensor"
        )
    if first.kind == "tensor" and pair.checkpoints:
        step = pair.checkpoints[-1].step
        name = f"checkpoints/step-{step:08d}"
        actions.append(f"see all tensors: `phalanx checkpoint diff {pair.a}/{name} {pair.b}/{name}`")
    if not settings and first.moment != "samples":
        actions.append("train one again on other hosts: where it now equals the other, test its hosts, `phalanx check`")
    return tuple(actions)


def _setting(one: Setting) -> str:
    return f"{one.key} {one.a} and {one.b} ({one.kind})"


def _agreement(pair: RunPair, name: str) -> dict[str, Any]:
    """How far a figure agrees: the largest relative difference, and up to which step it stays within tolerances."""
    rows = [(step, _relative(one[name], two[name])) for step, (one, two) in pair.figures.items()]
    rows = [(step, 0.0 if math.isnan(relative) else relative) for step, relative in rows]
    if not rows:
        return {}
    step, largest = max(rows, key=lambda row: row[1])
    found: dict[str, Any] = {
        "figure": name.replace("grad_norm", "gradient's norm"),
        "largest": largest,
        "largest_step": step,
    }
    for tolerance in _TOLERANCES:
        beyond = next((place for place, row in enumerate(rows) if row[1] > tolerance), len(rows))
        found[f"until_{tolerance:g}"] = rows[beyond - 1][0] if beyond else 0
    return found


def _looked_at(pair: RunPair, tolerance: float, agreement: list[Mapping[str, Any]]) -> str:
    parts = [f"{len(pair.figures):,} steps that both have"]
    if pair.norms:
        parts.append(f"norms of {len(pair.norms):,}")
    if pair.digests:
        parts.append(f"digests of {len(pair.digests):,}")
    if pair.checkpoints:
        parts.append(f"{len(pair.checkpoints)} checkpoint{'s' * (len(pair.checkpoints) > 1)}")
    how = f"equal within {tolerance:g}" if tolerance else "equal to the last bit"
    text = f"{', '.join(parts)}, {how}"
    if tolerance and agreement:
        row = agreement[0]
        text += f"; largest relative difference of the loss {row['largest']:.3g} at step {row['largest_step']:,}"
    return text


def _is_equal(one: float, two: float, tolerance: float) -> bool:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return True
    return bool(tolerance) and _relative(one, two) <= tolerance


def _relative(one: float, two: float) -> float:
    """Difference as a share of the larger; infinite where just one is finite."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    if not math.isfinite(one) or not math.isfinite(two):
        return math.inf
    return abs(one - two) / max(abs(one), abs(two))
