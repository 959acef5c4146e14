"""The clock of a job: no jump of the wall clock makes anything late, and drivers of one boot share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.run import clock
from phalanx.run.clock import MOST_BRIDGED_S, JobClock, job_clock
from phalanx.run.decide import actions
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import next_deadline
from phalanx.run.driver.job_status import Known, overview
from phalanx.run.driver.write_ahead import Book, clock_of
from phalanx.run.journal import Journal, open_journal

T = 1_800_000_000.0
HOUR_S = 3600.0


class Machine:
    """One whose wall clock is `wall_s`, and that has been up for `up_s` since boot `boot`."""

    def __init__(self) -> None:
        self.wall_s, self.up_s, self.boot = T, 500.0, "first"

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds

    def restart(self, away_s: float) -> None:
        self.boot, self.up_s = self.boot + " again", 10.0
        self.wall_s += away_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock, "unix_s", lambda: machine.wall_s)
    monkeypatch.setattr(clock, "boot_id", lambda: machine.boot)
    monkeypatch.setattr(clock, "_since_boot_s", lambda: machine.up_s)
    return machine


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return open_journal(str(tmp_path / "journal"), job="j")


def driver(journal: Journal) -> tuple[Book, JobClock]:
    """What a driver that starts now has."""
    found = clock_of(journal.read())
    return Book(journal, Job("j", 2), Policy(give_up_s=2 * HOUR_S), found.read().unix_s, found), found


def test_a_job_begins_by_the_wall_clock_and_goes_on_by_the_one_since_boot(machine: Machine) -> None:
    found = job_clock(None, None)
    assert found.read().unix_s == T
    machine.sleep(5)
    machine.wall_s += 2 * HOUR_S
    assert found.read().unix_s == T + 5


@pytest.mark.parametrize("jump_s", [2 * HOUR_S, -2 * HOUR_S, -T])
def test_a_jump_of_the_wall_clock_while_hosts_are_waited_for_ends_no_job(
    machine: Machine, journal: Journal, jump_s: float
) -> None:
    book, found = driver(journal)
    machine.sleep(60)
    machine.wall_s += jump_s
    due_s = next_deadline(book.state)
    assert due_s is not None and due_s > found.read().unix_s
    # The next driver, which was started after the jump, goes on with the same time.
    book, found = driver(journal)
    assert not any(isinstance(action, actions.Finish) for action in book.first_actions)
    assert overview(Known(book.state), found.read()).age_s == 60
    assert sum('"clock"' in entry.json_text for entry in journal.read()) == 1


@pytest.mark.parametrize(("away_s", "counted_s"), [(300, 300), (-2 * HOUR_S, 0), (10 * 365 * 86_400, MOST_BRIDGED_S)])
def test_over_another_boot_the_wall_clock_leads_but_never_back_and_not_for_ever(
    machine: Machine, journal: Journal, away_s: float, counted_s: float
) -> None:
    driver(journal)
    machine.restart(away_s)
    for _ in range(2):
        book, found = driver(journal)
        assert not any(isinstance(action, actions.Finish) for action in book.first_actions)
        assert overview(Known(book.state), found.read()).age_s == pytest.approx(counted_s)


def test_it_never_goes_behind_what_the_journal_says(machine: Machine) -> None:
    for before in (JobClock("first", 0.0), JobClock("", T), None):
        machine.boot = "" if before is not None and not before.boot else "first"
        assert job_clock(before, T + 50).read().unix_s >= T + 50
