"""Who is blamed: the script for its own exceptions and for what comes back at one step or goes where the rank goes; a
host for what comes there alone, at different steps, or for what the machine itself says."""

from __future__ import annotations

import random

import pytest
from decide_helpers import Speeds, World, attempt_runs, ended, running

from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import replay
from phalanx.run.decide.policy import Job, Policy

WORDS = ("ValueError: bad batch", "KeyError: 'x'", "RuntimeError: shapes differ", "ZeroDivisionError: division by zero")


def make(*, is_absolute: bool = True, hosts: int = 4, spares: int = 2, **more: object) -> World:
    """Hosts with two workers each that go on where they were, or begin anew; running."""
    resumes_every = 1 if is_absolute else 0
    speeds = Speeds(step=1.0, report=5.0)
    world = World(
        Job("j", hosts, 2, spares),
        Policy(give_up_s=0),
        speeds=speeds,
        is_absolute=is_absolute,
        resumes_every=resumes_every,
        **more,  # type: ignore[arg-type]
    )
    world.run_until(running)
    return world


def die(world: World, rank: int, name: str = "SIGSEGV", fault: ev.Fault = "process", after_s: float = 30.0) -> None:
    """A rank dies after so long, and the job goes on or ends."""
    attempt = world.state.attempt
    world.run_for(after_s)
    world.deliver(ev.Advanced(world.now_s, attempt, world._said_step(), world.is_absolute))
    world.kill(rank, name, fault)
    world.run_until(lambda w: ended(w) or (running(w) and w.state.attempt > attempt))


def evicted(world: World) -> list[str]:
    return [action.host for action in world.taken("Evict") if isinstance(action, act.Evict)]


def active_checks(world: World) -> list[str]:
    return [a.host for a in world.taken("Check") if isinstance(a, act.Check) and a.kind == "quick"][len(world.hosts) :]


# The script's own exceptions


@pytest.mark.parametrize("kind", ["raised", "status", "user"])
@pytest.mark.parametrize("seed", range(3))
def test_exceptions_of_the_script_at_random_steps_burn_no_host(kind: ev.FailureKind, seed: int):
    draw, world = random.Random(seed), make()
    for attempt in range(2, 12):
        world.run_for(draw.uniform(20, 200))
        world.throw([2], draw.choice(WORDS), kind)
        world.run_until(attempt_runs(attempt))
    assert not evicted(world)
    assert "raised by its program" in world.story() or kind != "raised"
    assert replay(world.policy, world.job, world.journal) == world.state


def test_a_host_whose_program_fails_again_is_checked_and_leaves_only_if_it_does_not_pass():
    world = make()
    for attempt in (2, 3, 4):
        world.run_for(40 * attempt)
        world.throw([2], WORDS[attempt % 4])
        world.run_until(attempt_runs(attempt))
    assert active_checks(world) == ["b", "b"] and not evicted(world)
    world.hosts["b"].fails_checks = "memory: 3 bits flipped"
    world.run_for(50)
    world.throw([2], WORDS[0])
    world.run_until(attempt_runs(5))
    assert evicted(world) == ["b"]


def test_exceptions_do_not_count_against_a_host_whose_rank_dies_later():
    world = make()
    for attempt in (2, 3, 4):
        world.run_for(40 * attempt)
        world.throw([2], WORDS[attempt % 4])
        world.run_until(attempt_runs(attempt))
    die(world, 2, "SIGKILL")
    assert not evicted(world) and "b: first fault" in world.story()


def test_an_error_that_the_machine_explains_is_the_hosts_however_it_is_raised():
    """The kernel has said Xid or ECC, so that the rank's exception has the class of the host."""
    world = make()
    for attempt in (2, 3):
        world.run_for(40 * attempt)
        world._fail([2], "raised", "RuntimeError: CUDA error: unspecified launch failure", "host")
        world.run_until(attempt_runs(attempt))
    assert evicted(world) == ["b"]


# Processes that die


def test_a_rank_that_dies_at_the_same_step_again_is_the_scripts():
    world = make(is_absolute=False)
    for _ in range(5):
        if not ended(world):
            die(world, 2, after_s=20.5)
    (end,) = world.taken("Finish")
    assert isinstance(end, act.Finish) and (end.status, end.requeue) == (1, False)
    assert "SIGSEGV" in end.reason and "at the same place, step 2" in end.reason
    assert not evicted(world) and world.state.attempt == 2


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGBUS"])
def test_who_is_killed_from_outside_at_the_same_step_is_stopped_by_the_limits_and_no_host_is_blamed(name: str):
    world = make(is_absolute=False)
    for _ in range(6):
        if not ended(world):
            die(world, 2, name, after_s=20.5)
    (end,) = world.taken("Finish")
    assert isinstance(end, act.Finish) and end.status == 4
    assert not evicted(world) and world.state.attempt == 4
    assert "at the same step before" in world.story()


def test_a_host_where_ranks_die_at_different_steps_while_all_others_live_is_evicted():
    world = make()
    for attempt in (2, 3, 4):
        die(world, 2 + attempt % 2, after_s=17.0 * attempt)
    assert evicted(world) == ["b"]


def test_deaths_that_come_on_several_hosts_burn_none():
    draw = random.Random(1)
    world = make()
    for attempt in range(2, 20):
        die(world, draw.randrange(8), after_s=draw.uniform(20, 200))
        assert running(world) and world.state.attempt == attempt
    assert not evicted(world)


def test_what_goes_with_the_rank_to_another_host_is_the_scripts():
    """One host is taken for bad at most: on the next one the same rank dies too."""
    world = make(spares=4)
    for attempt in range(2, 10):
        if not ended(world):
            die(world, 2, after_s=13.0 * attempt)
    assert evicted(world) == ["b"]
    assert "whichever host" in world.story()


def test_a_rank_that_dies_on_the_host_that_was_given_its_place_does_not_burn_that_host():
    """The first host left for another reason: who comes after it inherits no blame."""
    world = make()
    die(world, 2, after_s=20)
    die(world, 2, after_s=33)
    world.run_for(40)
    world.lose_host("b")
    world.run_until(lambda w: running(w) and "b" not in w.state.placement)
    die(world, 2, after_s=47)
    assert not evicted(world) and running(world)


def test_a_host_that_kills_its_ranks_at_once_after_each_start_is_replaced():
    """That they die at the same step says nothing: none of them came further than the first."""
    world = make()
    world.run_for(100)
    for _ in range(3):
        die(world, 2, after_s=0.2)
    assert evicted(world) == ["b"] and running(world)
