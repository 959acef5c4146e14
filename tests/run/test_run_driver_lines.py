"""How many lines of ranks people are shown."""

from __future__ import annotations

from pathlib import Path

from driver_helpers import Town, running

from phalanx.run.clock import Now
from phalanx.run.decide.policy import Job
from phalanx.run.driver.judgements import LINES_PER_S, LineBudget
from phalanx.run.messages import HostState, LogLine, heartbeat

HOST = HostState(0.0, 0, 0, 0)


def at(seconds: float) -> Now:
    return Now(1000.0 + seconds, 5000.0 + seconds)


def passed(budget: LineBudget, hosts: int, seconds: int, each: int = 4) -> dict[int, int]:
    """Lines that pass, by second, where hosts that are no first ones write so many a second, spread over it."""
    counts = dict.fromkeys(range(seconds), 0)
    for second in counts:
        for host in range(hosts):
            counts[second] += each * budget.take(each, 8 * (host + 1), at(second + host / hosts))
    return counts


def test_a_small_job_is_shown_whole() -> None:
    assert passed(LineBudget(64), hosts=64, seconds=5, each=3200) == dict.fromkeys(range(5), 64 * 3200)


def test_of_a_large_one_people_see_so_much_a_second() -> None:
    counts = passed(LineBudget(5000), hosts=5000, seconds=10)
    assert all(0.9 * LINES_PER_S <= count <= 1.1 * LINES_PER_S for second, count in counts.items() if second)


def test_it_is_spread_over_the_second() -> None:
    budget = LineBudget(5000)
    passed(budget, hosts=5000, seconds=3)
    shown = [host for host in range(5000) if budget.take(4, 8 * (host + 1), at(3 + host / 5000))]
    quarters = [sum(quarter * 1250 <= host < (quarter + 1) * 1250 for host in shown) for quarter in range(4)]
    assert max(quarters) <= 1.2 * min(quarters)


def test_the_first_rank_always_passes() -> None:
    budget = LineBudget(5000, per_s=1)
    assert all(budget.take(32, 0, at(0)) for _ in range(100))
    assert not budget.take(1, 8, at(0))


def test_what_does_not_pass_is_counted_and_said_once() -> None:
    budget = LineBudget(5000, per_s=4)
    assert [budget.take(4, 8, at(0)), budget.take(3, 16, at(0)), budget.take(1, 24, at(0))] == [True, False, False]
    assert budget.take(4, 0, at(0.1)) and budget.left_out(0) == []  # it is no business of the first rank's
    assert budget.take(1, 8, at(60))
    assert (
        budget.left_out(8) == [LogLine(8, "… 4 more lines are in the log of their ranks")] and budget.left_out(8) == []
    )


def test_lines_reach_people_and_silence_costs_nothing(tmp_path: Path) -> None:
    town = Town(tmp_path, ["a", "b"], Job("j", hosts=2, workers_per_host=1))
    town.begin()
    town.until(running(1))
    town.say("b", heartbeat(1, 0.0, 1, [], HOST, [LogLine(1, "loss 2.5")]))
    town.say("b", heartbeat(2, 0.0, 1, [], HOST, []))
    assert town.lines == [LogLine(1, "loss 2.5")]
    town.journal.close()
