"""What one call of `decide` costs with 1,600 hosts, in CPU time; it is shown, and no limit is asserted."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import pytest
from decide_helpers import World, attempt_runs, running

from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide, to_json
from phalanx.run.decide.policy import Job

HOSTS, WORKERS = 1600, 8


def story() -> World:
    """1,600 hosts begin, 500 ranks die at once, then a host hangs and one is lost."""
    world = World(Job("j", HOSTS, WORKERS, 16))
    world.run_until(running)
    for rank in range(0, 4000, 8):
        world.deliver(ev.WorkerFailed(world.now_s, 1, rank, "signal", "process", "killed by SIGKILL"))
    world.run_until(attempt_runs(2))
    world.run_for(5)
    world.lose_host("node0007")
    world.run_until(attempt_runs(3))
    world.run_for(5)
    return world


def measure(world: World) -> dict[str, list[float]]:
    """CPU seconds of every call, by kind of event, when the story's journal is applied again."""
    from phalanx.run.decide.state import initial

    state, spent = initial(world.policy, world.job), defaultdict(list)
    for event in world.journal:
        begin = time.thread_time()
        state, _ = decide(state, event)
        spent[type(event).__name__].append(time.thread_time() - begin)
    assert state == world.state
    return spent


@pytest.mark.campaign
def test_the_cost_of_a_call_is_shown_for_1600_hosts(capsys):
    world = story()
    spent = measure(world)
    assert world.state.attempt == 3 and len(world.taken("OpenIncident")) == 2
    every = sorted(seconds for times in spent.values() for seconds in times)
    with capsys.disabled():
        print(f"\n{len(every)} calls: median {_us(statistics.median(every))}, p99 {_us(every[int(0.99 * len(every))])}")
        print(f"state as JSON: {len(to_json(world.state))} bytes")
        for kind, times in sorted(spent.items(), key=lambda item: -max(item[1])):
            print(f"  {kind:16} {len(times):6} calls, median {_us(statistics.median(times))}, most {_us(max(times))}")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
