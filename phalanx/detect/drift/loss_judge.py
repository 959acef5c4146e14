"""Losses and gradient norms that leave their path, and the batch that did it.

    verdict = judge_run(Path("runs/night"))

Told from each other are

- *not finite*: the loss or the norm was NaN or infinite;
- *loss spike*: it rose for some steps and came back;
- *divergence*: it rose and did not come back;
- *frozen loss*: it stays exactly the same, or is exactly 0: nothing is learnt;
- *gradient spike*: the norm was many times its usual value, and the loss stayed;
- *skipped step*: the policy on bad steps (`optim.bad_step`) left the update out;
- *growing gradient*: the norm has grown several-fold, slowly.

A value is held against the median of its neighbours on both sides, in units of their robust spread, and against the
largest other departure near it, so that noise with heavy tails raises its own bar. The first steps, and the ones in
which the learning rate warms up, are judged less strictly: there both move for good reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.drift.loss_curve import Floats, LossCurve, read_curve

JUDGE = "loss"

_MAD_TO_SIGMA = 1.4826
_NEAR, _FAR = 24, 120  # neighbours on each side: of the usual value, of the largest other departure
_LEAST = 8  # neighbours on each side, fewest
_TOGETHER = 3  # steps between loss and gradient that belong together
_SMOOTH = 25  # steps whose median is the path of the loss
_CONFIRMS, _ODD_FACTOR = 6.0, 1.8  # an odd gradient beside an odd loss: standard deviations, times the usual norm
_MOST_LOSS = 1e150  # larger ones count as this, so that sums of them stay finite
_MOST_SIGMAS = 1e6  # that are written out
_LONG = 20  # steps of trouble, from which on it is rarely one batch
_ROUNDED = 0.1  # of other steps, that repeat the loss before them: then figures are rounded
_ROWS = 1 << 14  # windows at a time


class LossPolicy(Config):
    """What counts as trouble."""

    sigma: float = Field(8.0, ge=3, description="robust standard deviations that a spike of the loss is above its path")
    alone: float = Field(
        2.5, ge=1, description="times as far, where the gradient's norm does not rise in the same steps"
    )
    others: float = Field(1.5, ge=1, description="times the largest other departure near it, that a spike is")
    least_rise: float = Field(0.03, gt=0, description="nats that a loss must rise, and share of the loss")
    gradient_factor: float = Field(4.0, gt=1, description="times the usual gradient norm that is a spike of it")
    grown_factor: float = Field(6.0, gt=1, description="times its lowest level that a slowly growing norm must reach")
    frozen_steps: int = Field(50, ge=10, description="steps of one and the same loss that are told")
    patience: int = Field(50, ge=5, description="steps in which a loss must come back; longer is a divergence")
    least_steps: int = Field(30, ge=20, description="steps without which only values that are not finite are judged")


@dataclass(frozen=True)
class Episode:
    """Places `first` to `last` in which the loss, or the gradient's norm, left its path.

    Attributes:
        what: as in the docstring above.
        cause: place of the step whose batch did it, as far as is known.
        peak, usual: the largest value, and what would have been usual there.
        sigmas: robust standard deviations of that.
        is_over: it came back.
        is_confirmed: both the loss and the norm say so.
        is_lasting: found as a stretch above the lowest path, which other data may have made.
    """

    what: str
    first: int
    last: int
    cause: int
    peak: float
    usual: float
    sigmas: float
    is_over: bool = True
    is_confirmed: bool = False
    is_of_loss: bool = True
    is_lasting: bool = False


def judge_run(run: Path, policy: LossPolicy | None = None) -> JudgeVerdict:
    """Read a run and judge it.

    Raises:
        UserError: no step of it has a loss.
    """
    return judge(read_curve(run), policy or LossPolicy())


def judge(curve: LossCurve, policy: LossPolicy) -> JudgeVerdict:
    """Judge a curve; the gravest first."""
    episodes = [*_not_finite(curve)]
    abstains: tuple[str, ...] = ()
    finite = np.isfinite(curve.loss)
    if finite.sum() >= policy.least_steps:
        episodes += _of_loss_and_gradient(curve, policy)
    else:
        abstains = (f"spikes of {int(finite.sum())} steps; at least {policy.least_steps} are needed: let it train on",)
    episodes += _skipped(curve, episodes)
    if not np.isfinite(curve.grad_norm).any():
        abstains += ("gradient norms; write grad_norm into metrics.jsonl, as phalanx train does",)
    episodes.sort(key=lambda one: (_GRAVITY.index(one.what), one.is_over, -one.sigmas))
    rows = [_row(curve, one) for one in episodes]
    detections = tuple(_describe(curve, one, policy) for one in episodes)
    looked_at = f"{len(curve):,} steps"
    if curve.without_loss:
        looked_at += f"; {curve.without_loss:,} without a number as loss left out"
    shown = abstains if detections or finite.sum() < policy.least_steps else ()
    return JudgeVerdict(JUDGE, detections, shown, looked_at, {"episodes": rows})


_GRAVITY = (
    "not finite",
    "divergence",
    "frozen loss",
    "loss spike",
    "gradient spike",
    "skipped step",
    "growing gradient",
)
_OF_NO_BATCH = ("growing gradient", "frozen loss")


def _not_finite(curve: LossCurve) -> Iterator[Episode]:
    """Runs of steps in which a figure that is written down was not finite."""
    bad = ~np.isfinite(curve.loss)
    if np.isfinite(curve.grad_norm).any():
        bad |= ~np.isfinite(curve.grad_norm)
    for first, last in _runs(bad, _TOGETHER):
        value = curve.loss[first] if not math.isfinite(curve.loss[first]) else curve.grad_norm[first]
        is_over = last < len(curve) - 1
        is_of_loss = not math.isfinite(curve.loss[first])
        cause = first if curve.is_skipped[first] or first == 0 or not is_of_loss else _before(curve, first)
        yield Episode("not finite", first, last, cause, float(value), math.nan, math.inf, is_over, True, is_of_loss)


def _before(curve: LossCurve, first: int) -> int:
    """A loss that is not finite at once comes of its own batch or of the update before: of that one, where its gradient
    was odd."""
    norms = curve.grad_norm[max(first - _NEAR, 0) : first]
    norms = norms[np.isfinite(norms)]
    is_odd = len(norms) > _LEAST and norms[-1] > 4 * np.median(norms)
    return first - 1 if is_odd else first


def _of_loss_and_gradient(curve: LossCurve, policy: LossPolicy) -> list[Episode]:
    loss = np.clip(_filled(curve.loss), -_MOST_LOSS, _MOST_LOSS)
    norms = np.where(curve.grad_norm > 0, curve.grad_norm, np.nan)
    has_norms = np.isfinite(norms).sum() >= policy.least_steps
    log_norm = _filled(np.log(norms)) if has_norms else np.zeros_like(loss)
    loss_rise, loss_sigma, loss_other, loss_usual = departures(loss)
    norm_rise, norm_sigma, norm_other, _ = departures(log_norm)
    slack = _slack(curve)
    floor = np.maximum(policy.least_rise, policy.least_rise * np.abs(loss_usual))
    high = (loss_rise > policy.sigma * slack * loss_sigma) & (loss_rise > policy.others * slack * loss_other)
    high &= loss_rise > floor * slack
    odd = (norm_rise > _CONFIRMS * slack * norm_sigma) & (norm_rise > slack * norm_other)
    odd &= norm_rise > math.log(_ODD_FACTOR)
    far = loss_rise > policy.alone * policy.sigma * slack * loss_sigma
    far &= loss_rise > policy.alone * slack * loss_other
    is_spike = high & (_lately(odd, _TOGETHER) | far)
    lasting = _excursions(curve, loss, policy)
    episodes = [*lasting, *_frozen(curve, policy)]
    for first, last in _runs(is_spike, _TOGETHER):
        if any(one.first - _TOGETHER <= last and first <= one.last + _TOGETHER for one in lasting):
            continue
        peak = first + int(np.argmax(loss[first : last + 1]))
        confirmed = bool(_lately(odd, _TOGETHER)[first : last + 1].any())
        episodes.append(
            Episode(
                "loss spike",
                first,
                last,
                _cause(odd, first),
                float(curve.loss[peak]) if math.isfinite(curve.loss[peak]) else float(loss[peak]),
                float(loss_usual[peak]),
                float(loss_rise[peak] / loss_sigma[peak]),
                is_over=last < len(curve) - 1,
                is_confirmed=confirmed,
            )
        )
    strong = odd & (norm_rise > math.log(policy.gradient_factor)) & (norm_rise > policy.sigma * slack * norm_sigma)
    strong &= norm_rise > policy.alone * slack * norm_other
    for first, last in _runs(strong, _TOGETHER) if has_norms else ():
        if any(one.first - _TOGETHER <= last and first <= one.last + _TOGETHER for one in episodes):
            continue
        peak = first + int(np.argmax(norm_rise[first : last + 1]))
        usual = math.exp(log_norm[peak] - norm_rise[peak])
        sigmas = float(norm_rise[peak] / norm_sigma[peak])
        value = float(math.exp(log_norm[peak]))
        episodes.append(
            Episode("gradient spike", first, last, peak, value, usual, sigmas, last < len(curve) - 1, is_of_loss=False)
        )
    if has_norms and (grown := _growing(curve, log_norm, policy)) is not None:
        episodes.append(grown)
    return episodes


def _slack(curve: LossCurve) -> Floats:
    """By how much less strictly steps are judged: while the rate warms up, and in the first ones."""
    slack = np.ones(len(curve))
    slack[: max(curve.warm_up_end + 1, _NEAR)] = 1.5
    slack[:_LEAST] = 1e9
    return slack


def _cause(odd: np.ndarray, first: int) -> int:
    """The batch that did it: the first with an odd gradient shortly before the loss rose, since a bad update shows in
    the loss of the next step; else the one on which the loss was high."""
    before = range(max(first - _TOGETHER, 0), first + 1)
    return next((place for place in before if odd[place]), first)


def departures(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """For each value: how far it is above the median of its neighbours, their robust standard deviation, the largest
    departure of the others near it, and that median.

    Windows are as long on either side, so that a slope is no departure; the newest values, which have none after them,
    are held against those before.
    """
    count = len(values)
    centre, sigma = np.empty(count), np.empty(count)
    for place in (*range(min(_NEAR, count)), *range(max(count - _NEAR, 0), count)):
        half = min(place, count - 1 - place, _NEAR)
        is_newest = count - 1 - place < _LEAST <= place
        low, high = (place - min(_NEAR, place), place) if is_newest else (place - half, place + half)
        around = values[low : high + 1]
        centre[place] = np.median(around)
        sigma[place] = _MAD_TO_SIGMA * np.median(np.abs(around - centre[place]))
    if count > 2 * _NEAR:
        windows = np.lib.stride_tricks.sliding_window_view(values, 2 * _NEAR + 1)
        for begin in range(0, len(windows), _ROWS):
            chosen = windows[begin : begin + _ROWS]
            places = slice(begin + _NEAR, begin + _NEAR + len(chosen))
            centre[places] = np.median(chosen, axis=1)
            sigma[places] = _MAD_TO_SIGMA * np.median(np.abs(chosen - centre[places, None]), axis=1)
    rise = values - centre
    # A stretch without any noise, as of a model that has learnt all it can, is not a measure.
    sigma = np.maximum(sigma, max(float(np.median(sigma)) * 0.25, 1e-12))
    return rise, sigma, _largest_other(np.abs(rise)), centre


def _largest_other(far: Floats) -> Floats:
    """For each place the largest value near it, `_FAR` on each side, but for its own and the few next to it."""
    padded = np.pad(far, (_FAR, _FAR))
    side = _FAR - _TOGETHER
    largest = np.lib.stride_tricks.sliding_window_view(padded, side).max(axis=1)
    found: Floats = np.maximum(largest[: len(far)], largest[_FAR + _TOGETHER + 1 : _FAR + _TOGETHER + 1 + len(far)])
    return found


def _excursions(curve: LossCurve, loss: Floats, policy: LossPolicy) -> list[Episode]:
    """Stretches in which the path of the loss is above the lowest it has been, by far more than noise explains."""
    if len(loss) < _SMOOTH + _LEAST:
        return []
    path = _trailing_medians(loss, _SMOOTH)
    quick = _trailing_medians(loss, 5)
    lowest = np.minimum.accumulate(path)
    lowest = np.concatenate([np.full(5, np.inf), lowest[:-5]])
    sigma = np.maximum(_MAD_TO_SIGMA * np.median(np.abs(np.diff(loss))) / math.sqrt(2), 1e-12)
    early = np.arange(len(loss)) <= max(curve.warm_up_end, _SMOOTH)
    limit = np.maximum(policy.sigma * sigma, 2 * policy.least_rise * np.maximum(np.abs(lowest), 1.0))
    with np.errstate(invalid="ignore"):
        is_up = quick - lowest > np.where(early, 2.0, 1.0) * limit
        is_up &= ~early | (np.maximum.accumulate(loss) <= quick + 1e-9) | (quick > loss[:_LEAST].max())
    episodes: list[Episode] = []
    for first, last in _runs(is_up, _TOGETHER):
        if last - first < _LEAST and last < len(loss) - 1:
            continue  # a spike of a few steps, which neighbours on both sides show better
        # The median of five is above from the third step on.
        begin = max(first - 2, 0)
        usual = float(lowest[first])
        while begin > 1 and loss[begin - 1] > usual + 0.5 * limit[first]:
            begin -= 1
        if episodes and begin <= episodes[-1].last + _TOGETHER:
            # It came back for so few steps that both are one.
            begin, usual = episodes[-1].first, episodes[-1].usual
            episodes.pop()
        is_over = last < len(loss) - 1
        peak = begin + int(np.argmax(loss[begin : last + 1]))
        lasting = last - begin + 1
        what = "loss spike" if is_over or lasting < policy.patience else "divergence"
        sigmas = float((loss[peak] - usual) / sigma)
        episodes.append(Episode(what, begin, last, begin, float(loss[peak]), usual, sigmas, is_over, is_lasting=True))
    return [_with_gradient(curve, one) for one in episodes]


def _with_gradient(curve: LossCurve, one: Episode) -> Episode:
    """The batch that did it by the gradient's norm, where that was odd shortly before."""
    before = curve.grad_norm[max(one.first - _FAR, 0) : max(one.first - _TOGETHER, 0)]
    before = before[np.isfinite(before)]
    if len(before) < _LEAST:
        return one
    usual = np.median(before)
    places = range(max(one.first - _TOGETHER, 0), min(one.first + _TOGETHER, len(curve) - 1) + 1)
    odd = [place for place in places if curve.grad_norm[place] > 2 * max(usual, np.max(before) / 2)]
    # A norm that grew with a loss that had risen already is a consequence.
    cause = next((place for place in odd if place <= one.first), one.first)
    return replace(one, cause=cause, is_confirmed=bool(odd))


def _frozen(curve: LossCurve, policy: LossPolicy) -> Iterator[Episode]:
    """Stretches of one and the same loss that are no rounding: it or the norm is 0, or it moved in other steps."""
    stays = np.diff(curve.loss, prepend=math.nan) == 0
    for after, last in _runs(stays, 1):
        first = after - 1
        if last - first + 1 < policy.frozen_steps:
            continue
        is_zero = curve.loss[last] == 0 or bool((curve.grad_norm[after : last + 1] == 0).all())
        others = np.concatenate([stays[1:after], stays[last + 1 :]])
        if not is_zero and (len(others) < policy.least_steps or others.mean() > _ROUNDED):
            continue
        value = float(curve.loss[last])
        yield Episode("frozen loss", first, last, first, value, value, 0.0, last < len(stays) - 1, is_zero)


def _growing(curve: LossCurve, log_norm: Floats, policy: LossPolicy) -> Episode | None:
    """The norm, slowly, many times as large as it has been since the warm-up."""
    begin = max(curve.warm_up_end + 1, _FAR)
    if len(log_norm) - begin < 2 * policy.patience:
        return None
    path = _trailing_medians(log_norm, policy.patience)[begin + policy.patience - 1 :]
    lowest = int(np.argmin(path))
    grown = path[-1] - path[lowest]
    if grown < math.log(policy.grown_factor):
        return None
    first = begin + policy.patience - 1 + lowest
    spread = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(log_norm)))) / math.sqrt(2)
    return Episode(
        "growing gradient",
        first,
        len(log_norm) - 1,
        first,
        math.exp(path[-1]),
        math.exp(path[lowest]),
        float(grown / max(spread, 1e-12)),
        is_over=False,
        is_of_loss=False,
    )


def _skipped(curve: LossCurve, known: list[Episode]) -> Iterator[Episode]:
    """Updates that were left out, and that nothing above has told of."""
    for first, last in _runs(curve.is_skipped, _TOGETHER):
        if not any(one.first - _TOGETHER <= last and first <= one.last + _TOGETHER for one in known):
            near = curve.grad_norm[max(first - _NEAR, 0) : first]
            usual = float(np.nanmedian(near)) if np.isfinite(near).any() else math.nan
            yield Episode(
                "skipped step", first, last, first, float(curve.grad_norm[first]), usual, 0.0, is_of_loss=False
            )


def _describe(curve: LossCurve, one: Episode, policy: LossPolicy) -> Detection:
    step, last = int(curve.step[one.first]), int(curve.step[one.last])
    batch_step = int(curve.step[one.cause])
    samples = curve.samples(one.cause)
    rows = "" if samples is None else f" (samples {samples[0]:,} to {sum(samples) - 1:,})"
    who = (Culprit("batch", f"batch of step {batch_step}"),) if one.what not in _OF_NO_BATCH else ()
    unix_s = float(curve.end_unix_s[one.first])
    since = Onset(unix_s if math.isfinite(unix_s) else None, step)
    figures: dict[str, Any] = _row(curve, one)
    why = [_why(curve, one)]
    if one.is_confirmed and one.what in ("loss spike", "divergence"):
        norm = curve.grad_norm[one.cause]
        why.append(f"the gradient's norm left its path too: {norm:.4g} at step {batch_step}")
    if one.is_lasting and not one.is_confirmed:
        has_norms = bool(np.isfinite(curve.grad_norm).any())
        stayed = "the gradient's norm stayed on its path" if has_norms else "no gradient's norm is known"
        why.append(f"{stayed}: a planned change of the data would look the same")
    if curve.is_skipped[one.first : one.last + 1].any():
        why.append("updates of these steps were left out (optim.bad_step)")
    return Detection(
        one.what,
        f"{_sentence(curve, one, step, last)}{f'; batch of step {batch_step:,}{rows}' if who else ''}",
        who,
        since,
        _confidence(one),
        tuple(why),
        _then(curve, one, batch_step),
        "program" if one.what in ("not finite", "divergence") and not one.is_over else "watch",
        figures,
    )


def _sentence(curve: LossCurve, one: Episode, step: int, last: int) -> str:
    steps = last - step + 1
    name = "the loss" if one.is_of_loss else "the gradient's norm"
    if one.what == "not finite":
        until = f"for {steps} step{'s' * (steps > 1)}" if one.is_over else f"in all {steps:,} steps since"
        return f"{name} was {one.peak} at step {step:,}, {until}"
    # Other data move the loss and leave the gradient's norm as it is.
    data = ", or other data came" if one.is_lasting and not one.is_confirmed else ""
    if one.what == "divergence":
        return f"the loss diverges since step {step:,}{data}: it was {one.usual:.4g} and is {curve.loss[-1]:.4g}"
    if one.what == "loss spike":
        back = f"came back after {steps} step{'s' * (steps > 1)}" if one.is_over else "has not come back yet"
        return f"the loss rose to {one.peak:.4g} at step {step:,}, where {one.usual:.4g} was usual{data}, and {back}"
    if one.what == "frozen loss":
        until = f"for {steps:,} steps" if one.is_over else f"in all {steps:,} steps since"
        return f"the loss is exactly {one.peak:.4g} from step {step:,} on, {until}: nothing is learnt"
    if one.what == "gradient spike":
        return f"the gradient's norm was {one.peak:.4g} at step {step:,}, {one.peak / one.usual:.1f} times the usual"
    if one.what == "growing gradient":
        return f"the gradient's norm has grown {one.peak / one.usual:.1f}-fold since step {step:,}, to {one.peak:.4g}"
    return f"{steps} update{'s' * (steps > 1)} left out since step {step:,}"


def _why(curve: LossCurve, one: Episode) -> str:
    if one.what == "not finite":
        return f"metrics.jsonl, step {int(curve.step[one.first])}"
    if one.what == "skipped step":
        return f"metrics.jsonl says skipped at step {int(curve.step[one.first])}; gradient's norm {one.peak:.4g}"
    if one.what == "frozen loss":
        norms = curve.grad_norm[one.first : one.last + 1]
        known = norms[np.isfinite(norms)]
        of_norm = (
            f"the gradient's norm is {np.median(known):.4g} there" if len(known) else "no gradient's norm is known"
        )
        return f"one and the same loss in {one.last - one.first + 1:,} steps; {of_norm}"
    near = "the lowest that its path has been" if one.what in ("divergence", "growing gradient") else "its path there"
    sigmas = f"{one.sigmas:.0f}" if one.sigmas < _MOST_SIGMAS else "more than a million"
    return f"{one.peak:.4g} against {one.usual:.4g}, {near}: {sigmas} robust standard deviations"


def _confidence(one: Episode) -> float:
    if one.what in ("not finite", "skipped step"):
        return 1.0
    if one.what == "frozen loss":
        return 0.95 if one.is_confirmed else 0.8
    if one.is_lasting and not one.is_confirmed:
        return 0.6
    return 0.97 if one.is_confirmed else 0.9 if one.sigmas > 20 else 0.8


def _then(curve: LossCurve, one: Episode, batch_step: int) -> tuple[str, ...]:
    run = curve.run
    look = f"look at that batch: `phalanx detect loss {run} --batch {batch_step}`, or `phalanx dashboard {run}`"
    before = f"go on from a checkpoint before step {int(curve.step[one.first])}: `phalanx checkpoint ls {run}`"
    if one.what == "frozen loss":
        return (
            "see whether updates reach the weights: the learning rate, frozen parameters, a loss mask that is all 0",
            f"look at a batch: `phalanx detect loss {run} --batch {batch_step}`",
        )
    if one.what == "growing gradient":
        norms = "record norms of layers, which say where: `telemetry.norms_every=10`"
        return (norms, "lower the learning rate if the loss follows")
    if one.what in ("not finite", "divergence") and not one.is_over:
        return (look, f"{before}, with a lower rate or a smaller `optim.clip_norm`")
    if one.what in ("loss spike", "divergence") and not one.is_over:
        return (look, f"watch it: if it does not come back, {before}")
    if one.what in ("loss spike", "divergence") and one.last - one.first >= _LONG:
        return ("lower `optim.lr` or warm up longer: what one batch does is over sooner", look)
    return (look, "nothing else, unless it comes again: then lower the rate or clip at a smaller norm")


def _row(curve: LossCurve, one: Episode) -> dict[str, Any]:
    samples = curve.samples(one.cause)
    return {
        "what": one.what,
        "step": int(curve.step[one.first]),
        "last_step": int(curve.step[one.last]),
        "batch_step": int(curve.step[one.cause]),
        "first_sample": -1 if samples is None else samples[0],
        "samples": 0 if samples is None else samples[1],
        "peak": one.peak,
        "usual": one.usual,
        "sigmas": one.sigmas,
        "is_over": int(one.is_over),
    }


def _runs(flags: np.ndarray, apart: int) -> Iterator[tuple[int, int]]:
    """First and last place of flags that lie at most so many places from each other."""
    places = np.flatnonzero(flags)
    if not len(places):
        return
    cuts = np.flatnonzero(np.diff(places) > apart)
    firsts = np.concatenate([[0], cuts + 1])
    lasts = np.concatenate([cuts, [len(places) - 1]])
    for first, last in zip(firsts, lasts, strict=True):
        yield int(places[first]), int(places[last])


def _lately(flags: np.ndarray, by: int) -> np.ndarray:
    """Whether there is one at a place, or at most so many before it."""
    found: np.ndarray = np.convolve(flags, np.ones(by + 1))[: len(flags)] > 0
    return found


def _filled(values: Floats) -> Floats:
    """Values that are not finite are those before them."""
    known = np.isfinite(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.where(last >= 0, values[np.maximum(last, 0)], values[np.argmax(known)])


def _trailing_medians(values: Floats, width: int) -> Floats:
    """Of a value and those before it; the first ones of as many as there are."""
    found = np.empty(len(values))
    for place in range(min(width - 1, len(values))):
        found[place] = np.median(values[: place + 1])
    windows = np.lib.stride_tricks.sliding_window_view(values, width) if len(values) >= width else values[:0, None]
    for begin in range(0, len(windows), _ROWS):
        chosen = windows[begin : begin + _ROWS]
        found[width - 1 + begin : width - 1 + begin + len(chosen)] = np.median(chosen, axis=1)
    return found
