"""Bounds of what people may choose, and that values come back from JSON as they were."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from subprocess import run

import msgspec
import pytest
from decide_helpers import World, attempt_runs, running

from phalanx.core.errors import UserError
from phalanx.run.decide.actions import Action
from phalanx.run.decide.decide import decide, event_from_json, replay, to_json
from phalanx.run.decide.events import WorkersReturned
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("settle_s", -1),
        ("evidence_s", 0),
        ("stop_s", math.nan),
        ("give_up_s", -5),
        ("max_restarts_without_step", 0),
        ("max_restarts", -1),
        ("slow_factor", 1.0),
        ("faulty_per_hour", 0),
        ("backoff_limit_s", 1.0),
        ("fault_window_s", 0),
    ],
)
def test_a_policy_out_of_bounds_is_refused_with_field_value_and_cure(field: str, value: float):
    with pytest.raises(UserError, match=rf"{field} = .*; set it to at least") as caught:
        Policy(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("fields", [{"hosts": 0}, {"workers_per_host": 0}, {"spares": -1}, {"allowed_hosts": (5,)}])
def test_a_job_out_of_bounds_is_refused(fields: dict):
    with pytest.raises(UserError) as caught:
        Job(**{"name": "j", "hosts": 4, **fields})
    assert caught.value.field == next(iter(fields))


def test_a_misspelt_field_or_a_bad_value_in_json_is_refused():
    with pytest.raises(msgspec.ValidationError, match="stop"):
        msgspec.json.decode(b'{"stop": 3}', type=Policy)
    with pytest.raises(msgspec.ValidationError, match="settle_s"):
        msgspec.json.decode(b'{"settle_s": -3}', type=Policy)


def test_sizes_are_divisors_unless_they_are_named():
    assert Job("j", 12).sizes() == (12, 6, 4, 3, 2, 1)
    assert Job("j", 12, allowed_hosts=(9, 8)).sizes() == (12, 9, 8)


def test_a_whole_story_comes_back_from_json_event_by_event():
    world = World(Job("j", 4, 2, 1))
    world.run_until(running)
    world.hang(2)
    world.run_until(attempt_runs(2))
    world.lose_host("d")
    world.run_until(attempt_runs(3))
    journal = [event_from_json(to_json(event)) for event in world.journal]
    assert journal == world.journal
    assert (
        replay(world.policy, world.job, journal) == world.state == msgspec.json.decode(to_json(world.state), type=State)
    )
    assert [msgspec.json.decode(to_json(action), type=Action) for action in world.taken()] == world.taken()


def test_a_clock_that_goes_back_stands_still():
    world = World(Job("j", 2))
    world.run_until(running)
    world.run_for(5)
    state, _ = decide(world.state, WorkersReturned(-3.0, world.state.attempt))
    assert state.now_s == world.state.now_s


def test_deciding_needs_no_torch():
    code = "import sys, phalanx.run.decide.decide; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_policies_of_journals_that_were_written_before_are_read():
    written = b'{"advise_only":true,"stop_s":20.0,"together_stop_s":600.0}'
    policy = msgspec.json.decode(written, type=Policy)
    assert (policy.stop_s, policy.cut_off_s) == (20.0, 600.0)
    assert msgspec.json.decode(to_json(policy), type=Policy) == policy
