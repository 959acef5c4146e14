"""What counts as trouble: nothing in healthy histories, recorded and made up, and each kind in its own."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.telemetry.alerts.alert_config import KINDS, Kind
from phalanx.telemetry.alerts.alert_rules import (
    CheckpointSeen,
    DiskSeen,
    EndSeen,
    Limits,
    RankSeen,
    Seen,
    StepFigures,
    Stretch,
    Verdict,
    judge,
    spread,
)
from phalanx.telemetry.alerts.metrics_history import MetricsHistory

LIMITS = Limits(throughput_for_s=1.0)
OF_RECORDED = Limits(throughput_for_s=2.5)  # they took some seconds, on a machine that others used too
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))


def firing(seen: Seen, limits: Limits = LIMITS) -> set[Kind]:
    return {kind for kind, verdict in judge(seen, limits).items() if verdict.state == "firing"}


def one(seen: Seen, kind: Kind, limits: Limits = LIMITS) -> Verdict:
    return judge(seen, limits)[kind]


def looks(losses: list[float], norms: list[float], at_once: int) -> Iterator[Seen]:
    """A run as a watcher sees it, which comes every so many steps."""
    steps = [StepFigures(n + 1, loss, norm, 0.1) for n, (loss, norm) in enumerate(zip(losses, norms, strict=True))]
    for end in range(at_once, len(steps) + 1, at_once):
        kept = steps[max(0, end - 512) : end]
        yield Seen(steps=kept, new=at_once, step=end, steps_here=end, phase="step", quiet_s=0.1)


# Healthy


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("lines_at_once", [1, 30, 250])
def test_recorded_runs_are_healthy(path: Path, lines_at_once: int, tmp_path: Path) -> None:
    """Of small batches on a busy machine: losses and rates vary much, evaluations and checkpoints come between."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 1200
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    history = MetricsHistory(metrics)
    history.take()
    found: set[Kind] = set()
    was_judged: set[Kind] = set()
    with metrics.open("ab", buffering=0) as file:
        for start in range(0, len(lines), lines_at_once):
            file.write(b"".join(lines[start : start + lines_at_once]))
            new = history.take()
            seen = Seen(tuple(history.steps), new, tuple(history.stretches), steps_here=history.counts["steps"])
            if start % 7 == 0 or new > 1:
                verdicts = judge(seen, OF_RECORDED)
                found |= {kind for kind, verdict in verdicts.items() if verdict.state == "firing"}
                was_judged |= {kind for kind, verdict in verdicts.items() if verdict.state == "clear"}
    assert found == set()
    assert {"loss_spike", "gradient_spike", "throughput", "not_finite"} <= was_judged


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    noise=st.floats(0.0, 0.5),
    start=st.floats(2.0, 12.0),
    speed=st.floats(0.0, 0.1),
    at_once=st.sampled_from([1, 3, 10]),
)
def test_falling_noisy_losses_are_healthy(seed: int, noise: float, start: float, speed: float, at_once: int) -> None:
    chance = random.Random(seed)
    losses = [max(0.4 * start + 0.6 * start * math.exp(-speed * n) + chance.gauss(0, noise), 0.01) for n in range(240)]
    norms = [math.exp(chance.gauss(0, 2 * noise)) for _ in range(240)]
    for seen in looks(losses, norms, at_once):
        assert firing(seen) == set()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), noise=st.floats(0.0, 0.35), drift=st.floats(-0.05, 0.05))
def test_noisy_rates_are_healthy(seed: int, noise: float, drift: float) -> None:
    """Rates vary from one stretch to the next, and drift a little over the run."""
    chance = random.Random(seed)
    rates = [1000 * (1 + drift * n / 200) * math.exp(chance.gauss(0, noise)) for n in range(200)]
    stretches = [Stretch(rate, 0.3, n) for n, rate in enumerate(rates)]
    for end in range(len(stretches) + 1):
        assert one(Seen(stretches=stretches[:end]), "throughput").state != "firing"


def test_one_odd_step_and_too_few_steps_say_nothing() -> None:
    chance = random.Random(1)
    losses = [3 + chance.gauss(0, 0.05) for _ in range(100)]
    losses[80] = 3.7  # more than eight, less than twenty standard deviations
    assert not set().union(*map(firing, looks(losses, [1.0] * 100, 1)))
    assert not set().union(*map(firing, looks([3.0] * 20 + [30.0] * 5, [1.0] * 20 + [1e3] * 5, 1)))


# Trouble


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32), noise=st.floats(0.0, 0.1), height=st.floats(1.5, 20.0), at_once=st.sampled_from([1, 10])
)
def test_a_loss_that_rises_is_found_and_reported_as_one(seed: int, noise: float, height: float, at_once: int) -> None:
    chance = random.Random(seed)
    losses = [3 + chance.gauss(0, noise) + (height if 150 <= n < 165 else 0) for n in range(240)]
    verdicts = [one(seen, "loss_spike") for seen in looks(losses, [1.0] * 240, at_once)]
    first = next(n for n, verdict in enumerate(verdicts) if verdict.state == "firing")
    evidence = verdicts[first].evidence
    assert 150 < evidence["step"] <= 160
    assert evidence["loss"] > evidence["threshold"] > evidence["median"]
    ends = [n for n, verdict in enumerate(verdicts) if verdict.state == "clear" and n > first]
    assert ends, "the spike is over in the end"
    # Between its begin and its end nothing says that it was over.
    assert all(verdict.state != "firing" for verdict in verdicts[ends[0] :])


def test_a_gradient_that_grows_by_factors_is_found() -> None:
    chance = random.Random(2)
    norms = [math.exp(chance.gauss(0, 0.2)) * (40 if n >= 120 else 1) for n in range(140)]
    verdicts = [one(seen, "gradient_spike") for seen in looks([3.0] * 140, norms, 1)]
    found = next(verdict for verdict in verdicts if verdict.state == "firing")
    assert 120 < found.evidence["step"] <= 125
    assert 0.8 < found.evidence["median"] < 1.25
    assert "times the usual" in found.title


@pytest.mark.parametrize(("loss", "norm", "what"), [(math.nan, 1.0, "loss"), (3.0, math.inf, "gradient norm")])
def test_numbers_that_are_not_finite(loss: float, norm: float, what: str) -> None:
    seen = Seen(steps=[StepFigures(1, 3.0, 1.0), StepFigures(2, loss, norm, is_skipped=True)], new=1, steps_here=2)
    verdict = one(seen, "not_finite")
    assert verdict.state == "firing"
    assert what in verdict.title
    assert "step 2" in verdict.title
    assert "skipped" in verdict.title
    assert one(dataclasses.replace(seen, new=0), "not_finite").state == "unknown"
    later = [*seen.steps, *(StepFigures(3 + n, 3.0, 1.0) for n in range(20))]
    assert one(Seen(steps=later, new=1), "not_finite").state == "clear"
    assert one(Seen(loss_broken_at=7), "not_finite").evidence["step"] == 7


def stretches(*rates: float, seconds: float = 0.5, plain: bool = True) -> list[Stretch]:
    return [Stretch(rate, seconds, n, plain) for n, rate in enumerate(rates)]


def test_throughput_that_stays_low() -> None:
    usual = [1000.0, 1020.0, 990.0, 1005.0] * 10
    assert one(Seen(stretches=stretches(*usual, *[600.0] * 3)), "throughput").state != "firing"  # not for long
    low = one(Seen(stretches=stretches(*usual, *[600.0] * 6)), "throughput")
    assert low.state == "firing"
    assert low.evidence["usual_tokens_per_s"] == pytest.approx(1000, rel=0.02)
    assert "40%" in low.title
    assert one(Seen(stretches=stretches(*usual, *[600.0] * 6, *[1000.0] * 6)), "throughput").state == "clear"
    # A little less is no trouble, and of a rate that varies by half anyway a low one says nothing.
    assert one(Seen(stretches=stretches(*usual, *[800.0] * 6)), "throughput").state != "firing"
    assert one(Seen(stretches=stretches(*[500.0, 1500.0] * 20, *[600.0] * 6)), "throughput").state != "firing"


def test_stretches_with_checkpoints_are_left_out() -> None:
    mixed = stretches(*[1000.0] * 40) + stretches(*[400.0] * 6, plain=False)
    assert one(Seen(stretches=mixed), "throughput").state == "clear"


STEPPING = Seen(step=100, steps_here=100, phase="step", steps=[StepFigures(n, 3.0, 1.0, 2.0) for n in range(100)])


def rank(number: int, state: str = "S", since_s: float = 0.0, step: int = 100) -> RankSeen:
    return RankSeen(number, 4000 + number, state, since_s, step, "step")


def test_a_stall_is_judged_by_the_usual_step() -> None:
    assert one(dataclasses.replace(STEPPING, quiet_s=55.0), "stall").state == "clear"
    quiet = dataclasses.replace(STEPPING, quiet_s=61.0, ranks=[rank(0), rank(1, step=99)])
    verdict = one(quiet, "stall")
    assert verdict.state == "firing"
    assert verdict.evidence["limit_s"] == 60
    assert verdict.evidence["who"] == ["rank 1 is at step 99, others at 100"]
    slow = [StepFigures(n, 3.0, 1.0, 30.0) for n in range(100)]
    assert one(dataclasses.replace(quiet, steps=slow), "stall").state == "clear"  # ten of its steps take longer
    assert one(dataclasses.replace(quiet, steps_here=1), "stall").state == "clear"  # it may compile
    long = dataclasses.replace(quiet, phase="evaluate", expects_s=600.0)
    assert one(long, "stall").state == "clear"
    assert one(dataclasses.replace(long, quiet_s=601.0), "stall").state == "firing"
    for phase in ("start", "end", ""):
        assert one(dataclasses.replace(quiet, phase=phase, ranks=[]), "stall").state == "unknown"


@pytest.mark.parametrize(
    ("seen", "is_out"),
    [
        (rank(1, "T", 6.0), True),
        (rank(1, "T", 1.0), False),
        (rank(1, "", 11.0), True),
        (rank(1, "", 2.0), False),
        (rank(1, "D", 60.0), False),
    ],
)
def test_processes_that_are_stopped_or_gone(seen: RankSeen, is_out: bool) -> None:
    found = one(dataclasses.replace(STEPPING, quiet_s=8.0, ranks=[rank(0), seen]), "stall")
    assert (found.state == "firing") == is_out
    if is_out:
        assert "rank 1 (process 4001)" in found.title


def test_a_disk_that_fills_up() -> None:
    def on(free: int, checkpoint_bytes: int = 0) -> Verdict:
        checkpoint = CheckpointSeen(5, 1.0, checkpoint_bytes)
        seen = Seen(disks=[DiskSeen("/run", free, 1 << 40), DiskSeen("/ck", 1 << 41, 1 << 42)], checkpoint=checkpoint)
        return one(seen, "disk", Limits(disk_free_bytes=1 << 30))

    assert on(1 << 31).state == "clear"
    assert on((1 << 30) - 1).evidence["path"] == "/run"
    assert on((1 << 30) - 1).title.endswith("; the limit, alerts.disk_free_bytes, is 1.00 GiB")
    assert on((1 << 30) + 1).state == "unknown"  # neither full, nor is it over
    assert on(1 << 31, checkpoint_bytes=(1 << 30) + 1).title.endswith("; two checkpoints take 2.00 GiB")
    assert one(Seen(disks=[DiskSeen("/run", 0, 1)]), "disk", Limits(disk_free_bytes=0)).state == "unknown"


@pytest.mark.parametrize(
    ("found", "is_overdue"),
    [
        (CheckpointSeen(700, 61.0, every_steps=100), True),
        (CheckpointSeen(700, 59.0, every_steps=100), False),  # steps are fast: one is being written
        (CheckpointSeen(750, 900.0, every_steps=100), False),
        (CheckpointSeen(0, 900.0), False),  # none is asked for
        (CheckpointSeen(990, 960.0, every_s=300.0), True),
        (CheckpointSeen(990, 959.0, every_s=300.0), False),
        (CheckpointSeen(990, 1.0, every_steps=100, problem="No space left on device"), True),
    ],
)
def test_checkpoints_that_do_not_come(found: CheckpointSeen, is_overdue: bool) -> None:
    verdict = one(Seen(step=1000, steps_here=1000, checkpoint=found), "checkpoint")
    assert (verdict.state == "firing") == is_overdue
    if is_overdue:
        assert f"step {found.step}" in verdict.title
        assert found.problem in verdict.title


def test_ends() -> None:
    assert one(Seen(steps_here=0), "failed").state == "unknown"  # it begins: an earlier failure is not over yet
    assert one(Seen(steps_here=1), "failed").state == "clear"
    ranks = [rank(0, "", 1.0), rank(1, "", 4.0)]
    ended = Seen(step=7, total_steps=9, steps_here=7, end=EndSeen("failed", "PeerError: rank 1 has ended"), ranks=ranks)
    assert firing(ended) == {"failed"}
    verdict = one(ended, "failed")
    assert verdict.title == "failed at step 7 of 9: PeerError: rank 1 has ended"
    assert verdict.evidence["who"] == ["rank 1 (process 4001) is gone"]
    assert firing(dataclasses.replace(ended, end=EndSeen("finished", ""))) == {"finished"}


def test_every_kind_has_a_rule() -> None:
    assert set(judge(Seen(), Limits())) == set(KINDS)
    assert {verdict.state for verdict in judge(Seen(), Limits()).values()} == {"unknown"}


def test_spread_is_that_of_most_values() -> None:
    chance = random.Random(3)
    values = [chance.gauss(5, 2) for _ in range(2000)] + [1e9] * 200
    median, sigma = spread(values)
    assert median == pytest.approx(5, abs=0.5)
    assert sigma == pytest.approx(2, rel=0.25)


# Lines


def step_line(step: int, **figures: Any) -> str:
    return json.dumps({"kind": "step", "step": step, "loss": 3.0, "grad_norm": 1.0, "tokens": 64 * step} | figures)


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines))


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, step_line(1), step_line(2))
    history = MetricsHistory(path, clock=lambda: 50.0)
    assert history.take() == 0  # an earlier start wrote them
    with path.open("a") as file:
        file.write(step_line(3)[:20])
    assert history.take() == 0
    with path.open("a") as file:
        file.write(step_line(3)[20:] + "\n")
    strange = {"loss": None, "skipped": 1, "not_finite": {"loss": "nan"}}
    append(path, step_line(4, **strange), json.dumps({"kind": "evaluation", "step": 4, "validation_loss": 2.5}))
    assert history.take() == 2
    assert [one.step for one in history.steps] == [1, 2, 3, 4]
    assert math.isnan(history.steps[-1].loss or 0.0)
    assert history.counts == {"steps": 2, "skipped": 1, "tokens": 128, "checkpoints": 0, "evaluations": 1}
    named = {"kind": "checkpoint", "step": 4, "checkpoint/name": "step-00000004", "checkpoint/persist_bytes": 900.0}
    failed = {"kind": "checkpoint", "step": 5, "checkpoint/problem": "the disk is full"}
    append(path, json.dumps(named), json.dumps(failed))
    history.take()
    assert (history.saved_step, history.saved_at_s, history.saved_bytes) == (4, 50.0, 900)
    assert history.problem == "the disk is full"


def test_a_file_that_was_wound_back_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    history = MetricsHistory(path)
    assert history.take() == 0
    append(path, *map(step_line, range(1, 9)))
    assert history.take() == 8  # of a run that has only begun
    append(other, *map(step_line, range(1, 6)))
    other.replace(path)
    assert history.take() == 0
    append(path, step_line(6))
    assert history.take() == 1
    assert [one.step for one in history.steps] == [1, 2, 3, 4, 5, 6]
    again = MetricsHistory(path)
    assert again.take(begin_step=4) == 2  # of this start


def test_steps_that_were_written_together_are_one_stretch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    history.take()
    rates = [10.0, 10.0, 50.0, 50.0, 60.0, 60.0, 70.0]
    lines = [step_line(n + 1, tokens_per_s=rate, step_s=0.5) for n, rate in enumerate(rates)]
    lines.insert(5, json.dumps({"kind": "checkpoint", "step": 5}))
    append(path, *lines)
    history.take()
    # The first stretch warms up, and the last one may grow.
    assert list(history.stretches) == [Stretch(50.0, 1.0, 4), Stretch(60.0, 1.0, 6, is_plain=False)]
