"""What people are told lately, in order."""

from __future__ import annotations

from phalanx.run.clock import Now
from phalanx.run.messages import LogLine
from phalanx.run.reports.recent_events import Hub, Told, Wrote

NOW = Now(1.0, 5.0)


def texts(hub: Hub, number: int = 0) -> list[str]:
    return [item.text for item in hub.since(number)]


def test_lines_and_what_is_told_come_in_order() -> None:
    hub = Hub()
    hub.wrote([LogLine(0, "one"), LogLine(1, "two")], NOW)
    hub.say("info", "three", 5.0)
    hub.wrote([LogLine(0, "four")], NOW)
    assert texts(hub) == ["one", "two", "three", "four"] and texts(hub, 2) == ["three", "four"] and texts(hub, 4) == []
    assert [item.number for item in hub.since(0)] == [1, 2, 3, 4] and hub.last == 4


def test_many_lines_do_not_drive_out_what_is_told() -> None:
    hub = Hub(most=10, most_bytes=10 * 208)
    hub.say("error", "a host is gone", 5.0)
    for number in range(1000):
        hub.wrote([LogLine(0, f"step {number:03}")], NOW)
    kept = hub.since(0)
    assert isinstance(kept[0], Told) and kept[0].text == "a host is gone"
    assert [item.text for item in kept if isinstance(item, Wrote)] == [f"step {n:03}" for n in range(990, 1000)]
    assert len(hub.since(hub.last - 3)) == 3
