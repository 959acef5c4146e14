"""Hangs are found soon, and what only takes long is not taken for one."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from judge_helpers import Job, Pause, found_after_s, worker
from msgspec.structs import replace

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.run.judge.step_limits import LimitConfig, StepJudge
from phalanx.run.messages import WorkerState


@pytest.mark.parametrize("usual_s", [0.02, 0.3, 1.0, 4.0, 15.0, 60.0])
@pytest.mark.parametrize("steps", [6, 40, 100])
def test_a_hang_is_found_within_ninety_seconds_or_three_steps(usual_s: float, steps: int) -> None:
    noise = random.Random(steps)
    job = Job([10 * usual_s + 5] + [usual_s * noise.uniform(0.9, 1.1) for _ in range(steps)])
    found_s = found_after_s(job, until_s=job.end + 100 + 10 * usual_s)
    assert found_s is not None
    assert 60 < found_s - job.end < max(75, 3 * usual_s * 1.05 + 20)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_raise_no_alarm(seed: int) -> None:
    """Steps with jitter, a CPU hog that makes 20 of them three times as long, and pauses that the ranks tell of."""
    noise = random.Random(seed)
    usual_s = [0.1, 0.5, 2.0, 8.0][seed % 4]
    durations = [usual_s * noise.lognormvariate(0, 0.15) for _ in range(200)]
    for step in range(100, 120):
        durations[step] *= 3
    durations[0] = 120.0
    pauses = [
        Pause(50, 90.0, "evaluate"),
        Pause(150, 240.0, "checkpoint"),
        Pause(170, 400.0, "evaluate", expects_s=500.0),
        Pause(190, 30.0, "export", expects_s=20.0),
    ]
    job = Job(durations, pauses)
    assert found_after_s(job, until_s=job.end) is None


@pytest.mark.parametrize("seed", range(5))
def test_pauses_that_nobody_tells_of_are_none_while_ranks_move(seed: int) -> None:
    noise = random.Random(seed)
    durations = [0.5 * noise.lognormvariate(0, 0.1) for _ in range(200)]
    job = Job(durations, [Pause(step, noise.uniform(20, 300)) for step in (40, 80, 120, 160)])
    assert found_after_s(job, until_s=job.end) is None


def test_pauses_that_recur_widen_the_limit() -> None:
    """Every tenth step is followed by 50 s in which ranks hardly move: after two of them that is usual."""
    judge = StepJudge(1, 0.0)
    job = Job([0.5] * 45, [Pause(step, 50.0) for step in (10, 20, 30, 40)])
    for second in range(int(job.ends[25])):
        judge.observe(1, job.workers(second), second)
    assert judge.usual_s == pytest.approx(0.5)
    assert judge.standing(second).limit_s == pytest.approx(1.5 * 50.5)


@pytest.mark.parametrize(("usual_s", "limit_s"), [(1.0, 60.0), (30.0, 92.5)])
def test_one_slow_step_does_not_widen_it(usual_s: float, limit_s: float) -> None:
    judge = StepJudge(1, 0.0)
    job = Job([usual_s] * 50, [Pause(10, 1000.0)])
    for second in range(int(job.end)):
        judge.observe(1, job.workers(second), second)
    assert judge.standing(second).limit_s == pytest.approx(limit_s)


@pytest.mark.parametrize("pause_s", [10.0, 20.0, 50.0])
@pytest.mark.parametrize("after", [2, 10, 300])
def test_a_minute_in_which_nothing_moves_is_no_hang(pause_s: float, after: int) -> None:
    """Rank 0 sleeps, or reads from storage that stands still, for the first time after so many steps."""
    job = Job([0.1] * 400, [Pause(after, pause_s)])
    assert found_after_s(job, until_s=job.end, is_busy=lambda _: False) is None


def test_the_first_step_may_take_long() -> None:
    config = LimitConfig()
    assert found_after_s(Job([290.0] + [1.0] * 10), until_s=300.0, is_busy=lambda _: False) is None
    found_s = found_after_s(Job([]), until_s=400.0)
    assert found_s is not None and config.first_step_s < found_s < config.first_step_s + 10


def test_a_rank_that_says_what_it_expects_gets_it_and_no_more() -> None:
    job = Job([1.0] * 20, [Pause(20, 500.0, "checkpoint", expects_s=100.0)])
    found_s = found_after_s(job, until_s=400.0, is_busy=lambda _: False)
    assert found_s is not None and 120.0 <= found_s < 135.0


@pytest.mark.parametrize(("standing_at", "kind"), [(19, "hang"), (20, "moving")])
def test_a_pause_of_others_is_no_excuse_for_a_rank_that_has_not_come_to_it(standing_at: int, kind: str) -> None:
    """Rank 1 stands in the step after which rank 0 saves; rank 2, who has done it, may wait; rank 3 is not heard."""
    judge = StepJudge(1, 0.0)
    for second in range(1, 20):
        judge.observe(1, [worker(rank, second, 0.1, 1.0) for rank in range(4)], second + 0.1)
    for second in range(20, 90):
        age_s = second - standing_at + 0.1
        saves = worker(0, 20, second - 20 + 0.1, 1.0, "checkpoint", second - 20 + 0.05, 600.0)
        waits = worker(2, 20, second - 20 + 0.1, 1.0)
        judge.observe(1, [saves, worker(1, standing_at, age_s, 1.0), waits], second + 0.1)
        assert second > 21 or judge.standing(second + 0.1).kind == "moving"
    assert judge.standing(89.1).kind == kind
    judge.observe(1, [worker(0, 21, 0.0, 7.0), worker(2, 21, 0.0, 7.0)], 90.0)
    assert judge.standing(90.0).kind == "moving"


def test_a_rank_that_comes_to_the_pause_later_is_excused_as_the_others() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(1, 21):
        judge.observe(1, [worker(0, second, 0.1, 1.0), worker(1, min(second, 19), 0.1, 1.0)], second + 0.1)
    saves = worker(0, 20, 4.0, 1.0, "checkpoint", 4.0, 200.0)
    judge.observe(1, [saves, worker(1, 19, 5.0, 1.0)], 24.0)
    assert judge.next_look_s(24.0) < 60
    judge.observe(1, [saves, worker(1, 20, 0.0, 5.0)], 25.0)
    assert judge.standing(150.0).kind == "moving"
    judge.observe(1, [worker(0, 20, 136.0, 1.0), worker(1, 20, 132.0, 5.0)], 157.0)
    assert judge.standing(216.0).kind == "moving" and judge.standing(218.0).kind == "hang", "the checkpoint is over"


def test_an_evaluation_that_outlasts_what_it_expected_is_looked_at_and_left() -> None:
    job = Job([1.0] * 40, [Pause(20, 300.0, "evaluate", expects_s=100.0)])
    assert found_after_s(job, until_s=job.end) is None


def test_people_are_told_of_a_job_that_moves_and_makes_no_step_and_no_more_than_that() -> None:
    judge, told = StepJudge(1, 0.0, LimitConfig(patience_s=200.0)), []
    for second in range(20):
        judge.observe(1, [worker(0, second, 0.0, 1.0)], float(second))
    for second in range(20, 2000):
        judge.observe(1, [replace(worker(0, 19, second - 19.0, 1.0), still_s=3.0)], float(second))
        kind = judge.standing(float(second)).kind
        assert kind in ("moving", "long")
        if kind == "long":
            told.append(second - 19)
            judge.be_patient()
    assert told == [201, 401, 801, 1601]


@pytest.mark.parametrize("phase", ["step", "evaluate"])
def test_a_rank_that_is_stopped_is_found_soon_whatever_others_do(phase: str) -> None:
    judge = StepJudge(1, 0.0)
    for second in range(20):
        judge.observe(1, [worker(rank, second, 0.0, 1.0) for rank in (0, 1)], float(second))
    for second in range(20, 40):
        stopped = replace(worker(0, 19, second - 19.0, 1.0), stopped_s=second - 19.5)
        spins = replace(worker(1, 19, second - 19.0, 1.0, phase, second - 19.0), still_s=0.0)
        judge.observe(1, [stopped, spins], float(second))
        if judge.standing(float(second)).kind == "stopped":
            break
        assert judge.next_look_s(float(second)) <= 31 - second
    assert second == 30 and judge.standing(30.0).ranks == (0,)
    judge.observe(1, [replace(worker(0, 19, 12.0, 1.0), stopped_s=0.0)], 31.0)
    assert judge.standing(31.0).kind == "moving", "it goes on"


def test_a_stopped_rank_without_which_the_others_go_on_holds_up_nobody() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(60):
        stopped = replace(worker(0, 5, float(second), 1.0), stopped_s=float(second))
        judge.observe(1, [stopped, worker(1, second, 0.0, 1.0)], float(second))
        assert judge.standing(second + 0.9).kind == "moving"


def test_any_movement_of_any_rank_is_a_sign_of_life() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(20):
        judge.observe(1, [worker(rank, second, 0.0, 1.0) for rank in (0, 1)], float(second))
    for second in range(20, 500):
        age_s = second - 19.0
        ranks = [replace(worker(0, 19, age_s, 1.0), still_s=age_s), replace(worker(1, 19, age_s, 1.0), still_s=2.0)]
        judge.observe(1, ranks, float(second))
        assert judge.standing(float(second)).kind == "moving"
    for second in range(500, 570):
        judge.observe(
            1, [replace(worker(rank, 19, second - 19.0, 1.0), still_s=second - 497.0) for rank in (0, 1)], second
        )
    standing = judge.standing(569.0)
    assert standing.kind == "hang" and standing.quiet_s == pytest.approx(72, abs=1)
    assert standing.step_s == pytest.approx(550, abs=1), "what moves is no step"


def test_a_script_that_reports_no_steps_is_only_judged_by_what_moves() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(0, 20_000, 10):
        judge.observe(1, [replace(worker(0), still_s=3.0)], float(second))
        assert judge.standing(float(second)).kind == "moving"


def test_a_checkpoint_that_began_in_an_earlier_attempt_does_not_count() -> None:
    dangling = worker(0, 7, 1.0, 1.0, "checkpoint", 5.0)
    before = StepJudge(1, 0.0)
    before.observe(1, [dangling], 10.0)
    assert "checkpoint" in before.standing(11.0).why
    after = StepJudge(2, 20.0)
    after.observe(1, [dangling], 21.0)
    assert after.standing(21.0).why == "before its first step" and after.usual_s is None
    for second in range(22, 40):
        after.observe(2, [worker(0, second, 0.2, 1.0, "step", 0.2)], float(second))
    assert after.standing(39.0).kind == "moving"
    assert after.standing(100.0).kind == "hang"


def test_a_checkpoint_whose_rank_has_ended_does_not_count() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(10):
        judge.observe(1, [worker(r, second, 0.1, 1.0) for r in (0, 1)], float(second))
    judge.observe(1, [worker(0, 9, 1.1, 1.0, "checkpoint", 0.5)], 10.0)
    assert judge.standing(70.0).kind == "moving"
    judge.observe(1, [worker(0, 9, state="ended")], 20.0)
    assert judge.standing(70.0).kind == "hang"


def test_one_host_that_is_not_heard_is_no_hang_while_others_go_on() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(300):
        ranks = (0, 1) if second < 20 else (0,)
        judge.observe(1, [worker(r, second, 0.1, 1.0) for r in ranks], float(second))
        assert judge.standing(second + 0.9).kind == "moving"


WORKERS = st.builds(
    WorkerState,
    st.integers(0, 3),
    st.integers(),
    st.sampled_from(["starting", "running", "stopping", "ended"]),
    st.integers(-1, 50),
    st.floats(0, 1e6),
    st.floats(-1, 1e6),
    st.sampled_from(["", "step", "evaluate", "x"]),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    steps_here=st.integers(0, 50),
    still_s=st.floats(-1, 1e6),
    stopped_s=st.floats(0, 1e6),
)

# A step after 1 s, then ranks that move without making one: for less than twice the patience, and for more.
MOVES = [replace(worker(0, 1, age_s, 1.0), still_s=0.0) for age_s in (0.0, 1801.0, 3700.0)]
ONE_LONG_STEP = [(1, MOVES[:1], 1.0), (1, MOVES[1:2], 1801.0)]
TWICE_AS_LONG = [(1, MOVES[:1], 1.0), (1, MOVES[2:], 3700.0)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(WORKERS, max_size=4), st.floats(0, 1e3)), max_size=20))
@example(ONE_LONG_STEP)
@example(TWICE_AS_LONG)
def test_no_report_is_too_wild(reports: list[tuple[int, list[WorkerState], float]]) -> None:
    judge, now_s = StepJudge(1, 0.0), 0.0
    for attempt, workers, later_s in reports:
        now_s += later_s
        judge.observe(attempt, workers, now_s)
        standing = judge.standing(now_s)
        assert 0 <= standing.quiet_s <= now_s
        assert judge.next_look_s(now_s) >= 0
        if standing.kind == "long":
            judge.be_patient()
            # Alerted again only after twice the time: either that has passed as well, or nothing is wrong for now.
            after = judge.standing(now_s)
            assert after.kind in ("long", "moving") and (after.kind == "moving" or after.limit_s > standing.limit_s)


def test_an_attempt_that_goes_on_at_a_high_step_learns_as_one_from_the_beginning() -> None:
    """Steps of this process count, whatever number the run gives them."""
    judges = [StepJudge(1, 0.0), StepJudge(1, 0.0)]
    for second in range(1, 30):
        for judge, before in zip(judges, (0, 70_000), strict=True):
            report = WorkerState(0, 1, "running", before + second, 0.1, 1.0, steps_here=second, is_absolute=True)
            judge.observe(1, [report], float(second) + 20)
    assert judges[0].standing(52.0) == judges[1].standing(52.0) and judges[1].usual_s == 1.0


def test_settings_have_bounds() -> None:
    with pytest.raises(UserError, match="factor = 0"):
        validate(LimitConfig, {"factor": 0})
