"""Reports come right from the journal, wherever a driver died between writing down and telling."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from decide_helpers import World, attempt_runs, running
from driver_helpers import Town
from driver_helpers import running as town_runs

from phalanx.run.clock import Now
from phalanx.run.decide.actions import Action, AddToIncident, CloseIncident, OpenIncident
from phalanx.run.decide.policy import Job
from phalanx.run.driver.write_ahead import Book
from phalanx.run.incidents.evidence_files import ReportKeeper, completed, earlier_decisions
from phalanx.run.incidents.incident_pages import load, page_of, store
from phalanx.run.incidents.report import Incident, Seen
from phalanx.run.journal import Entry, Journal, open_journal
from phalanx.run.messages import WorkerEnded
from phalanx.run.reports.recent_events import Hub
from phalanx.run.reports.webhook import Audience

JOB = Job("train", hosts=2, workers_per_host=2)
SECRET = "correct-horse"

Said = list[tuple[Action, float]]


@contextmanager
def keeping(folder: Path, known: Sequence[str] = ()) -> Iterator[ReportKeeper]:
    kept = ReportKeeper(folder, "train", known)
    try:
        yield kept
    finally:
        kept.close(30)


def tell_all(folder: Path, said: Said, known: Sequence[str] = ()) -> None:
    with keeping(folder, known) as kept:
        for action, unix_s in said:
            kept.tell(action, Now(0.0, unix_s))


def recall_all(folder: Path, journal: Journal, known: Sequence[str] = ()) -> None:
    with keeping(folder, known) as kept:
        kept.recall(list(earlier_decisions(journal.read(), journal.epoch)))


def two_recoveries(path: str) -> Said:
    """A job with an incident that is over and one that is open, in a journal; what people should have been told."""
    world = World(JOB)
    world.run_until(running)
    world.kill(3)
    world.run_until(attempt_runs(2))
    world.throw([0], f"ValueError: {SECRET}")
    world.run_until(lambda world: world.state.phase == "opening" and world.state.attempt == 3)
    said: Said = []
    with open_journal(path) as journal:
        book = Book(journal, JOB, world.policy, 0.0)
        for event in world.journal:
            said += [(action, event.at_s) for action in book.apply(event)]
    return [one for one in said if isinstance(one[0], OpenIncident | AddToIncident | CloseIncident)]


def test_reports_are_complete_wherever_the_driver_died(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    said = two_recoveries(path)
    tell_all(tmp_path / "whole", said, [SECRET])
    whole = [load(tmp_path / "whole", number) for number in (1, 2)]
    assert whole[0].outcome is not None and whole[1].outcome is None and len(said) >= 8
    with open_journal(path) as journal:
        for performed in range(len(said) + 1):
            folder = tmp_path / f"died-{performed}"
            tell_all(folder, said[:performed], [SECRET])
            recall_all(folder, journal, [SECRET])
            assert [load(folder, number) for number in (1, 2)] == whole, f"died after {performed}"
            assert SECRET not in page_of(folder, 2).read_text()


def test_what_was_stored_is_neither_written_again_nor_shown_with_its_secrets(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    said = two_recoveries(path)
    tell_all(tmp_path, said[:-1], [SECRET])  # the last driver knew of the secret, this one does not
    first = page_of(tmp_path, 1).stat().st_mtime_ns
    with open_journal(path) as journal:
        recall_all(tmp_path, journal)
        assert page_of(tmp_path, 1).stat().st_mtime_ns == first
        assert SECRET not in page_of(tmp_path, 2).read_text()
        assert len(load(tmp_path, 2).facts) == len([one for one, _ in said if getattr(one, "number", 0) == 2])


def test_a_gap_in_the_midst_is_filled(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    said = two_recoveries(path)
    tell_all(tmp_path / "whole", said)
    tell_all(tmp_path / "gap", [*said[:2], *said[4:]])
    with open_journal(path) as journal:
        recall_all(tmp_path / "gap", journal)
    assert load(tmp_path / "gap", 1) == load(tmp_path / "whole", 1)


def test_evidence_that_no_page_names_yet_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    said = two_recoveries(path)
    with keeping(tmp_path) as kept:
        kept.heard("b", WorkerEnded(1, 3, -9, "signal", "killed by SIGKILL", "last line"), Now(0, 0))
        kept.tell(said[0][0], Now(0, said[0][1]))
    assert load(tmp_path, 1).evidence == ["rank-3.txt"]
    page_of(tmp_path, 1).unlink()
    page_of(tmp_path, 1).with_suffix(".json").unlink()
    with open_journal(path) as journal:
        recall_all(tmp_path, journal)
    assert load(tmp_path, 1).evidence == ["rank-3.txt"] and "rank-3.txt" in page_of(tmp_path, 1).read_text()


def test_the_next_driver_completes_reports_and_goes_on_with_them(tmp_path: Path) -> None:
    """The shell's way: the last driver has written down that the incident is over, and died before it said so."""
    town = Town(tmp_path, "ab", JOB)
    town.begin()
    town.until(town_runs(1))
    town.hosts["b"].ranks = [3]
    town.say("b", WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL"))
    town.until(town_runs(2))
    incident_actions = [one for one in town.told if isinstance(one, OpenIncident | AddToIncident | CloseIncident)]
    assert isinstance(incident_actions[-1], CloseIncident)
    tell_all(tmp_path, [(one, 1.0) for one in incident_actions[:1]])
    town.restart()
    audience = Audience(Hub(), tmp_path, "train")
    audience.recall(town.journal.read(), town.journal.epoch)
    audience._keeper.close(30)
    town.journal.close()
    incident = load(tmp_path, 1)
    assert incident.outcome is not None and incident.outcome.result == "recovered"
    assert len([fact for fact in incident.facts if isinstance(fact, Seen)]) >= 1


def test_what_this_driver_decides_is_not_recalled_but_told(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    two_recoveries(path)
    with open_journal(path) as journal:
        book = Book(journal, JOB, World(JOB).policy, 100.0)
        recalled = [action for action, _ in earlier_decisions(journal.read(), journal.epoch)]
    restarted = [one for one in book.first_actions if isinstance(one, AddToIncident)]
    assert restarted and not set(map(repr, restarted)) & set(map(repr, recalled))


def test_what_is_not_understood_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good = '{"action":"open-incident","number":1,"attempt":1,"seen_by":"x","text":"y"}'
    texts = ['{"action":"new-incident","number":1}', '{"action":"alert","level":"info","text":"an-incident"}', good]
    entries = [Entry("action", 1, text, 5.0, number, 1) for number, text in enumerate(texts, 1)]
    entries.append(Entry("event", 1, good, 5.0, 4, 1))
    with caplog.at_level(logging.WARNING):
        assert list(earlier_decisions(entries, 2)) == [(OpenIncident(1, 1, "x", "y"), 5.0)]
    assert "entry 1 of the journal is not understood" in caplog.text


def test_more_than_the_journal_knows_is_left_alone() -> None:
    facts = [Seen(unix_s=1.0, by="a", what="b"), Seen(unix_s=2.0, by="c", what="d")]
    stored = Incident(number=1, job="j", attempt=1, facts=list(facts))
    assert completed(stored, Incident(number=1, job="j", attempt=1, facts=[facts[1]])) is None


def test_an_action_that_is_performed_twice_is_told_once(tmp_path: Path) -> None:
    opened = OpenIncident(1, 1, "x", "y")
    said: Said = [(opened, 1.0), (AddToIncident(1, "z", "w"), 2.0)]
    tell_all(tmp_path, [*said, *said])
    assert len(load(tmp_path, 1).facts) == 2


def test_webhooks_hear_of_what_was_never_stored(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    said = two_recoveries(path)
    news: list[tuple[int, bool]] = []
    store(tmp_path, Incident(number=2, job="train", attempt=2, facts=[]))
    kept = ReportKeeper(
        tmp_path, "train", (), lambda incident, page: news.append((incident.number, bool(incident.outcome)))
    )
    with open_journal(path) as journal, closing(kept):
        kept.recall(list(earlier_decisions(journal.read(), journal.epoch)))
        kept.tell(CloseIncident(2, "over", {}), Now(0, said[-1][1] + 1))
    assert news == [(1, True), (2, True)]
