"""Runs whose steps drift are found, with the step, the part and the ranks; healthy ones are left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.drifting_runs import BEGIN_NS, Drift, DriftingRun

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.drift import step_series
from phalanx.detect.drift.drift_judge import DriftPolicy, judge, judge_run
from phalanx.detect.drift.step_series import read_series
from phalanx.telemetry.queries import Trace

INNOCENT = {"evaluate_every": 50, "checkpoint_every": 40, "restart_at": 150}


def test_a_healthy_run_with_innocent_events_is_left_alone(tmp_path: Path) -> None:
    for seed in range(3):
        verdict = judge_run(DriftingRun(seed=seed, **INNOCENT).write(tmp_path / str(seed)))
        assert not verdict.detections, verdict.sentence
        assert verdict.exit_status == 0
    assert "of 8 ranks" in verdict.looked_at


@pytest.mark.campaign(but=("jump-forward", "creep-data"))
@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "outside spans"])
@pytest.mark.parametrize("shape", ["jump", "creep"])
def test_the_part_that_grew_on_all_ranks_is_named(tmp_path: Path, part: str, shape: str) -> None:
    run = DriftingRun(drift=Drift(part, 0.1, shape, 120), evaluate_every=50).write(tmp_path / "run")  # type: ignore[arg-type]
    (found,) = judge_run(run).detections
    assert found.what == {"jump": "slower steps", "creep": "creeping step time"}[shape]
    assert (found.figures["cause"], found.figures["part"]) == ("part", part)
    assert found.since.step is not None
    assert abs(found.since.step - 120) <= (2 if shape == "jump" else 40)
    assert found.since.unix_s is not None
    assert BEGIN_NS / 1e9 < found.since.unix_s < BEGIN_NS / 1e9 + 500
    assert found.advice == "program"
    assert not found.blamed_hosts
    assert part in found.sentence
    assert any(why.startswith("MFU") for why in found.why)


@pytest.mark.campaign(but=("forward-ranks1-host2", "data-ranks0-host1"))
@pytest.mark.parametrize(("ranks", "host"), [((3,), "host1"), ((4, 5), "host2")])
@pytest.mark.parametrize("part", ["forward", "data"])
def test_ranks_that_grew_are_named_with_their_host(
    tmp_path: Path, ranks: tuple[int, ...], host: str, part: str
) -> None:
    run = DriftingRun(drift=Drift(part, 0.1, "creep", 100, ranks)).write(tmp_path / "run")
    verdict = judge_run(run)
    assert verdict.blamed_hosts == (host,)
    assert verdict.blamed_ranks == ranks
    assert verdict.detections[0].figures["part"] == part
    assert {row["rank"] for row in verdict.tables["ranks"]} == set(ranks)


def test_a_whole_stage_that_grew_is_no_machine(tmp_path: Path) -> None:
    series = read_series(DriftingRun(drift=Drift("forward", 0.1, "jump", 150, (4, 5, 6, 7))).write(tmp_path / "run"))
    staged = replace(series, ranks=replace(series.ranks, stages=(0, 0, 0, 0, 1, 1, 1, 1)))
    (found,) = judge(staged, DriftPolicy()).detections
    assert (found.who[0].kind, found.who[0].name) == ("stage", "stage 1")
    assert found.advice == "program"
    assert not found.blamed_hosts
    assert "forward grew on all ranks of stage 1" in found.sentence


def test_slower_bytes_are_told_from_late_ranks(tmp_path: Path) -> None:
    verdict = judge_run(DriftingRun(drift=Drift("bytes", 0.08)).write(tmp_path / "bytes"))
    assert (verdict.detections[0].figures["cause"], verdict.detections[0].figures["group"]) == ("bytes", "shard")


@pytest.mark.parametrize("shape", ["jump", "creep"])
def test_launch_skew_that_grows_while_work_stays_flat_is_named(tmp_path: Path, shape: str) -> None:
    run = DriftingRun(drift=Drift("skew", 0.12, shape, 100)).write(tmp_path / "run")  # type: ignore[arg-type]
    (found,) = judge_run(run).detections
    assert (found.figures["cause"], found.figures["group"], found.figures["part"]) == ("skew", "shard", "forward")
    assert "launch skew of group shard grew" in found.sentence
    assert not found.blamed_hosts
    assert any("the usual own work of no rank grew by more than" in why for why in found.why)
    assert any("garbage collection" in action for action in found.then)


def test_figures_alone_say_that_and_since_when(tmp_path: Path) -> None:
    run = DriftingRun(drift=Drift("forward", 0.1), **INNOCENT).write(tmp_path / "run", spans=False)
    (found,) = judge_run(run).detections
    assert found.since.step in range(198, 203)
    assert found.since.unix_s is None
    assert not found.who
    assert any("telemetry.spans" in action for action in found.then)
    assert any("let the ranks record spans" in one for one in judge_run(run).abstains)


def test_a_growing_batch_is_no_drift(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tokens, lines = 0, []
    for step in range(1, 401):
        size = 1024 * min(1 + step // 50, 8)
        tokens += size
        step_s = size / 4096 * random.normal(1, 0.01)
        lines.append({"kind": "step", "step": step, "loss": 3.0, "tokens": tokens, "step_s": step_s})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not judge_run(tmp_path).detections
    for line in lines[250:]:
        line["step_s"] *= 1.1  # type: ignore[operator]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = judge_run(tmp_path).detections
    assert "for as many tokens" in found.sentence


def test_a_start_that_is_slower_than_the_one_before_blames_nobody(tmp_path: Path) -> None:
    run = DriftingRun(drift=Drift("forward", 0.15, onset=200), restart_at=200).write(tmp_path / "run")
    (found,) = judge_run(run).detections
    assert found.what == "slower start"
    assert found.since.step in range(200, 210)
    assert found.advice == "watch"


def test_a_slow_while_that_is_over_is_told_in_the_tables(tmp_path: Path) -> None:
    series = read_series(DriftingRun(steps=400).write(tmp_path / "run"))
    series.step_s[100:330] *= 1.2
    verdict = judge(series, DriftPolicy())
    assert not verdict.detections
    series.step_s[330:] *= 1.2
    assert judge(series, DriftPolicy()).detections


def test_two_jumps_are_both_told_and_what_they_are_together(tmp_path: Path) -> None:
    series = read_series(DriftingRun(steps=400).write(tmp_path / "run", spans=False))
    series.step_s[120:] *= 1.1
    series.step_s[280:] *= 1.2
    largest, other = judge(series, DriftPolicy()).detections
    assert abs((largest.since.step or 0) - 281) <= 3
    assert abs((other.since.step or 0) - 121) <= 3
    assert any("2 changes together" in why and why.endswith("32% longer") for why in largest.why)


def test_steps_without_usable_seconds_are_counted_and_a_missing_end_is_said(tmp_path: Path) -> None:
    def verdict_with(missing: range) -> JudgeVerdict:
        lines = [
            {"kind": "step", "step": n, "step_s": None if n in missing else 1 + n % 7 / 1000} for n in range(1, 301)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return judge_run(tmp_path)

    some = verdict_with(range(1, 300, 4))
    assert some.exit_status == 0
    assert "75 without usable seconds left out" in some.sentence
    late = verdict_with(range(151, 301))
    assert late.exit_status == 3
    assert "the newest 150 steps, after step 150" in late.sentence


def test_figures_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no step of its metrics\.jsonl has a step_s"):
        judge_run(tmp_path)


def test_a_part_that_grows_behind_another_is_told(tmp_path: Path) -> None:
    series = read_series(DriftingRun().write(tmp_path / "run"))
    series.parts["data"][250:] += 0.05
    (found,) = judge(series, DriftPolicy()).detections
    assert found.what == "growing part"
    assert "data takes longer since step 25" in found.sentence
    assert found.advice == "watch"


def test_of_very_long_runs_some_steps_are_read(tmp_path: Path) -> None:
    run = DriftingRun(drift=Drift("backward", 0.1, onset=201), evaluate_every=50).write(tmp_path / "run")
    series = read_series(run, most_rank_steps=1600)
    assert series.step.tolist() == list(range(2, 401, 2))
    (found,) = judge(series, DriftPolicy()).detections
    assert found.since.step in (200, 202, 204)
    assert found.figures["part"] == "backward"


def test_a_run_that_goes_on_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and ranks that came after the first query do not count yet."""
    run = DriftingRun().write(tmp_path / "run")
    whole = read_series(run)
    ask = Trace.ask

    def asked_early(trace: Trace, query: str, **given: Any) -> Any:
        table = ask(trace, query, **given)
        if query is step_series._STEPS:
            return table.slice(0, len(table) - 7)
        return table.slice(0, len(table) - 1) if query.startswith("select rank, any_value(host)") else table

    monkeypatch.setattr(Trace, "ask", asked_early)
    early = read_series(run)
    assert early.step.tolist() == whole.step[:-7].tolist() and early.ranks.ranks == whole.ranks.ranks[:-1]
    for group, waits in whole.waits.items():
        fewer = len(whole.ranks.ranks) / len(early.ranks.ranks)  # averages of so many ranks
        np.testing.assert_allclose(early.waits[group].late_s, waits.late_s[:-7] * fewer)


def test_short_and_empty_runs_abstain_or_say_the_cure(tmp_path: Path) -> None:
    verdict = judge_run(DriftingRun(steps=30).write(tmp_path / "short"))
    assert not verdict.detections
    assert "let it train on" in verdict.abstains[0]
    assert verdict.exit_status == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        judge_run(tmp_path / "empty")


def test_the_command_prints_and_exits_by_the_verdict(tmp_path: Path) -> None:
    slow = DriftingRun(drift=Drift("backward", 0.1)).write(tmp_path / "slow")
    shown = CliRunner().invoke(command, ["drift", str(slow)])
    assert shown.exit_code == 1
    assert shown.output.startswith("Steps take ")
    assert "backward grew on all ranks" in shown.output
    found = json.loads(CliRunner().invoke(command, ["drift", str(slow), "--json"]).output)
    assert found["detections"][0]["figures"]["part"] == "backward"
    assert found["tables"]["parts"][0]["part"] == "backward"
    stricter = CliRunner().invoke(command, ["drift", str(slow), "--growth", "0.5"])
    assert stricter.exit_code == 0
