"""Steps that become longer, at once or slowly: since which step, and which part of them grew.

    verdict = judge_run(Path("runs/night"))
    verdict.detections[0].sentence
    # steps take 12% longer since step 4,200: backward of all ranks takes 0.41 s of the 0.45 s more

Steps that take longer for a good reason are not compared: the first ones of each start, those with an evaluation or a
checkpoint, and, where batches grow, seconds are counted by token. What only lasted for a while is told in the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Advice, Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.drift.change_points import Change, ChangePolicy, Floats, find_change, find_changes, find_jump_at
from phalanx.detect.drift.drift_causes import Cause, find_cause, ranks_behind, windows
from phalanx.detect.drift.step_series import OWN, StepSeries, read_series

JUDGE = "drift"

_MOST = 4
_LESSER = 0.5  # of the largest growth: changes beside it that are told too
_MOST_NAMED = 8


class DriftPolicy(Config):
    """What counts as drift."""

    change: ChangePolicy = Field(default_factory=ChangePolicy, description="what counts as a change of a series")
    warm_up_steps: int = Field(5, ge=0, description="first steps of each start that are left out")
    restart_growth: float = Field(
        0.05, gt=0, description="growth from one start of a run to the next that counts, as a share"
    )


@dataclass(frozen=True)
class _Stretch:
    """Steps of one start: all of them are at `places`; `seconds` is what is compared."""

    start: int
    places: np.ndarray
    seconds: Floats
    is_by_token: bool


def judge_run(run: Path, policy: DriftPolicy | None = None) -> JudgeVerdict:
    """Read a run and judge it.

    Raises:
        UserError: there are neither spans nor figures of steps.
    """
    return judge(read_series(run), policy or DriftPolicy())


def judge(series: StepSeries, policy: DriftPolicy) -> JudgeVerdict:
    """Judge the times of steps; each start of the run for itself, and from each start to the next."""
    stretches = list(_stretches(series, policy))
    looked_at = f"{sum(len(one.places) for one in stretches):,} of {len(series):,} steps"
    if len(series.ranks.ranks) > 1:
        looked_at += f" of {len(series.ranks.ranks):,} ranks"
    if series.left_out:
        looked_at += f"; {series.left_out:,} without usable seconds left out"
    unseen: tuple[str, ...] = ()
    if series.left_out_after >= policy.change.least_steps:
        newest = f"the newest {series.left_out_after:,} steps, after step {int(series.step[-1]):,}"
        unseen = (f"{newest}: their step_s is missing or no number above 0; write it as phalanx train does",)
    least = 2 * policy.change.least_steps
    if not any(len(one.places) >= least for one in stretches):
        enough = f"fewer than {least} steps of one start can be compared; let it train on"
        return JudgeVerdict(JUDGE, (), (enough, *unseen), looked_at)
    found: list[tuple[Detection, Cause, Change]] = []
    passed: list[Mapping[str, Any]] = []
    for stretch in stretches:
        begin = len(found)
        for change, places in _changes(stretch, policy):
            row = _row(series, change, places)
            if change.is_over:
                passed.append(row)
                continue
            cause = find_cause(series, change, places.tolist())
            found.append((_describe(series, stretch, change, cause, places), cause, change))
        found[begin:] = _together(found[begin:])
        found += _growing_parts(series, stretch, policy) if not found else []
    found += list(_from_start_to_start(series, stretches, policy))
    found.sort(key=lambda one: -one[2].growth)
    causes = [one[1] for one in found]
    tables: dict[str, list[Mapping[str, Any]]] = {
        "changes": [dict(one[0].figures) | {"what": one[0].what} for one in found],
        "passed": passed,
        "parts": [asdict(part) | {"grown_s": part.grown_s} for part in (causes[0].parts if causes else ())],
        "ranks": [row for cause in causes for row in cause.rank_rows],
    }
    # Without spans steps are judged all the same; what they would say is missed only where something grew.
    return JudgeVerdict(
        JUDGE, tuple(one[0] for one in found[:_MOST]), (*unseen, *(series.missing if found else ())), looked_at, tables
    )


def _stretches(series: StepSeries, policy: DriftPolicy) -> Iterator[_Stretch]:
    """The plain steps of each start."""
    innocent = np.zeros(len(series), bool)
    for name in ("evaluation", "checkpoint"):
        steps = np.array(sorted(series.events.get(name, ())), np.int64)
        # Of a checkpoint the snapshot lies in its own step, and what it leaves behind in the next, as of an evaluation.
        held = np.isin(series.step, np.concatenate([steps, steps + 1]))
        if held.mean() <= 0.5:  # where nearly every step has one, they are how its steps are
            innocent |= held
    for start in np.unique(series.start):
        own = np.flatnonzero(series.start == start)
        chosen = own[policy.warm_up_steps :]
        chosen = chosen[~innocent[chosen]]
        if not len(chosen):
            continue
        seconds = series.step_s[chosen]
        tokens = series.tokens[chosen]
        is_by_token = bool(np.isfinite(tokens).all() and tokens.min() != tokens.max())
        if is_by_token:
            seconds = seconds / tokens * np.median(tokens)
        yield _Stretch(int(start), chosen, seconds, is_by_token)


def _changes(stretch: _Stretch, policy: DriftPolicy) -> Iterator[tuple[Change, np.ndarray]]:
    """The largest growth, and what lies beside it: each with the places that it was found among."""
    found = find_changes(stretch.seconds, policy.change)
    for change, begin, end in found:
        yield change, stretch.places[begin:end]
    if len(found) != 1:
        return
    first = found[0][0]
    sides = [(0, first.onset)]
    if first.shape == "jump":
        sides.append((first.onset, len(stretch.places)))
    for begin, end in sides:
        beside = find_change(stretch.seconds[begin:end], policy.change)
        if beside is not None and not beside.is_over and beside.growth >= _LESSER * first.growth:
            yield beside, stretch.places[begin:end]


def _together(found: list[tuple[Detection, Cause, Change]]) -> list[tuple[Detection, Cause, Change]]:
    """Of several changes of a start the largest says too what they are together."""
    if len(found) < 2:
        return found
    in_order = [one[2] for one in sorted(found, key=lambda one: one[0].since.step or 0)]
    before, after = in_order[0].before, in_order[-1].after
    largest, cause, change = max(found, key=lambda one: one[2].growth)
    told = (
        f"{len(found)} changes together: {_seconds(before)} a step before the first, {_seconds(after)} now,"
        f" {_percent(after / before - 1)} longer"
    )
    largest = replace(
        largest, why=(*largest.why, told), figures=dict(largest.figures) | {"together": after / before - 1}
    )
    return [(largest, cause, change), *(one for one in found if one[2] is not change)]


def _growing_parts(
    series: StepSeries, stretch: _Stretch, policy: DriftPolicy
) -> Iterator[tuple[Detection, Cause, Change]]:
    """Parts that grow by a share of the step that counts, although steps do not: something else hides it still."""
    usual_s = float(np.median(stretch.seconds))
    # Of many parts one grows by chance more often than the step does.
    stricter = policy.change.model_copy(update={"least_growth": 2 * policy.change.least_growth})
    columns = {name: series.parts[name] for name in OWN if name in series.parts}
    for group, waits in series.waits.items():
        columns[f"waiting for bytes: {group}"] = waits.bytes_s
        columns[f"waiting for late ranks: {group}"] = waits.late_s
    for name, column in columns.items():
        seconds = column[stretch.places]
        if not np.isfinite(seconds).all():
            continue
        # On top of a step's usual seconds, so that growth is a share of the step.
        change = find_change(usual_s + seconds - float(np.median(seconds)), stricter)
        if change is None or change.is_over:
            continue
        early, late = windows(change, list(range(len(seconds))))
        step_grew_s = float(np.median(stretch.seconds[late]) - np.median(stretch.seconds[early]))
        is_seen = step_grew_s > 0.3 * (change.after - change.before)
        if not is_seen and change.z < 2 * policy.change.least_z:
            continue
        since = _onset(series, int(stretch.places[change.onset]))
        grown_s = change.after - change.before
        is_late = "late ranks" in name
        part = f"launch skew of group {name.rpartition(': ')[2]}" if is_late else name
        behind = ranks_behind(series, change, stretch.places.tolist()) if is_late else None
        of_ranks = behind is not None and behind.kind == "ranks"
        blames, who, _, then = _blame(series, behind, since.step or 0) if of_ranks and behind else ("", (), "", ())
        shape = "creeps up" if change.shape == "creep" else "takes longer"
        detection = Detection(
            "growing part",
            f"{part} {shape} since step {since.step:,}, by {_seconds(grown_s)} a step ({change.growth:.1%} of it);"
            f" steps {'vary too much to show it' if is_seen else 'do not show it yet'}{blames}",
            who or (Culprit("operation", part),),
            since,
            0.8,
            (f"mean over ranks: {_seconds(grown_s)} more, {change.z:.0f} standard errors",),
            then or (f"compare with early steps: `phalanx trace summary {series.run} --steps {since.step}:`",),
            "watch",
            _figures(change, since.step) | {"part": part, "cause": "ranks" if of_ranks else "part"},
        )
        yield detection, behind or Cause("part", name), change


def _from_start_to_start(
    series: StepSeries, stretches: list[_Stretch], policy: DriftPolicy
) -> Iterator[tuple[Detection, Cause, Change]]:
    """The newest start against the one before it."""
    long = [one for one in stretches if len(one.places) >= policy.change.least_steps]
    if len(long) < 2 or long[-1].is_by_token or long[-2].is_by_token:
        return
    former, newest = long[-2], long[-1]
    tokens = [series.tokens[one.places] for one in (former, newest)]
    if np.isfinite(tokens[0]).all() and np.isfinite(tokens[1]).all() and np.median(tokens[0]) != np.median(tokens[1]):
        return
    values = np.concatenate([former.seconds, newest.seconds])
    stricter = policy.change.model_copy(update={"least_growth": policy.restart_growth})
    change = find_jump_at(values, len(former.places), stricter)
    if change is None:
        return
    places = np.concatenate([former.places, newest.places])
    cause = find_cause(series, change, places.tolist())
    found = _describe(series, newest, change, cause, places)
    sentence = f"steps take {change.growth:.0%} longer since the run was started again at step {found.since.step:,}"
    first = f"compare the two starts (hosts, layout, versions): `phalanx logs {series.run}`"
    why = (f"seconds of a step: {_seconds(change.before)} in the start before, {_seconds(change.after)} now",)
    # A start may have other hosts or another layout, so that no machine is blamed by this alone.
    yield (
        replace(
            found,
            what="slower start",
            sentence=sentence,
            advice="watch",
            why=(*why, *found.why[1:]),
            then=(first, *found.then),
        ),
        cause,
        change,
    )


def _describe(series: StepSeries, stretch: _Stretch, change: Change, cause: Cause, places: np.ndarray) -> Detection:
    since = _onset(series, int(places[change.onset]))
    how = "take" if change.shape == "jump" else "creep up and take"
    blames, who, advice, then = _blame(series, cause, since.step or 0)
    by_token = " for as many tokens" if stretch.is_by_token else ""
    grown_s = change.after - change.before
    sentence = f"steps {how} {_percent(change.growth)} longer{by_token} since step {since.step:,}{blames}"
    why = [
        f"seconds of a step: {_seconds(change.before)} before, {_seconds(change.after)} now, a {change.shape}"
        f" of {change.z:.0f} standard errors"
    ]
    if (mfu := _mfu(series, change, places)) is not None:
        why.append(f"MFU: {mfu[0]:.1%} before, {mfu[1]:.1%} now")
    if cause.kind == "skew":
        before, now = map(_seconds, cause.skew_s)
        why.append(f"first launches of group {cause.group} lie {now} apart, {before} before")
        if math.isfinite(cause.steadiest):
            why.append(f"the usual own work of no rank grew by more than {max(cause.steadiest, 0):.1%}")
    why += [
        f"rank {row['rank']} works {_seconds(row['own_grown_s'])} longer a step, {_seconds(row['own_before_s'])} before"
        for row in cause.rank_rows[:3]
    ]
    why += [
        f"{part.part}: {_seconds(part.before_s)} before, {_seconds(part.after_s)} now ({part.grown_s:+.4g} s)"
        for part in cause.parts[:3]
        if part.grown_s > 0.1 * grown_s
    ]
    # Of 1,000 and more healthy series a few show a change of that many standard errors, where noise wanders.
    confidence = (0.97 if change.z >= 12 else 0.9) - (0.1 if cause.kind == "unknown" and series.parts else 0)
    figures = _figures(change, since.step) | {"cause": cause.kind, "part": cause.part, "group": cause.group}
    if math.isfinite(cause.share):
        figures["share_explained"] = cause.share
    what = {"jump": "slower steps", "creep": "creeping step time"}[change.shape]
    return Detection(what, sentence, who, since, confidence, tuple(why), then, advice, figures)


def _blame(series: StepSeries, cause: Cause, step: int) -> tuple[str, tuple[Culprit, ...], Advice, tuple[str, ...]]:
    """What the sentence says of the cause, who it is, and what to do."""
    run = series.run
    look = f"compare with steps before it: `phalanx trace summary {run} --steps {step}:`"
    timeline = f"see a late step: `phalanx trace export {run} step.json.gz --steps {int(series.step[-1])}`"
    if cause.kind == "ranks":
        names = ", ".join(map(str, cause.ranks[:_MOST_NAMED])) + (" …" if len(cause.ranks) > _MOST_NAMED else "")
        ranks = f"rank{'s' * (len(cause.ranks) > 1)} {names}"
        if cause.stage >= 0:
            who = Culprit("stage", f"stage {cause.stage}", cause.ranks, cause.hosts)
            return f": {cause.part} grew on all ranks of stage {cause.stage}", (who,), "program", (look, timeline)
        where = f" (host{'s' * (len(cause.hosts) > 1)} {', '.join(cause.hosts[:_MOST_NAMED])})"
        who = (
            Culprit("host", cause.hosts[0], cause.ranks, cause.hosts)
            if len(cause.hosts) == 1
            else Culprit("rank", names, cause.ranks, cause.hosts)
        )
        check = f"test {'it' if len(cause.hosts) == 1 else 'them'}: `phalanx check` on {', '.join(cause.hosts)}"
        slow = f"see whether it stays so: `phalanx trace slow {run} --steps {step}:`"
        return f": {cause.part} grew on {ranks}{where}, and the others wait", (who,), "check", (check, slow, timeline)
    if cause.kind == "part":
        who = Culprit("operation", cause.part)
        advice: Advice = "program"
        hints = {
            "data": "see whether storage or the loader's processes are busy: `phalanx trace sql` on `counters`",
            "outside spans": "look for work of the host between spans: callbacks, logging, garbage collection",
            "snapshot": f"see what checkpoints cost: `phalanx checkpoint ls {run}`",
        }
        hint = (hints[cause.part],) if cause.part in hints else ()
        everyone = " on all ranks" if len(series.ranks.ranks) > 1 else ""
        return f": {cause.part} grew{everyone}", (who,), advice, (*hint, look, timeline)
    if cause.kind == "bytes":
        who = Culprit("group", cause.group)
        check = "test the ports of the hosts: `phalanx check --only nic-rate --only nic-errors`"
        return f": moving the bytes of group {cause.group} takes longer", (who,), "watch", (check, look)
    if cause.kind == "skew":
        who = Culprit("group", cause.group)
        late = f", in {cause.part}" if cause.part else ""
        collect = (
            "rule out garbage collection: `gc.freeze()` after the first step and `gc.collect()` at set steps on all"
            " ranks together; then look for what else the host does at odd times"
        )
        said = f": launch skew of group {cause.group} grew, by another rank each time{late}, while own work stayed flat"
        return said, (who,), "program", (collect, timeline)
    return (
        "",
        (),
        "watch",
        (look,)
        if series.parts
        else ("let ranks record spans, which say what grew: `telemetry.spans=true` (docs/trace.md)",),
    )


def _onset(series: StepSeries, place: int) -> Onset:
    """The end of the step before is when it began."""
    unix_s = series.end_unix_s[place] - series.step_s[place]
    return Onset(float(unix_s) if math.isfinite(unix_s) else None, int(series.step[place]))


def _row(series: StepSeries, change: Change, places: np.ndarray) -> dict[str, Any]:
    return _figures(change, int(series.step[places[change.onset]]))


def _figures(change: Change, step: int | None) -> dict[str, float | int | str]:
    return {
        "shape": change.shape,
        "step": step or 0,
        "before_s": change.before,
        "after_s": change.after,
        "growth": change.growth,
        "z": change.z,
        "separation": change.separation,
    }


def _mfu(series: StepSeries, change: Change, places: np.ndarray) -> tuple[float, float] | None:
    each = [series.mfu[one][np.isfinite(series.mfu[one])] for one in windows(change, places.tolist())]
    return (float(np.median(each[0])), float(np.median(each[1]))) if len(each[0]) and len(each[1]) else None


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 0.1 else f"{1000 * value:.4g} ms"
