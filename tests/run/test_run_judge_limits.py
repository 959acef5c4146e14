"""Hangs are found soon, and what only takes long is not taken for one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_helpers import BACKWARD, Job, Pause, found_after_s, py_spy, worker

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.run.judge.limits import LimitConfig, StepJudge
from phalanx.run.judge.still import compare
from phalanx.run.messages import RankEvidence, WorkerState


@pytest.mark.parametrize("usual_s", [0.02, 0.3, 1.0, 4.0, 15.0, 60.0])
@pytest.mark.parametrize("steps", [6, 40, 100])
def test_a_hang_is_found_in_three_steps_and_five_seconds(usual_s: float, steps: int) -> None:
    noise = random.Random(steps)
    job = Job([10 * usual_s + 5] + [usual_s * noise.uniform(0.9, 1.1) for _ in range(steps)])
    found_s = found_after_s(job, until_s=job.end + 100 + 10 * usual_s)
    assert found_s is not None
    assert found_s - job.end < 3 * usual_s * 1.05 + 5
    assert found_s > job.end


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
    """Every tenth step is followed by 20 s in which ranks hardly move: after two of them that is usual."""
    judge = StepJudge(1, 0.0)
    job = Job([0.5] * 45, [Pause(step, 20.0) for step in (10, 20, 30, 40)])
    for second in range(int(job.ends[25])):
        judge.observe(1, job.workers(second), second)
    assert judge.usual_s == pytest.approx(0.5)
    assert judge.standing(second).limit_s == pytest.approx(1.5 * 20.5)


def test_one_slow_step_does_not_widen_it() -> None:
    judge = StepJudge(1, 0.0)
    job = Job([1.0] * 50, [Pause(10, 100.0)])
    for second in range(int(job.end)):
        judge.observe(1, job.workers(second), second)
    assert judge.standing(second).limit_s == pytest.approx(3 * 1.0 + 2.5)


def test_the_first_step_may_take_long_and_the_next_ones_a_little() -> None:
    config = LimitConfig()
    assert found_after_s(Job([290.0] + [1.0] * 10), until_s=300.0, is_busy=lambda _: False) is None
    found_s = found_after_s(Job([]), until_s=400.0)
    assert found_s is not None and config.first_step_s < found_s < config.first_step_s + 2
    job = Job([10.0, 1.0])
    found_s = found_after_s(job, until_s=200.0)
    assert found_s is not None and config.early_s < found_s - job.end < config.early_s + 2


def test_a_rank_that_says_what_it_expects_gets_it_and_no_more() -> None:
    job = Job([1.0] * 20, [Pause(20, 500.0, "checkpoint", expects_s=100.0)])
    found_s = found_after_s(job, until_s=400.0, is_busy=lambda _: False)
    assert found_s is not None and 120.0 <= found_s < 130.0


def test_a_pause_of_others_is_no_excuse_for_a_rank_that_has_not_come_to_it() -> None:
    """Rank 1 stands in the step after which rank 0 saves; rank 2, who has done it, may wait; rank 3 is not heard."""
    for standing_at, kinds in ((19, ["watch", "due"]), (20, ["moving", "moving"])):
        judge = StepJudge(1, 0.0)
        for second in range(1, 20):
            judge.observe(1, [worker(rank, second, 0.1, 1.0) for rank in range(4)], second + 0.1)
        found = []
        for second in range(20, 27):
            age_s = second - standing_at + 0.1
            saves = worker(0, 20, second - 20 + 0.1, 1.0, "checkpoint", second - 20 + 0.05, 60.0)
            waits = worker(2, 20, second - 20 + 0.1, 1.0)
            judge.observe(1, [saves, worker(1, standing_at, age_s, 1.0), waits], second + 0.1)
            found.append(judge.standing(second + 0.1).kind)
        assert [kind for kind in kinds if kind in found] == kinds, found
        assert found[0] == "moving" and found[-1] == kinds[-1]
    judge.observe(1, [worker(0, 21, 0.0, 7.0), worker(2, 21, 0.0, 7.0)], 27.0)
    assert judge.standing(27.0).kind == "moving"


def test_a_rank_that_comes_to_the_pause_later_is_excused_as_the_others() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(1, 21):
        judge.observe(1, [worker(0, second, 0.1, 1.0), worker(1, min(second, 19), 0.1, 1.0)], second + 0.1)
    saves = worker(0, 20, 4.0, 1.0, "checkpoint", 4.0, 60.0)
    judge.observe(1, [saves, worker(1, 19, 5.0, 1.0)], 24.0)
    assert judge.standing(24.0).kind == "watch" and judge.next_look_s(24.0) < 3
    judge.observe(1, [saves, worker(1, 20, 0.0, 5.0)], 25.0)
    assert judge.standing(40.0).kind == "moving"
    judge.observe(1, [worker(0, 20, 20.0, 1.0), worker(1, 20, 16.0, 5.0)], 41.0)
    assert judge.standing(41.0).kind == "moving" and judge.standing(47.0).kind == "due", "the checkpoint is over"


def test_an_evaluation_that_outlasts_what_it_expected_is_looked_at_and_left() -> None:
    job = Job([1.0] * 40, [Pause(20, 300.0, "evaluate", expects_s=100.0)])
    assert found_after_s(job, until_s=job.end) is None


def test_patience_has_an_end_though_ranks_move() -> None:
    job = Job([1.0] * 20, [Pause(20, 2000.0)])
    found_s = found_after_s(job, LimitConfig(patience_s=200.0), until_s=1000.0)
    assert found_s is not None and 200.0 <= found_s - 20.0 < 203.0


def test_a_script_that_reports_no_steps_is_not_ended_for_that() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(0, 20_000, 10):
        judge.observe(1, [worker(0)], float(second))
        assert judge.standing(float(second)).kind != "hang"
    assert judge.standing(float(second)).kind == "due", "only both looks can say that it hangs"


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
    assert after.standing(50.0).kind == "due"


def test_a_checkpoint_whose_rank_has_ended_does_not_count() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(10):
        judge.observe(1, [worker(r, second, 0.1, 1.0) for r in (0, 1)], float(second))
    judge.observe(1, [worker(0, 9, 1.1, 1.0, "checkpoint", 0.5)], 10.0)
    assert judge.standing(20.0).kind == "moving"
    judge.observe(1, [worker(0, 9, state="ended")], 20.0)
    assert judge.standing(20.0).kind == "due"


def test_one_host_that_is_not_heard_is_no_hang_while_others_go_on() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(300):
        ranks = (0, 1) if second < 20 else (0,)
        judge.observe(1, [worker(r, second, 0.1, 1.0) for r in ranks], float(second))
        assert judge.standing(second + 0.9).kind == "moving"


def test_a_dismissed_look_is_repeated_after_twice_the_time() -> None:
    judge = StepJudge(1, 0.0)
    for second in range(20):
        judge.observe(1, [worker(0, second, 0.0, 1.0)], float(second))
    assert judge.next_look_s(19.0) == pytest.approx(2.2)
    assert judge.next_look_s(22.0) == pytest.approx(2.5)
    assert judge.standing(24.6).kind == "due"
    judge.dismiss(24.6)
    assert judge.standing(24.6).limit_s == pytest.approx(11.2)
    assert judge.standing(30.0).kind == "watch" and judge.standing(30.3).kind == "due"
    judge.observe(1, [worker(0, 20, 0.0, 11.0)], 31.0)
    assert judge.standing(31.0).limit_s < 6


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
)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(WORKERS, max_size=4), st.floats(0, 1e3)), max_size=20))
def test_no_report_is_too_wild(reports: list[tuple[int, list[WorkerState], float]]) -> None:
    judge, now_s = StepJudge(1, 0.0), 0.0
    for attempt, workers, later_s in reports:
        now_s += later_s
        judge.observe(attempt, workers, now_s)
        standing = judge.standing(now_s)
        assert 0 <= standing.quiet_s <= now_s
        assert judge.next_look_s(now_s) >= 0
        if standing.kind == "due":
            judge.dismiss(now_s)
            assert judge.standing(now_s).kind != "due"


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


# Two looks

WAITS = py_spy("all_reduce (torch/distributed/distributed_c10d.py:2501)", "main (train.py:40)")
SAVES = py_spy("_save (torch/serialization.py:960)", "save_checkpoint (train.py:80)", "main (train.py:41)")


@pytest.mark.parametrize(
    ("name", "first", "second", "is_hang"),
    [
        ("all wait", [WAITS, WAITS], [WAITS, WAITS], True),
        ("one moves", [WAITS, BACKWARD], [WAITS, BACKWARD.replace("824", "825")], False),
        ("one saves", [WAITS, SAVES], [WAITS, SAVES], False),
        ("recomputation is no checkpoint", [WAITS, py_spy("checkpoint (torch/utils/checkpoint.py:3)")] * 1, None, True),
        ("compiled code runs", [WAITS, py_spy("compile_wrapper (torch/_dynamo/eval_frame.py:3)")], None, True),
        ("compilation", [WAITS, py_spy("compile_inner (torch/_dynamo/convert_frame.py:3)")], None, False),
        ("another thread moves", [WAITS], [WAITS + '\nThread 9 (active): "pin"\n    get (queue.py:3)\n'], True),
    ],
)
def test_two_looks(name: str, first: list[str], second: list[str] | None, is_hang: bool) -> None:
    looks = [
        [RankEvidence(rank, stack, cpu_s=cpu_s + 10.0 * turn) for rank, stack in enumerate(stacks)]
        for turn, (stacks, cpu_s) in enumerate([(first, 0.0), (second or first, 0.0)])
    ]
    assert compare(*looks, elapsed_s=10.0).is_hang is is_hang, name


def test_changing_stacks_without_cpu_time_are_still() -> None:
    """A rank that waits in a loop with short sleeps is seen at this line or at that."""
    first = [RankEvidence(0, py_spy("poll (train.py:10)"), cpu_s=1.0)]
    second = [RankEvidence(0, py_spy("poll (train.py:11)"), cpu_s=1.1)]
    assert compare(first, second, 10.0).is_hang
    assert not compare(first, second, 1.0).is_hang


def test_a_step_between_the_looks_is_no_hang() -> None:
    assert not compare([RankEvidence(0, WAITS, step=4)], [RankEvidence(0, WAITS, step=5)], 2.0).is_hang


def test_silence_is_stillness() -> None:
    first, second = [RankEvidence(0, WAITS), RankEvidence(1, WAITS)], [RankEvidence(0, is_silent=True)]
    found = compare(first, second, 2.0)
    assert (found.still, found.moving, found.is_hang) == ((0, 1), (), True)
    assert not compare([], [], 1.0).is_hang


@given(st.lists(st.builds(RankEvidence, st.integers(0, 5), st.text(max_size=200), st.booleans()), max_size=6))
def test_no_stack_is_too_wild(looks: list[RankEvidence]) -> None:
    found = compare(looks, looks, 1.0)
    assert set(found.still) | set(found.moving) == {look.rank for look in looks}
