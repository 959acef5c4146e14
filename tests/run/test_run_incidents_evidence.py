"""Reports of incidents are on disk as the driver decides, whatever the disk and whatever the driver's life is like."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.actions import GO_ON_PAGE, AddToIncident, CloseIncident, OpenIncident, Where
from phalanx.run.incidents import evidence_files
from phalanx.run.incidents.evidence_files import FILE_CHARS, MOST_FILES, Exhibit, Exhibits, ReportKeeper, of_evidence
from phalanx.run.incidents.incident_pages import beside, listed, load, page_of
from phalanx.run.incidents.report import MOST_FACTS, Decided, Incident, Lost, Seen, Took
from phalanx.run.messages import Evidence, RankEvidence, WorkerEnded
from phalanx.run.secrets import Token

T = 1_795_294_398.0

OPEN = OpenIncident(1, 2, "executor of b", "rank 3 on b: killed by SIGKILL (step 57)", Where("b", 3, 57))
CHECK = AddToIncident(1, "passive check of b", "passed", Where("b"))
DECISION = AddToIncident(1, "driver", "b restarts in place", is_decision=True, why="b: first fault")
SECONDS = {"stopping": 0.1, "opening": 0.05, "starting": 0.3, "first step": 0.2}
CLOSE = CloseIncident(1, "attempt 3 makes steps", SECONDS, 7, from_step=57, to_step=50, ranks=4)


def at(seconds: float) -> Now:
    return Now(seconds, T + seconds)


@contextmanager
def keeping(folder: Path, **options: Any) -> Iterator[ReportKeeper]:
    kept = ReportKeeper(folder, "train", **options)
    try:
        yield kept
    finally:
        kept.close(30)


def ended(rank: int = 3, text: str = "last line", attempt: int = 2, **changes: Any) -> WorkerEnded:
    return WorkerEnded(attempt, rank, -9, "signal", "killed by SIGKILL", text, **changes)


def test_what_is_seen_decided_timed_and_lost_stands_in_the_report(tmp_path: Path) -> None:
    news: list[tuple[str, Path]] = []

    def stored(incident: Incident, page: Path) -> None:
        news.append(("closed" if incident.outcome else "opened", page))

    with keeping(tmp_path, stored=stored) as kept:
        for number, action in enumerate((OPEN, CHECK, DECISION, CLOSE)):
            kept.tell(action, at(number / 10))
    incident = load(tmp_path, 1)
    assert [type(fact) for fact in incident.facts[:3]] == [Seen, Seen, Decided]
    seen = incident.facts[0]
    assert isinstance(seen, Seen)
    assert (seen.by, seen.what, seen.host, seen.rank, seen.step) == ("executor of b", "killed by SIGKILL", "b", 3, 57)
    took = {fact.phase: fact.seconds for fact in incident.facts if isinstance(fact, Took)}
    assert took == {"stop": 0.1, "open the store": 0.05, "start": 0.3, "first step": 0.2}
    (lost,) = [fact for fact in incident.facts if isinstance(fact, Lost)]
    assert lost.steps == 7 and lost.seconds == pytest.approx(4 * 0.65)
    assert incident.title == "rank 3 on b: killed by SIGKILL; attempt 3 makes steps"
    assert incident.seconds == pytest.approx(0.3)
    assert news[-1] == ("closed", page_of(tmp_path, 1))
    page = page_of(tmp_path, 1).read_text()
    assert "| +0.20 s | b restarts in place | b: first fault |" in page


def test_a_page_is_there_while_the_incident_is_open(tmp_path: Path) -> None:
    stored = threading.Event()
    with keeping(tmp_path, stored=lambda incident, page: stored.set()) as kept:
        kept.tell(OPEN, at(0))
        assert stored.wait(30)
        assert "It is still open." in page_of(tmp_path, 1).read_text()


def test_a_driver_that_is_started_again_goes_on_with_what_is_stored(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        kept.tell(OPEN, at(0))
    with keeping(tmp_path) as kept:
        kept.tell(AddToIncident(1, "driver", "the driver was restarted in phase stopping"), at(1))
        kept.tell(CLOSE, at(2))
        kept.tell(CLOSE, at(3))  # actions may be performed twice
    incident = load(tmp_path, 1)
    assert incident.facts[0].unix_s == T and incident.seconds == pytest.approx(2)
    assert "the driver was restarted" in page_of(tmp_path, 1).read_text()


def test_a_report_whose_beginning_was_lost_is_kept_all_the_same(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        kept.tell(DECISION, at(0))
        kept.tell(CLOSE, at(1))
    assert load(tmp_path, 1).outcome is not None


def test_last_words_and_stacks_are_kept_beside_the_page_without_secrets(tmp_path: Path) -> None:
    token = Token("a" * 64)
    with keeping(tmp_path, known=[token, "hush-hush"]) as kept:
        kept.heard("b", ended(text=f"\x1b[31mhush-hush {token.reveal()} https://ann:pw@host/\nend"), at(0))
        kept.heard("b", ended(4, by_us=True), at(0))
        kept.tell(OPEN, at(0.1))
        stacks = RankEvidence(3, "File x, line 1 hush-hush", state="T", note="waits in do_signal_stop")
        kept.heard("b", Evidence(2, [stacks, RankEvidence(2, is_silent=True)], ["NVRM: Xid 79"]), at(0.2))
        kept.tell(CLOSE, at(1))
    incident, folder = load(tmp_path, 1), beside(tmp_path, 1)
    assert sorted(incident.evidence) == sorted(path.name for path in folder.iterdir()) == ["b.txt", "rank-3.txt"]
    words, text = (folder / "rank-3.txt").read_text(), (folder / "b.txt").read_text()
    assert "(hidden) (hidden) https://ann:(hidden)@host/\nend" in words and "\x1b" not in words
    assert "rank 3: process state T, waits in do_signal_stop\nFile x, line 1 (hidden)" in text
    assert "rank 2: did not answer" in text and "NVRM: Xid 79" in text
    assert "beside this page: " in page_of(tmp_path, 1).read_text()


def test_evidence_is_bounded_and_that_of_suspects_comes_first() -> None:
    exhibits = Exhibits()
    for number in range(100):
        exhibits.add(1, Exhibit(f"host-{number}.txt", "x"))
    first = exhibits.take([])
    assert len(first) == MOST_FILES // 2
    exhibits.want("host-77")
    names = [one.name for one in first]
    assert [one.name for one in exhibits.take(names)] == ["host-77.txt"]
    assert exhibits.take(names) == []
    exhibits.add(2, Exhibit("host-1.txt", "of a newer attempt"))
    exhibits.add(1, Exhibit("host-2.txt", "too late"))
    assert [one.text for one in exhibits.take([])] == ["of a newer attempt"]
    huge = of_evidence("../h", Evidence(1, [RankEvidence(0, "y" * (1 << 20))] * 20), str)
    assert len(huge.text) <= FILE_CHARS + 1 and "/" not in huge.name and not huge.name.startswith(".")


def test_what_comes_late_of_an_attempt_that_is_reported_is_no_evidence_in_the_next_report(tmp_path: Path) -> None:
    with keeping(tmp_path) as incidents:
        incidents.tell(OpenIncident(1, 4, "executor of b", "rank 3 is dead"), at(0))
        incidents.heard("b", ended(attempt=4), at(1))
        incidents.tell(CloseIncident(1, "attempt 5 makes steps", {}), at(2))
        incidents.heard("c", ended(rank=5, attempt=4), at(3))
        incidents.tell(OpenIncident(2, 5, "back end", "host d is gone"), at(4))
        incidents.heard("d", ended(rank=7, attempt=5), at(5))
    assert (load(tmp_path, 1).evidence, load(tmp_path, 2).evidence) == (["rank-3.txt"], ["rank-7.txt"])


def test_after_a_false_alarm_the_same_attempt_goes_on(tmp_path: Path) -> None:
    with keeping(tmp_path) as incidents:
        incidents.tell(OpenIncident(1, 4, "step limit", "nothing moves"), at(0))
        incidents.tell(CloseIncident(1, "steps advance again", {}, result="false alarm"), at(2))
        incidents.heard("b", ended(attempt=4), at(3))
        incidents.tell(OpenIncident(2, 4, "executor of b", "rank 3 is dead"), at(4))
    assert load(tmp_path, 2).evidence == ["rank-3.txt"]


def test_a_report_of_very_many_hosts_stays_small(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        kept.tell(OPEN, at(0))
        for number in range(3 * MOST_FACTS):
            kept.tell(AddToIncident(1, "back end", f"host-{number} is gone", Where(f"host-{number}")), at(1))
        for number in range(3 * MOST_FACTS):
            kept.tell(AddToIncident(1, "driver", f"decision {number}", is_decision=True), at(1))
        kept.tell(CLOSE, at(2))
    incident = load(tmp_path, 1)
    seen = [fact for fact in incident.facts if isinstance(fact, Seen)]
    decided = [fact.what for fact in incident.facts if isinstance(fact, Decided)]
    assert len(seen) + len(decided) == MOST_FACTS
    assert decided[0] == "decision 0" and len(decided) == 50  # what was decided after all that was seen
    assert incident.outcome is not None


def test_a_full_disk_delays_a_report_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_files, "RETRY_S", 0.02)
    is_full, was_stored, failures = threading.Event(), threading.Event(), threading.Event()
    is_full.set()
    store = evidence_files.store

    def full(folder: Path, incident: Incident) -> Path:
        if is_full.is_set():
            failures.set()
            raise OSError(28, "No space left on device")
        return store(folder, incident)

    monkeypatch.setattr(evidence_files, "store", full)
    with keeping(tmp_path, stored=lambda incident, page: was_stored.set()) as kept:
        kept.tell(OPEN, at(0))
        assert failures.wait(30)
        is_full.clear()
        assert was_stored.wait(30)
    assert load(tmp_path, 1).facts and kept.problem == ""


def test_hosts_that_left_are_lost_and_are_to_be_looked_at(tmp_path: Path) -> None:
    close = CloseIncident(1, "attempt 3 makes steps", {}, hosts={"b": "at fault again", "c": "drained by ann"}, ranks=4)
    with keeping(tmp_path) as kept:
        kept.tell(OPEN, at(0))
        kept.tell(close, at(2))
    incident = load(tmp_path, 1)
    assert incident.outcome is not None and "without b, c" in incident.title
    assert incident.outcome.to_do[:-1] == ["have b looked at before other jobs use it: at fault again"]
    assert {fact.what for fact in incident.facts if isinstance(fact, Lost) and fact.what[1] == ":"} == {
        "b: at fault again",
        "c: drained by ann",
    }


def test_the_page_of_a_hang_blames_nobody_and_advises_the_setting(tmp_path: Path) -> None:
    why = "nothing has moved for 60.1 s, limit 60.0 s; a usual step takes 0.1 s; if such a pause is healthy, set …"
    held_up = "held up by rank 1 on b: in read (data.py:3), all others in a collective; that proves no fault of a host"
    with keeping(tmp_path) as kept:
        kept.tell(OpenIncident(1, 1, "step limit", why), at(0))
        kept.tell(AddToIncident(1, "stacks", "rank 1: waits for a pipe, in read (data.py:3)"), at(1))
        kept.tell(AddToIncident(1, "judge of the evidence", held_up, Where("b", 1)), at(1))
        kept.tell(CloseIncident(1, "all restart", {}, to_do=("allow for it: --set run.limits.floor_s=120",)), at(2))
    title = "nothing has moved for 60.1 s, limit 60.0 s, held up by rank 1 on b; all restart"
    assert load(tmp_path, 1).title == title
    page = page_of(tmp_path, 1).read_text()
    assert "waits for a pipe" in page and "allow for it: --set run.limits.floor_s=120" in page


def test_lost_steps_that_nobody_knows_are_not_said_to_be_none_and_a_person_is_told_to_look(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        for number, result in ((1, "recovered"), (2, "false alarm"), (3, "gave up")):
            kept.tell(OpenIncident(number, 1, "step limit", "nothing has moved"), at(0))
            kept.tell(CloseIncident(number, "all restart", SECONDS, result=result, ranks=4), at(2))
    assert [one.lost_steps for one in listed(tmp_path)] == [None, 0, None]
    outcome = load(tmp_path, 1).outcome
    assert outcome is not None and any(GO_ON_PAGE in text for text in outcome.to_do)


def test_who_only_noticed_is_neither_the_title_nor_whose_log_is_to_be_read(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        kept.tell(OpenIncident(1, 1, "executor of a", "rank 0 on a: Connection closed by peer", Where("a", 0)), at(0))
        kept.tell(AddToIncident(1, "log rules", "a: rank 0 says: closed (gloo)", Where("a", 0)), at(0))
        killed = "rank 1 on a: killed by SIGKILL"
        kept.tell(AddToIncident(1, "executor of a", killed, Where("a", 1), is_own=True), at(1))
        kept.tell(CloseIncident(1, "over", {}, result="gave up", status=4), at(2))
    incident = load(tmp_path, 1)
    assert incident.title.startswith("rank 1 on a: killed by SIGKILL; ") and incident.outcome is not None
    assert incident.outcome.to_do[1:] == ["read the log of rank 1: phalanx run logs 1"]


def test_the_advice_of_the_driver_to_read_a_log_is_not_given_twice(tmp_path: Path) -> None:
    read = "read the log of rank 3 (KeyError: 'x'): phalanx run logs 3"
    with keeping(tmp_path) as kept:
        kept.tell(OPEN, at(0))
        kept.tell(CloseIncident(1, "over", {}, result="gave up", status=4, to_do=(read,)), at(2))
    outcome = load(tmp_path, 1).outcome
    assert outcome is not None and outcome.to_do[1:] == [read]


def test_a_job_that_its_own_code_has_ended_says_what_to_mend_and_with_what_words(tmp_path: Path) -> None:
    with keeping(tmp_path) as kept:
        kept.heard("a", ended(0, "Connection closed by peer", follows=True), at(0))
        kept.heard("b", ended(3, "Traceback:\nKeyError: 'x'"), at(0))
        kept.heard("b", msgspec.structs.replace(ended(2, "Traceback:\nKeyError: 'y'"), summary="KeyError: 'y'"), at(0))
        kept.heard("b", ended(4, "Traceback:\nKeyError: 'x'"), at(0))
        kept.tell(OPEN, at(0))
        kept.tell(CloseIncident(1, "over", {}, result="gave up", status=1), at(1))
        words = kept.last_lines(actions.Finish(1, "user code"))
        assert words == (3, "rank 3 has ended with this:\nTraceback:\nKeyError: 'x'")
        assert kept.last_lines(actions.Finish(0, "done")) is None
    outcome = load(tmp_path, 1).outcome
    assert outcome is not None and outcome.result == "gave up"
    assert outcome.to_do[0].startswith("mend the script") and "phalanx run logs 3" in outcome.to_do[1]
