"""What the fault campaign reads out of a journal."""

from __future__ import annotations

import pytest
from decide_helpers import World, running

from phalanx.faults.referee import Fact
from phalanx.run.campaign.journal_facts import JournalFacts
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import to_json
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.write_ahead import Header
from phalanx.run.journal import Entry


def told(world: World, events: list[ev.Event]) -> list[Fact]:
    """Facts of a journal that holds what the world has lived through, and these events after it."""
    story = JournalFacts(ahead_s=0.0, machines=len(world.hosts))
    texts = [("note", to_json(Header(world.job, world.policy)))]
    texts += [("event", to_json(event)) for event in [*world.journal, *events]]
    story.take(Entry(kind, 1, text.decode(), 0.0, number) for number, (kind, text) in enumerate(texts, 1))
    return story.facts


@pytest.mark.parametrize("place", range(4), ids=["gone first", "second", "third", "gone last"])
def test_a_host_that_is_lost_is_replaced_whenever_that_is_heard(place: int) -> None:
    """Its peers' ranks tell first, and their hosts have stopped before the back end says what has become of it."""
    world = World(Job("j", hosts=4, spares=1, workers_per_host=2), Policy())
    world.run_until(running)
    now_s, attempt, placement = world.now_s, world.state.attempt, world.state.placement
    words = "RuntimeError: connection closed by peer"
    failed = ev.WorkerFailed(now_s + 1, attempt, 1, "raised", "user", words, follows=True, step=4)
    stopped: list[ev.Event] = [ev.Stopped(now_s + 3, attempt, host) for host in placement[:3]]
    gone = ev.HostGone(now_s + 3, placement[3], "its executor has ended")
    facts = told(world, [failed, ev.Tick(now_s + 2), *stopped[:place], gone, *stopped[place:]])
    number = 3  # of the fourth host
    acted = [(fact.action, fact.hosts) for fact in facts if fact.what == "acted"]
    blamed = [(fact.ranks, fact.hosts) for fact in facts if fact.what == "blamed"]
    assert acted == [("evict", [number])] and blamed == [([], [number])]
    assert [fact.what for fact in facts].count("detected") == 1
