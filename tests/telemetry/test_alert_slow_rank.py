"""A rank that computes longer than those that do the same is reported once, and nothing of what healthy runs do is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from phalanx.telemetry.alerts import rank_paces, run_watcher
from phalanx.telemetry.alerts.alert_config import AlertsConfig
from phalanx.telemetry.alerts.alert_rules import Limits, Seen, Verdict, judge
from phalanx.telemetry.alerts.observed_run import WatchedRun
from phalanx.telemetry.alerts.rank_paces import RankPaces
from phalanx.telemetry.alerts.run_watcher import Watcher
from phalanx.telemetry.span_store import SPANS
from tests.telemetry.trace_runs import span, table

FOR_S = 10.0
STEP_MS = 500.0
BEGIN_S = 1000.0  # as `span` has it
STEPS = range(60)

OwnMs = Callable[[int, int], float]
"""Own time by rank and step."""


def steps_of(own_ms: OwnMs, steps: Sequence[int], ranks: int = 4, attempt: int = 0) -> pa.Table:
    """All ranks wait for the slowest, and a step follows the other twice a second."""
    rows = []
    for step in steps:
        at = STEP_MS * step
        for rank in range(ranks):
            forward = own_ms(rank, step) / 3
            backward_ends = at + own_ms(rank, step) + 20
            ids: dict[str, Any] = {"attempt": attempt}
            rows.append(span(rank, step, "forward", at, at + forward + 20, **ids))
            rows.append(span(rank, step, "wait", at + forward, at + forward + 20, **ids))
            rows.append(span(rank, step, "backward", at + forward + 20, backward_ends, **ids))
            rows.append(span(rank, step, "wait", backward_ends, at + STEP_MS - 10, **ids))
            rows.append(span(rank, step, "step", at, at + STEP_MS - 5, **ids))
    return table(rows)


class Live:
    """A run whose spans come bit by bit, as a writer appends them."""

    def __init__(self, folder: Path, groups: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self.telemetry = folder / "telemetry"
        (self.telemetry / "live").mkdir(parents=True)
        (self.telemetry / "groups").mkdir()
        lines = [
            json.dumps({"rank": rank, "attempt": attempt, "group": axes, "ranks": members})
            for attempt in (0, 1)
            for axes, groups_of_axes in (groups or {}).items()
            for members in groups_of_axes
            for rank in members
        ]
        (self.telemetry / "groups" / "host0.jsonl").write_text("".join(line + "\n" for line in lines))
        self._file = (self.telemetry / "live" / "host0-1.arrows").open("wb", buffering=0)
        self._stream = pa.ipc.new_stream(self._file, SPANS)

    def add(self, spans: pa.Table) -> None:
        for batch in spans.combine_chunks().to_batches():
            self._stream.write_batch(batch)


def unhurried(live: Live, since_s: float = BEGIN_S) -> RankPaces:
    """Each look reads, however soon it comes."""
    paces = RankPaces(live.telemetry, FOR_S, 0.1, since_s, clock=lambda: 0.0)
    paces.every_s = 0.0
    return paces


def watched(folder: Path, own_ms: OwnMs, steps: Sequence[int] = STEPS, **more: Any) -> list[Verdict]:
    """What the rule says, look after look, of a run that is looked at every two steps."""
    groups = more.pop("groups", None)
    since_s = more.pop("since_s", BEGIN_S)
    live = Live(folder, groups)
    paces = unhurried(live, since_s)
    found = []
    for at in range(0, len(steps), 2):
        live.add(steps_of(own_ms, steps[at : at + 2], **more))
        found.append(judge(Seen(paces=paces.look()), Limits())["slow_rank"])
    return found


def states(verdicts: Sequence[Verdict]) -> set[str]:
    return {verdict.state for verdict in verdicts}


def usual(rank: int, step: int) -> float:
    return 100.0 * (1 + 0.02 * random.Random(f"{rank} {step}").gauss(0, 1))


# Trouble


@pytest.mark.campaign(but=("1.15-2",))
@pytest.mark.parametrize(("factor", "rank"), [(1.15, 2), (1.5, 0), (3.0, 3)])
def test_a_rank_that_becomes_slow_is_named_with_its_figures(tmp_path: Path, factor: float, rank: int) -> None:
    verdicts = watched(tmp_path, lambda one, step: usual(one, step) * (factor if one == rank and step >= 30 else 1))
    first = next(at for at, verdict in enumerate(verdicts) if verdict.state == "firing")
    assert (
        30 + FOR_S * 1000 / STEP_MS - 2 <= 2 * first <= 30 + FOR_S * 1000 / STEP_MS + 4
    )  # when it has been for ten seconds
    found = verdicts[-1]
    assert found.state == "firing" and "clear" in states(verdicts[:15])
    assert (
        f"rank {rank} (host host{rank // 2}, stage 0) computes" in found.title
        and "longer than its peers" in found.title
    )
    evidence = found.evidence
    assert evidence["ranks"] == [rank] and evidence["hosts"] == [f"host{rank // 2}"] and evidence["peers"] == 3
    assert evidence["excess"] == pytest.approx(factor - 1, abs=0.06) and evidence["slow_share_of_steps"] > 0.9
    assert evidence["own_s"] == pytest.approx(0.1 * factor, rel=0.05)
    assert evidence["peers_s"] == pytest.approx(0.1, rel=0.05) and evidence["seconds"] >= FOR_S
    assert evidence["step"] - evidence["first_step"] == evidence["steps"] - 1


def test_it_is_over_when_the_rank_is_well_again(tmp_path: Path) -> None:
    verdicts = watched(tmp_path, lambda rank, step: usual(rank, step) * (1.5 if rank == 1 and step < 30 else 1))
    kinds = [verdict.state for verdict in verdicts if verdict.state != "unknown"]
    assert kinds[0] == "firing" and kinds[-1] == "clear"
    assert "firing" not in kinds[kinds.index("clear") :]


def test_a_rank_is_compared_within_its_stage(tmp_path: Path) -> None:
    groups = {"pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]]}

    def own(rank: int, step: int) -> float:
        return usual(rank, step) * (1 if rank < 4 else 2) * (1.3 if rank == 6 else 1)

    verdicts = watched(tmp_path, own, groups=groups, ranks=8)
    assert verdicts[-1].state == "firing" and verdicts[-1].evidence["who"] == ["rank 6 (host host3, stage 1)"]


def test_two_of_four_are_both_named(tmp_path: Path) -> None:
    verdicts = watched(tmp_path, lambda rank, step: usual(rank, step) * (1.4 if rank in (0, 1) else 1))
    assert sorted(verdicts[-1].evidence["ranks"]) == [0, 1] and verdicts[-1].title.endswith(", and 1 more")


# Healthy


def noisy(rank: int, step: int) -> float:
    """A busy machine: now this rank is held up, now that one, for several steps."""
    held_up = random.Random(f"{rank} {step // 3}").random() < 0.25
    return usual(rank, step) * random.Random(f"x{rank} {step}").choice([1, 1.05, 1.2]) * (2 if held_up else 1)


HEALTHY: dict[str, OwnMs] = {
    "all alike": usual,
    "a busy machine": noisy,
    "all slower from some step on": lambda rank, step: usual(rank, step) * (2 if step >= 30 else 1),
    "one rank for less than the window": lambda rank, step: (
        usual(rank, step) * (2 if rank == 1 and 20 <= step < 32 else 1)
    ),
    "one rank now and then": lambda rank, step: usual(rank, step) * (3 if rank == 1 and step % 5 == 0 else 1),
    "first steps, compiled on one rank": lambda rank, step: usual(rank, step) + (9000 if rank == 0 and step < 5 else 0),
    "within what ranks differ by": lambda rank, step: usual(rank, step) * (1.05 if rank == 2 else 1),
    "lasting differences all over": lambda rank, step: usual(rank, step) * (1 + 0.05 * rank),
}


@pytest.mark.campaign(but=("a busy machine", "one rank for less than the window"))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_say_nothing(name: str, tmp_path: Path) -> None:
    assert states(watched(tmp_path, HEALTHY[name])) <= {"clear", "unknown"}


def test_a_heavier_stage_and_an_expert_with_more_tokens_blame_nobody(tmp_path: Path) -> None:
    stages = {"pipeline": [[0, 3], [1, 4], [2, 5]]}
    heavier = watched(
        tmp_path / "stage", lambda rank, step: usual(rank, step) * (1 if rank < 3 else 1.5), groups=stages, ranks=6
    )
    assert states(heavier) == {"unknown", "clear"}
    experts = {"expert": [[0, 1, 2, 3]]}
    assert states(
        watched(tmp_path / "expert", lambda rank, step: usual(rank, step) * (2 if rank == 1 else 1), groups=experts)
    ) == {"unknown"}


def test_two_ranks_cannot_be_told_apart(tmp_path: Path) -> None:
    assert states(watched(tmp_path, lambda rank, step: usual(rank, step) * (2 if rank else 1), ranks=2)) == {"unknown"}


def test_steps_of_before_this_start_say_nothing(tmp_path: Path) -> None:
    slow: OwnMs = lambda rank, step: usual(rank, step) * (2 if rank == 1 else 1)  # noqa: E731
    assert states(watched(tmp_path, slow, since_s=BEGIN_S + 3600)) == {"unknown"}


def test_a_new_attempt_is_judged_by_its_own_steps(tmp_path: Path) -> None:
    live = Live(tmp_path)
    paces = unhurried(live)
    live.add(steps_of(lambda rank, step: usual(rank, step) * (2 if rank == 1 else 1), STEPS))
    assert judge(Seen(paces=paces.look()), Limits())["slow_rank"].state == "firing"
    live.add(steps_of(usual, range(50, 60), attempt=1))
    assert paces.look() == ()


def test_damaged_spans_are_looked_at_later(tmp_path: Path) -> None:
    live = Live(tmp_path)
    (live.telemetry / "live" / "host9-1.arrows").write_bytes(b"\xff\xff\xff\xff no stream")
    paces = unhurried(live)
    assert paces.look() == ()
    live.add(steps_of(usual, STEPS))
    assert len(paces.look()) == 4


def test_looks_cost_a_small_share_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes two seconds is followed by the next after a hundred."""
    live, now = Live(tmp_path), [0.0]
    paces = RankPaces(live.telemetry, FOR_S, 0.1, BEGIN_S, clock=lambda: now[0])
    real, looked = rank_paces.SpanTail.new_steps, list[float]()

    def slowly(tail: rank_paces.SpanTail) -> pa.Table | None:
        looked.append(now[0])
        now[0] += 2.0
        return real(tail)

    monkeypatch.setattr(rank_paces.SpanTail, "new_steps", slowly)
    while now[0] < 330:
        paces.look()
        now[0] += 1.0
    assert looked == [0.0, 100.0, 200.0, 300.0]


# The watcher


def watcher(folder: Path, world_size: int = 4, **settings: Any) -> Watcher:
    config = AlertsConfig(watch=True, disk_free_bytes=0, slow_rank_for_s=FOR_S, link="http://dash:1", **settings)
    return Watcher(WatchedRun("night", str(folder), 0, 0, world_size=world_size), config, 0)


def alerts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "alerts" / "alerts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == "alert"]


def test_the_watcher_reports_it_once_with_a_link_to_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watcher.time, "time", lambda: BEGIN_S)
    live = Live(tmp_path)
    found = watcher(tmp_path)
    for at in range(0, 60, 6):
        live.add(steps_of(lambda rank, step: usual(rank, step) * (1.5 if rank == 3 else 1), range(at, at + 6)))
        assert found._paces is not None
        found._paces.every_s, found._paces._clock = 0.0, lambda: 0.0
        found.look()
    (alert,) = alerts(tmp_path)
    assert (alert["kind"], alert["severity"], alert["evidence"]["ranks"]) == ("slow_rank", "warning", [3])
    window = f"{alert['evidence']['first_step']}%3A{alert['evidence']['step']}"
    assert alert["link"].startswith("http://dash:1/machines?run=") and alert["link"].endswith(f"&steps={window}")
    incidents = [json.loads(line) for line in (tmp_path / "telemetry" / "incidents.jsonl").read_text().splitlines()]
    assert [one["kind"] for one in incidents] == ["slow_rank"]


def test_spans_are_not_read_where_nobody_wants_it_or_nothing_can_be_compared(tmp_path: Path) -> None:
    assert watcher(tmp_path, 2)._paces is None
    assert watcher(tmp_path, on=("stall", "failed"))._paces is None
    assert watcher(tmp_path)._paces is not None
