"""A crash loop is slowed down and ended, whatever the script says of its steps; a job that lives long is not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from decide_helpers import Speeds, World, attempt_runs, ended, running

from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import replay
from phalanx.run.decide.policy import Job, Policy

HOUR_S, DAY_S = 3600.0, 86_400.0
WAYS = ("signal", "raised", "hang", "status", "follows")


def make(*, is_absolute: bool = False, policy: Policy | None = None, hosts: int = 4, **more: object) -> World:
    """Hosts with two workers each and a spare; by default a script that numbers no steps and begins anew each time."""
    speeds = Speeds(step=1.0, report=60.0)
    return World(
        Job("j", hosts, 2, 1),
        policy or Policy(give_up_s=0),
        speeds=speeds,
        is_absolute=is_absolute,
        resumes_every=more.pop("resumes_every", 0),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def fail(world: World, way: str, rank: int) -> None:
    """One rank fails in this way, each time with other words."""
    if world.running_since_s is not None:  # the driver says how far it was first
        world.deliver(ev.Advanced(world.now_s, world.state.attempt, world._said_step(), world.is_absolute))
    if way == "hang":
        world.hang(rank)
    elif way == "follows":  # the guilty one never says a word
        for each in range(world.state.world_size):
            event = ev.WorkerFailed(world.now_s, world.state.attempt, each, "raised", "network", "closed by peer", True)
            world.deliver(event)
        world._freeze()
    elif way == "signal":
        world.kill(rank, ("SIGKILL", "SIGSEGV", "SIGBUS")[world.state.attempt % 3])
    else:
        world.throw([rank], f"{way} {'x' * world.state.attempt}", way)  # type: ignore[arg-type]


def live_and_fail(world: World, seconds: float, way: str, rank: int) -> None:
    """The present attempt makes steps for so long."""
    attempt = world.state.attempt
    world.run_for(seconds)
    fail(world, way, rank)
    world.run_until(lambda w: ended(w) or attempt_runs(attempt + 1)(w), within_s=2 * DAY_S)


def attempts(world: World) -> int:
    return len({action.attempt for action in world.taken("Start") if isinstance(action, act.Start)})


def finish(world: World) -> act.Finish:
    (action,) = world.taken("Finish")
    assert isinstance(action, act.Finish)
    return action


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_crash_loop_ends_after_three_restarts_in_every_path(way: str, is_absolute: bool):
    world = make(is_absolute=is_absolute)
    world.run_until(running)
    for lived_s in (400, 300, 390, 120, 399, 250, 380, 100):  # never as far as the first time
        live_and_fail(world, lived_s, way, world.state.attempt % 8)
        if ended(world):
            break
    assert ended(world) and attempts(world) == 4
    assert finish(world).status == 4 and not finish(world).requeue
    assert "3 restarts" in finish(world).reason


def test_it_is_slowed_down_before_it_is_ended():
    world = make()
    world.run_until(running)
    live_and_fail(world, 60.0, "signal", 3)
    while not ended(world):
        live_and_fail(world, 5.0, "signal", 3)
    opened = [time_s for time_s, action in world.log if isinstance(action, act.OpenStore)]
    gaps = [after - before for before, after in pairwise(opened)]
    assert 60 < gaps[0] < 61.5 and gaps[1] >= 7 and gaps[2] >= 9, gaps  # a life, and then 0, 2 and 4 s of pause


def test_38_hours_of_restarts_without_a_checkpoint_are_over_after_a_few():
    # 291 attempts of 470 s were made in 38 hours
    for seed in range(20):
        draw, world = random.Random(seed), make()
        world.run_until(running)
        while world.now_s < 38 * HOUR_S and not ended(world):
            live_and_fail(world, draw.uniform(5, 470), draw.choice(WAYS), draw.randrange(8))
        assert ended(world) and world.now_s < 2 * HOUR_S and attempts(world) <= 16, (seed, attempts(world))


def test_an_attempt_that_gets_one_step_further_than_ever_is_progress_and_one_that_only_differs_is_not():
    world = make()
    world.run_until(running)
    for lived_s in (100, 110, 105, 120, 115, 118, 130, 90, 80, 70):
        assert not ended(world)
        live_and_fail(world, lived_s, "signal", 1)
    assert ended(world) and attempts(world) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_script_without_numbered_steps_lives_for_months_between_rare_faults(seed: int):
    # It goes on from checkpoints of its own, which nobody here sees; hardly an attempt lives longer than all before.
    draw = random.Random(seed)
    world = make(hosts=8, pool=[f"p{number}" for number in range(400)], resumes_every=600)
    world.speeds.report = 600.0
    world.run_until(running)
    faults = 0
    while world.now_s < 180 * DAY_S:
        faults += 1
        if draw.random() < 0.4:
            attempt = world.state.attempt
            world.run_for(draw.expovariate(1 / DAY_S))
            world.lose_host(world.state.placement[draw.randrange(8)])
            world.run_until(lambda w, a=attempt: ended(w) or (running(w) and w.state.attempt > a), DAY_S)
        else:
            live_and_fail(world, draw.expovariate(1 / DAY_S), draw.choice(WAYS), draw.randrange(16))
        assert not ended(world), finish(world)
    assert faults > 120
    assert replay(world.policy, world.job, world.journal) == world.state


def test_an_hour_between_two_faults_is_no_crash_loop():
    world = make(resumes_every=600)
    world.run_until(running)
    live_and_fail(world, 100 * HOUR_S, "signal", 0)
    for number in range(30):
        live_and_fail(world, HOUR_S + number, WAYS[number % 5], number % 8)
    assert running(world)
    assert "is no crash loop" in world.story()


def test_a_hang_of_half_an_hour_is_no_life():
    world = make()
    world.run_until(running)
    live_and_fail(world, 300, "signal", 0)
    for _ in range(8):
        world.run_for(60)
        attempt, step = world.state.attempt, world._said_step()
        world._freeze()
        world.run_for(1800)  # before it is told, as where a rank has said that it evaluates
        world.deliver(ev.Advanced(world.now_s, attempt, step + 5, age_s=1800.0))
        world.hang(3)
        world.run_until(lambda w, a=attempt: ended(w) or attempt_runs(a + 1)(w))
        if ended(world):
            break
    assert ended(world) and attempts(world) == 4


def test_attempts_that_end_after_exactly_as_many_steps_are_one_however_long_they_live():
    world = make()
    world.run_until(running)
    for _ in range(8):
        began_s = world.running_since_s or 0.0
        live_and_fail(world, began_s + HOUR_S + 0.5 - world.now_s, "signal", 3)
        if ended(world):
            break
    assert ended(world) and attempts(world) == 4


def test_hosts_that_are_lost_one_after_another_at_different_places_are_no_crash_loop():
    world = make(hosts=8, pool=[f"p{number}" for number in range(20)], resumes_every=600)
    world.run_until(running)
    world.run_for(100 * HOUR_S)
    for place in (1, 6, 3):
        attempt = world.state.attempt
        world.lose_host(world.state.placement[place])
        world.run_until(lambda w, a=attempt: ended(w) or attempt_runs(a + 1)(w))
        world.run_for(120)
    for _ in range(2):  # the restarts that others have are left
        live_and_fail(world, 120, "signal", 0)
    assert running(world)
    live_and_fail(world, 120, "signal", 0)
    assert ended(world)


def test_a_place_that_loses_its_host_again_and_again_is_one():
    world = make(pool=[f"p{number}" for number in range(20)])
    world.run_until(running)
    world.run_for(100 * HOUR_S)
    while not ended(world):
        attempt = world.state.attempt
        assert attempt < 8
        world.lose_host(world.state.placement[2])
        world.run_until(lambda w, a=attempt: ended(w) or attempt_runs(a + 1)(w))
        world.run_for(120)
    assert finish(world).status == 4


@pytest.mark.parametrize("way", ["signal", "raised", "status", "follows"])
def test_a_script_that_numbers_no_steps_and_goes_on_from_newer_checkpoints_is_not_stopped_by_the_limits(way: str):
    """It crashes every five seconds; what it restored is said by the library that wrote it."""
    world = make(resumes_every=2, says_restored=True)
    world.run_until(running)
    for number in range(30):
        live_and_fail(world, 5.2, way, number % 8)
        assert running(world), finish(world)
    assert world.state.progress.base > 100
    assert replay(world.policy, world.job, world.journal) == world.state


@pytest.mark.parametrize("way", ["signal", "status", "follows"])
def test_one_whose_checkpoints_are_the_same_again_is_stopped_by_the_limits_after_three_restarts(way: str):
    world = make(resumes_every=100, says_restored=True)
    world.run_until(running)
    while not ended(world):
        live_and_fail(world, 6.2 - world.state.attempt, way, 3)
    assert attempts(world) == 4 and finish(world).status == 4
    assert "no newer checkpoint" in finish(world).reason


def test_an_exception_that_comes_after_as_many_steps_of_a_newer_state_is_another_place():
    world = make(resumes_every=2, says_restored=True)
    world.run_until(running)
    for attempt in range(2, 12):
        world.run_for(5.2)
        world.throw([3], "ValueError: as ever")
        world.run_until(attempt_runs(attempt))
    world = make(resumes_every=100, says_restored=True)
    world.run_until(running)
    for attempt in (2, 3):
        world.run_for(5.5)
        world.throw([3], "ValueError: as ever")
        world.run_until(lambda w, after=attempt: ended(w) or attempt_runs(after)(w))
    assert ended(world) and finish(world).status == 1


def test_a_newer_checkpoint_that_it_went_on_from_is_progress_though_no_step_is_later_than_ever():
    # From step 3,600 it goes back to 600, and is struck again and again before it has come to 3,600.
    world = make(is_absolute=True, resumes_every=600)
    world.run_until(running)
    world.run_for(HOUR_S)
    fail(world, "signal", 1)
    world.saved_step = 600
    world.run_until(attempt_runs(2))
    for number in range(4):
        live_and_fail(world, 620, "signal", number % 8)
    assert running(world) and world.step < 3600


def test_going_on_from_the_same_checkpoint_again_and_again_is_none():
    world = make(is_absolute=True)
    world.run_until(running)
    world.run_for(HOUR_S)
    fail(world, "signal", 1)
    while not ended(world):
        world.saved_step = 600
        world.run_until(running, DAY_S)
        assert world.state.attempt < 6
        live_and_fail(world, 620, "signal", world.state.attempt)
    assert attempts(world) == 4


def test_the_last_restart_of_a_crash_loop_is_with_the_previous_version():
    job = Job("j", 4, 2, 1, previous_version="v1")
    world = World(job, Policy(give_up_s=0), speeds=Speeds(step=1.0), is_absolute=False, resumes_every=0)
    world.run_until(running)
    while not ended(world):
        live_and_fail(world, 20.0, "signal", world.state.attempt % 8)
    versions = [a.version for a in world.taken("Start") if isinstance(a, act.Start)]
    assert versions == ["", "", "", "v1"]
    assert finish(world).status == 4
