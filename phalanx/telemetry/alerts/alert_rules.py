"""What counts as trouble: pure functions from what was seen of a run to a verdict, with the evidence for it.

They are robust, so that a healthy run sets none of them off: spread is measured by the median absolute deviation (MAD),
nothing is judged before there are enough samples, one odd step alone counts only where it is far off, and a run's
throughput is held against its own, without stretches that hold an evaluation, a checkpoint or a compilation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.core.units import size
from phalanx.telemetry.alerts.alert_config import Kind
from phalanx.telemetry.alike_ranks import STEADY_SHARE, excess_limit

State = Literal["firing", "clear", "unknown"]
Severity = Literal["info", "warning", "error"]

SEVERITIES: Mapping[Kind, Severity] = {
    "stall": "error",
    "not_finite": "error",
    "loss_spike": "warning",
    "gradient_spike": "warning",
    "throughput": "warning",
    "slow_rank": "warning",
    "disk": "error",
    "checkpoint": "warning",
    "incident": "warning",
    "detection": "warning",
    "failed": "error",
    "stopped": "info",
    "finished": "info",
}

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_WINDOW, _LEAST, _LATELY = 64, 32, 5  # steps that are compared with; fewest of them; steps that are judged together
_OF_LATELY = 3
_FAR = 2.5  # times as far away, a single step counts
_CALM = 20  # steps without trouble end it
_BASELINE, _LEAST_BASELINE, _LEAST_RECENT = 200, 12, 4  # stretches of steps
_LEAST_RATE = 1e-9
_USUAL_STEPS = 10.0
_UNKNOWN_PHASE_S = 1800.0
_FIRST_STEP_S = 900.0
_STOPPED_S = 2.0
_GONE_S = 10.0
_CHECKPOINT_MARGIN_S = 60.0


@dataclass(frozen=True)
class StepFigures:
    """What a run wrote down of one step; NaN and infinite where the figures were, None where there are none."""

    step: int
    loss: float | None
    grad_norm: float | None
    step_s: float | None = None
    is_skipped: bool = False


@dataclass(frozen=True)
class Stretch:
    """Steps whose throughput was measured together; plain: no evaluation or checkpoint came between them."""

    tokens_per_s: float
    seconds: float
    last_step: int
    is_plain: bool = True


@dataclass(frozen=True)
class RankSeen:
    """The process of a rank on the watcher's host.

    Attributes:
        state: as the kernel shows it, ``T`` is stopped; empty: the process is gone.
        since_s: for how long it has been stopped or gone.
    """

    rank: int
    pid: int
    state: str
    since_s: float
    step: int
    phase: str


@dataclass(frozen=True)
class DiskSeen:
    """A disk that the run writes to."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class CheckpointSeen:
    """The newest durable checkpoint.

    Attributes:
        step: of which it is; the one the run began with, where it has made none.
        age_s: since it was durable, or since the run began.
        num_bytes: of what was written; 0: not known.
        problem: why one that came after it is not durable; empty: there is none.
        every_steps, every_s: how often one is asked for; 0: not by that.
    """

    step: int
    age_s: float
    num_bytes: int = 0
    problem: str = ""
    every_steps: int = 0
    every_s: float = 0.0


@dataclass(frozen=True)
class RankPace:
    """A rank's own time (forward and backward, without waiting) beside that of ranks that do the same, over a window.

    Attributes:
        stage, expert: what it does; `peers` others do the same.
        steps: that it was compared in, from `first_step` to `last_step`; seconds: that these took.
        own_s, peers_s: medians.
        excess: 0.1: 10 % longer than the peers' median of the same step, in the median; least_excess: the same in that
            part of the window in which it was least.
        slow_share: of steps in which it was slower by half of what counts.
    """

    rank: int
    host: str
    stage: int
    expert: int
    peers: int
    steps: int
    first_step: int
    last_step: int
    seconds: float
    own_s: float
    peers_s: float
    excess: float
    least_excess: float
    slow_share: float


@dataclass(frozen=True)
class EndSeen:
    """How the run ended.

    Attributes:
        who: ranks that it is known to be due to; empty: whose process was gone first.
    """

    kind: Literal["failed", "stopped", "finished"]
    why: str
    who: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What was seen of a run at one moment.

    Attributes:
        steps: the newest, oldest first.
        new: so many of them were not there at the look before.
        stretches: of this start, oldest first, without the first.
        step: newest step that was done; None: not known.
        quiet_s: since a step ended or another phase began; None: not known.
        steps_here: steps since this start.
        phase: what the run says it does; `expects_s`: how long that may take; 0: not known.
        loss_broken_at: step from which on the loss is not finite; None: it is, or is not known.
        incident: number and cause of the one that `phalanx run` deals with; None: there is none.
        paces: of ranks that can be compared, where spans are read; empty: nothing is known.
    """

    steps: Sequence[StepFigures] = ()
    new: int = 0
    stretches: Sequence[Stretch] = ()
    step: int | None = None
    total_steps: int | None = None
    quiet_s: float | None = None
    steps_here: int = 0
    phase: str = ""
    expects_s: float = 0.0
    loss_broken_at: int | None = None
    ranks: Sequence[RankSeen] = ()
    disks: Sequence[DiskSeen] = ()
    checkpoint: CheckpointSeen | None = None
    incident: tuple[int, str] | None = None
    paces: Sequence[RankPace] = ()
    end: EndSeen | None = None


@dataclass(frozen=True)
class Limits:
    """From when on something counts as trouble; see `AlertsConfig`."""

    stall_s: float = 60.0
    throughput_drop: float = 0.3
    throughput_for_s: float = 120.0
    slow_rank_excess: float = 0.1
    spike_sigma: float = 8.0
    disk_free_bytes: int = 2 << 30
    checkpoint_intervals: float = 3.0


@dataclass(frozen=True)
class Verdict:
    """What a rule says. Unknown: there is too little to go by, so that what was said before stands."""

    state: State
    title: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


CLEAR, UNKNOWN = Verdict("clear"), Verdict("unknown")


def stall(seen: Seen, limits: Limits) -> Verdict:
    """A process of the run is stopped or gone, or no step has come for much longer than steps usually take."""
    if seen.end is not None:
        return UNKNOWN
    who = [_described(rank) for rank in seen.ranks if _is_out(rank)]
    behind = _behind(seen.ranks)
    evidence: dict[str, Any] = {"step": seen.step, "phase": seen.phase, "quiet_s": _rounded(seen.quiet_s)}
    if who and seen.phase != "end":
        return Verdict("firing", f"no progress after step {seen.step}: {', '.join(who)}", evidence | {"who": who})
    if seen.quiet_s is None or seen.phase in ("", "start", "end"):
        return UNKNOWN
    limit_s = _stall_limit_s(seen, limits)
    if seen.quiet_s <= limit_s:
        return CLEAR
    evidence |= {"limit_s": _rounded(limit_s), "usual_step_s": _rounded(_usual_step_s(seen)), "who": behind}
    at = "" if seen.phase == "step" else f" in {seen.phase}"
    blame = f": {', '.join(behind)}" if behind else ""
    return Verdict("firing", f"no progress for {seen.quiet_s:.0f} s after step {seen.step}{at}{blame}", evidence)


def _stall_limit_s(seen: Seen, limits: Limits) -> float:
    if seen.phase != "step":
        return max(seen.expects_s or _UNKNOWN_PHASE_S, limits.stall_s)
    usual_s = _usual_step_s(seen)
    # The first steps compile, and on many ranks open connections.
    first_s = _FIRST_STEP_S if seen.steps_here < 3 or usual_s is None else 0.0
    return max(limits.stall_s, first_s, _USUAL_STEPS * (usual_s or 0.0))


def _usual_step_s(seen: Seen) -> float | None:
    times = [one.step_s for one in seen.steps[-_WINDOW:] if one.step_s]
    return statistics.median(times) if times else None


def _is_out(rank: RankSeen) -> bool:
    return (rank.state in ("T", "t") and rank.since_s >= _STOPPED_S) or (not rank.state and rank.since_s >= _GONE_S)


def _described(rank: RankSeen) -> str:
    what = "is gone" if not rank.state else "is stopped"
    return f"rank {rank.rank} (process {rank.pid}) {what}"


def _behind(ranks: Sequence[RankSeen]) -> list[str]:
    """Ranks that have done fewer steps than others."""
    most = max((rank.step for rank in ranks), default=0)
    return [f"rank {rank.rank} is at step {rank.step}, others at {most}" for rank in ranks if rank.step < most]


def not_finite(seen: Seen, limits: Limits) -> Verdict:
    """The loss or the norm of the gradient is NaN or infinite."""
    for one in seen.steps[len(seen.steps) - seen.new :] if seen.new else ():
        for name, value in (("loss", one.loss), ("gradient norm", one.grad_norm)):
            if value is not None and not math.isfinite(value):
                evidence = {"step": one.step, "loss": repr(one.loss), "gradient_norm": repr(one.grad_norm)}
                skipped = ", and the step was skipped" if one.is_skipped else ""
                title = f"the {name} is {value} at step {one.step}{skipped}"
                return Verdict("firing", title, evidence | {"skipped": one.is_skipped})
    if seen.loss_broken_at is not None:
        step = seen.loss_broken_at
        return Verdict("firing", f"the loss is not finite from step {step} on", {"step": step, "loss": "not finite"})
    lately = seen.steps[-_CALM:]
    calm = all(_is_finite(one.loss) and _is_finite(one.grad_norm) for one in lately)
    return CLEAR if calm and len(lately) == _CALM else UNKNOWN


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def loss_spike(seen: Seen, limits: Limits) -> Verdict:
    """The loss is far above its recent values: three of five steps, or one by much more."""
    values = [(one.step, one.loss) for one in seen.steps]
    return _spike("loss", values, seen.new, lambda median, sigma: median + _rise(median, sigma, limits))


def _rise(median: float, sigma: float, limits: Limits) -> float:
    """The least rise of a loss that counts: nats, at least a tenth of one and of the loss."""
    return max(limits.spike_sigma * sigma, 0.1 * abs(median), 0.1)


def gradient_spike(seen: Seen, limits: Limits) -> Verdict:
    """The norm of the gradient is far above its recent values; such norms vary by factors, so logarithms are judged."""
    values = [(one.step, _log(one.grad_norm)) for one in seen.steps]
    least = math.log(5.0)
    verdict = _spike(
        "gradient_norm", values, seen.new, lambda median, sigma: median + max(limits.spike_sigma * sigma, least)
    )
    if verdict.state != "firing":
        return verdict
    evidence = dict(verdict.evidence)
    for name in ("gradient_norm", "median", "threshold"):
        evidence[name] = float(f"{math.exp(evidence[name]):.4g}")
    evidence["recent"] = [_rounded(math.exp(one)) for one in evidence["recent"]]
    evidence["spread_factor"] = _rounded(math.exp(evidence.pop("sigma")))
    value, usual = evidence["gradient_norm"], evidence["median"]
    title = f"the gradient norm is {value:g} at step {evidence['step']}, {value / usual:.0f} times the usual"
    return Verdict("firing", title, evidence)


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and math.isfinite(value) and value > 0 else None


def _spike(
    name: str, values: Sequence[tuple[int, float | None]], new: int, threshold: Callable[[float, float], float]
) -> Verdict:
    known = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
    first_new = values[len(values) - new][0] if new else None
    is_judged = False
    for index in range(_LEAST + _LATELY, len(known) + 1):
        lately = known[index - _LATELY : index]
        step, value = lately[-1]
        is_new = first_new is not None and step >= first_new
        if not is_new and index <= len(known) - _CALM:
            continue
        before = [value for _, value in known[max(0, index - _LATELY - _WINDOW) : index - _LATELY]]
        median, sigma = spread(before)
        limit = threshold(median, sigma)
        is_judged = True
        over = sum(one > limit for _, one in lately) >= _OF_LATELY and value > limit
        if over or value > median + _FAR * (limit - median):
            if not is_new:
                return UNKNOWN  # it is not over yet
            evidence = {
                "step": step,
                name: _rounded(value),
                "median": _rounded(median),
                "sigma": _rounded(sigma),
                "threshold": _rounded(limit),
                "recent": [_rounded(one) for _, one in lately],
            }
            return Verdict("firing", f"the {name} is {value:.4g} at step {step}, usually {median:.4g}", evidence)
    return CLEAR if is_judged else UNKNOWN


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and standard deviation as the median absolute deviation gives it."""
    median = statistics.median(values)
    return median, _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values)


def throughput(seen: Seen, limits: Limits) -> Verdict:
    """Tokens per second stay below the run's own median by more than a share, and by more than they vary."""
    recent: list[Stretch] = []
    seconds = 0.0
    stretches = list(seen.stretches)
    plain = [stretch for stretch in stretches if stretch.is_plain]
    # Where checkpoints come as often as figures are written, hardly any stretch is without one.
    stretches = plain if 2 * len(plain) >= len(stretches) else stretches
    for stretch in reversed(stretches):
        recent.append(stretch)
        seconds += stretch.seconds
        if seconds >= limits.throughput_for_s and len(recent) >= _LEAST_RECENT:
            break
    before = stretches[: -len(recent)][-_BASELINE:] if recent else []
    if len(before) < _LEAST_BASELINE or seconds < limits.throughput_for_s or len(recent) < _LEAST_RECENT:
        return UNKNOWN
    # Rates vary by factors: on a busy machine three deviations below the median may lie below zero.
    middle, sigma = spread([math.log(max(stretch.tokens_per_s, _LEAST_RATE)) for stretch in before])
    median = math.exp(middle)
    threshold = min((1 - limits.throughput_drop) * median, math.exp(middle - 3 * sigma))
    rates = sorted(stretch.tokens_per_s for stretch in recent)
    if rates[(3 * (len(rates) - 1) + 3) // 4] >= threshold:  # a quarter of them may be better
        return CLEAR if statistics.median(rates) >= (1 - limits.throughput_drop / 2) * median else UNKNOWN
    now = statistics.median(rates)
    evidence = {
        "step": recent[0].last_step,
        "tokens_per_s": _rounded(now),
        "usual_tokens_per_s": _rounded(median),
        "spread_factor": _rounded(math.exp(sigma)),
        "threshold": _rounded(threshold),
        "seconds": _rounded(seconds),
    }
    title = f"{now:,.0f} tokens/s for {seconds:.0f} s, {1 - now / median:.0%} below the usual {median:,.0f}"
    return Verdict("firing", title, evidence)


def slow_rank(seen: Seen, limits: Limits) -> Verdict:
    """A rank computes longer than those that do the same, throughout the window that was compared."""
    alike: dict[tuple[int, int], list[RankPace]] = {}
    for pace in seen.paces:
        alike.setdefault((pace.stage, pace.expert), []).append(pace)
    slow: list[RankPace] = []
    is_calm = bool(seen.paces)
    for paces in alike.values():
        limit = excess_limit([pace.excess for pace in paces], limits.slow_rank_excess)
        slow += [pace for pace in paces if pace.least_excess > limit and pace.slow_share >= STEADY_SHARE]
        is_calm = is_calm and all(pace.excess < limit / 2 for pace in paces)
    if seen.end is not None or not slow:
        return CLEAR if is_calm and seen.end is None else UNKNOWN
    slow.sort(key=lambda pace: (-pace.excess, pace.rank))
    worst = slow[0]
    who = [f"rank {pace.rank} (host {pace.host}, stage {pace.stage})" for pace in slow]
    evidence = {
        "step": worst.last_step,
        "who": who,
        "ranks": [pace.rank for pace in slow],
        "hosts": list(dict.fromkeys(pace.host for pace in slow)),
        "excess": _rounded(worst.excess),
        "own_s": _rounded(worst.own_s),
        "peers_s": _rounded(worst.peers_s),
        "peers": worst.peers,
        "slow_share_of_steps": _rounded(worst.slow_share),
        "steps": worst.steps,
        "first_step": worst.first_step,
        "seconds": _rounded(worst.seconds),
    }
    more = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    title = f"{who[0]} computes {worst.excess:.0%} longer than its peers, for {worst.seconds:.0f} s{more}"
    return Verdict("firing", title, evidence)


def disk(seen: Seen, limits: Limits) -> Verdict:
    """A disk that the run writes to has less room than is asked for, or than two checkpoints take."""
    needed = 2 * seen.checkpoint.num_bytes if seen.checkpoint is not None else 0
    threshold = max(limits.disk_free_bytes, needed)
    if not seen.disks or not threshold:
        return UNKNOWN
    fullest = min(seen.disks, key=lambda one: one.free_bytes)
    if fullest.free_bytes >= threshold:
        return CLEAR if fullest.free_bytes >= 1.2 * threshold else UNKNOWN
    evidence = {
        "path": fullest.path,
        "free_bytes": fullest.free_bytes,
        "total_bytes": fullest.total_bytes,
        "threshold_bytes": threshold,
        "checkpoint_bytes": needed // 2,
        "step": seen.step,
    }
    left, whole = size(fullest.free_bytes), size(fullest.total_bytes)
    why = "two checkpoints take" if needed == threshold else "the limit, alerts.disk_free_bytes, is"
    text = f"the disk of {fullest.path} is nearly full: {left} of {whole} are free; {why} {size(threshold)}"
    return Verdict("firing", text, evidence)


def checkpoint(seen: Seen, limits: Limits) -> Verdict:
    """No durable checkpoint for several times the interval that is asked for, or the newest one failed."""
    found = seen.checkpoint
    if found is None or seen.step is None or seen.end is not None:
        return UNKNOWN
    behind, times = seen.step - found.step, limits.checkpoint_intervals
    by_steps = found.every_steps > 0 and behind >= times * found.every_steps and found.age_s >= _CHECKPOINT_MARGIN_S
    by_time = found.every_s > 0 and found.age_s >= times * found.every_s + _CHECKPOINT_MARGIN_S
    if not (by_steps or by_time or found.problem):
        return CLEAR
    evidence = {
        "step": seen.step,
        "checkpoint_step": found.step,
        "age_s": _rounded(found.age_s),
        "every_steps": found.every_steps,
        "every_s": found.every_s,
        "problem": found.problem,
    }
    title = f"the newest durable checkpoint is of step {found.step}, {behind} steps and {found.age_s:.0f} s ago"
    if found.problem:
        title = f"a checkpoint failed: {found.problem}; {title}"
    return Verdict("firing", title, evidence)


def incident(seen: Seen, limits: Limits) -> Verdict:
    """`phalanx run` deals with a fault: a rank or a host failed, and the job is brought back."""
    if seen.incident is None:
        return CLEAR if seen.steps_here > 0 else UNKNOWN
    number, why = seen.incident
    if not why:  # it has only been opened
        return UNKNOWN
    return Verdict("firing", f"incident {number}: {why}", {"step": seen.step, "incident": number, "why": why})


def ended(seen: Seen, limits: Limits) -> Mapping[Kind, Verdict]:
    """Failed, stopped or finished; while the run makes steps, none of them."""
    kinds: tuple[Kind, ...] = ("failed", "stopped", "finished")
    if seen.end is None:
        return dict.fromkeys(kinds, CLEAR if seen.steps_here > 0 else UNKNOWN)
    of = "before its first step" if seen.step is None else f"at step {seen.step}"
    of += "" if seen.step is None or seen.total_steps is None else f" of {seen.total_steps}"
    losses = [one.loss for one in seen.steps if _is_finite(one.loss) and one.loss is not None]
    evidence: dict[str, Any] = {
        "step": seen.step,
        "why": seen.end.why,
        "loss": _rounded(losses[-1]) if losses else None,
    }
    first = [_described(rank) for rank in seen.ranks if seen.end.kind == "failed" and _was_first(rank, seen.ranks)]
    if who := list(seen.end.who) or first:
        evidence["who"] = who
    why = f": {seen.end.why}" if seen.end.why else ""
    verdicts: dict[Kind, Verdict] = dict.fromkeys(kinds, UNKNOWN)
    verdicts[seen.end.kind] = Verdict("firing", f"{seen.end.kind} {of}{why}", evidence)
    return verdicts


def _was_first(rank: RankSeen, ranks: Sequence[RankSeen]) -> bool:
    """Whether the process of this rank was gone before those of others."""
    gone = [one.since_s for one in ranks if not one.state]
    return not rank.state and bool(gone) and rank.since_s == max(gone)


def judge(seen: Seen, limits: Limits) -> dict[Kind, Verdict]:
    """The verdicts of all rules."""
    verdicts: dict[Kind, Verdict] = {
        "not_finite": not_finite(seen, limits),
        "loss_spike": loss_spike(seen, limits),
        "gradient_spike": gradient_spike(seen, limits),
        "throughput": throughput(seen, limits),
        "slow_rank": slow_rank(seen, limits),
        "stall": stall(seen, limits),
        "disk": disk(seen, limits),
        "checkpoint": checkpoint(seen, limits),
        "incident": incident(seen, limits),
        "detection": UNKNOWN,  # who asks judges reports what they find, each for itself
    }
    return verdicts | dict(ended(seen, limits))


def _rounded(value: float | None) -> float | None:
    """To four digits: evidence is read by people."""
    return None if value is None else float(f"{value:.4g}")
