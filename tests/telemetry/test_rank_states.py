"""Where ranks stand: who died, who is behind, who stopped first, and when nobody is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from trace_runs import four_ranks, span, write_run

from phalanx.telemetry.queries import Trace
from phalanx.telemetry.rank_deaths import DIED
from phalanx.telemetry.rank_states import newest_step, rank_states
from phalanx.telemetry.span_writer import HostWriter, note_incident

BASE_NS = 1000 * 10**9
LATER_NS = BASE_NS + 60 * 10**9
END_NS = BASE_NS + 1200 * 10**6


def _stuck(folder: Path, *, least: tuple[int, ...] = (2,)) -> Trace:
    """Step 6 began on all ranks; those in `least` have only their batch, the others did a forward pass."""
    rows = four_ranks()
    for rank in range(4):
        rows.append(span(rank, 6, "data", 1200.0, 1205.0))
        if rank not in least:
            rows.append(span(rank, 6, "forward", 1205.0, 1225.0, name="chunk 0"))
    return write_run(folder, rows)


def test_all_is_well_while_steps_come(tmp_path: Path) -> None:
    trace = write_run(tmp_path, four_ranks())
    state = rank_states(trace, END_NS, is_running=True)
    assert [(one.rank, one.host, one.standing, one.done_step) for one in state.ranks] == [
        (rank, f"host{rank // 2}", "moves", 5) for rank in range(4)
    ]
    assert state.verdict == "" and not state.wrong and state.step_s == 0.19 and newest_step(trace) == 5


def test_a_long_step_is_not_quiet_yet(tmp_path: Path) -> None:
    trace = write_run(
        tmp_path, [span(rank, step, "step", step * 2e4, step * 2e4 + 1.9e4) for rank in (0, 1) for step in (1, 2)]
    )
    assert rank_states(trace, BASE_NS + 100 * 10**9, is_running=True).verdict == ""
    assert "nothing moved for" in rank_states(trace, BASE_NS + 120 * 10**9, is_running=True).verdict


def test_who_did_the_least_in_the_step_that_nobody_finished_stopped_first(tmp_path: Path) -> None:
    state = rank_states(_stuck(tmp_path), LATER_NS, is_running=True)
    assert state.verdict == (
        "stopped first: rank 2 (host1); did the least in step 6; the last it did: data; nothing moved for 59 s"
    )
    assert [one.standing for one in state.ranks] == ["waits", "waits", "stopped first", "waits"]
    assert state.ranks[0].last == "forward chunk 0" and [one.rank for one in state.wrong] == [2]


def test_a_run_that_has_ended_says_who_stopped_first_but_not_that_it_is_quiet(tmp_path: Path) -> None:
    state = rank_states(_stuck(tmp_path), LATER_NS, is_running=False)
    assert state.verdict == "stopped first: rank 2 (host1); did the least in step 6; the last it did: data"
    assert state.quiet_s == 0 and state.ranks[0].standing == "ended"


def test_nobody_is_named_where_many_did_the_least(tmp_path: Path) -> None:
    state = rank_states(_stuck(tmp_path, least=(1, 2)), LATER_NS, is_running=True)
    assert not state.wrong and "so none is named" in state.verdict


def test_a_rank_that_others_left_behind(tmp_path: Path) -> None:
    rows = [row for row in four_ranks() if row["rank"] != 3 or row["step"] < 2]
    state = rank_states(write_run(tmp_path, rows), END_NS + 2 * 10**9, is_running=True)
    assert [(one.rank, one.why) for one in state.wrong] == [(3, "stands at step 1, others at 5")]


def test_a_death_outdoes_other_evidence_and_counts_in_its_attempt_only(tmp_path: Path) -> None:
    trace = _stuck(tmp_path)
    note_incident(trace.folder, DIED, END_NS, rank=1, host="host0", attempt=7)
    assert [one.rank for one in rank_states(trace, LATER_NS, is_running=True).wrong] == [2]
    note_incident(trace.folder, DIED, LATER_NS - 10 * 10**9, rank=1, host="host0", attempt=0)
    state = rank_states(trace, LATER_NS, is_running=True)
    assert state.verdict.startswith("dead: rank 1 (host0); its process ended in step 6")


_DIES = """
import os, sys
from pathlib import Path
from phalanx.telemetry.spans import Recorder
recorder = Recorder.open(Path(sys.argv[1]), rank=3, attempt=2)
recorder.record(recorder.type("step"), 1, 2, step=9)
if sys.argv[2] == "closes":
    recorder.close()
os._exit(1)
"""


def test_the_writer_of_a_host_notes_a_process_that_ended_unasked(tmp_path: Path) -> None:
    for number, how in enumerate(("closes", "dies")):
        ring = tmp_path / str(number) / "3.ring"
        subprocess.run([sys.executable, "-c", _DIES, str(ring), how], check=False)
        before_ns = time.time_ns()
        writer = HostWriter(ring.parent, tmp_path / f"{how}/telemetry", "h")
        writer.tick()
        writer.tick()  # said once, though looked at twice
        writer.close_part()
        found = Trace.open(tmp_path / how).incidents().to_pylist()
        if how == "closes":
            assert found == []
        else:
            assert [one["kind"] for one in found] == [DIED] and found[0]["at_ns"] >= before_ns
            assert '"rank": 3, "host": "h", "attempt": 2' in found[0]["details"]


def test_a_process_that_nobody_has_waited_for_yet_is_gone(tmp_path: Path) -> None:
    ring = tmp_path / "rings" / "3.ring"
    with subprocess.Popen([sys.executable, "-c", _DIES, str(ring), "dies"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        writer = HostWriter(ring.parent, tmp_path / "telemetry", "h")
        writer.tick()
        writer.tick()
        assert writer.is_idle and [one["kind"] for one in Trace.open(tmp_path).incidents().to_pylist()] == [DIED]


def test_a_rank_that_died_long_ago_is_not_forgotten(tmp_path: Path) -> None:
    rows = [row for row in four_ranks(steps=40) if row["rank"] != 3]
    trace = write_run(tmp_path, rows)
    note_incident(trace.folder, DIED, BASE_NS, rank=3, host="host1", attempt=0)
    state = rank_states(trace, BASE_NS + 8000 * 10**6, is_running=True)
    assert [(one.rank, one.host, one.why) for one in state.wrong] == [(3, "host1", "its process ended")]


def test_a_run_that_goes_on_from_a_checkpoint_is_judged_by_its_newest_attempt(tmp_path: Path) -> None:
    """It does steps again that the attempt in which a rank died had done, and is well."""
    again = [{**row, "attempt": 1} for row in four_ranks() if row["step"] <= 3]
    long_before = [span(rank, 40, "step", -5000.0, -4800.0) for rank in range(4)]
    trace = write_run(tmp_path, [*long_before, *again])
    note_incident(trace.folder, DIED, BASE_NS, rank=1, host="host0", attempt=0)
    assert newest_step(trace) == 3
    state = rank_states(trace, max(row["end_ns"] for row in again) + 10**6, is_running=True)
    assert state.verdict == "" and {one.standing for one in state.ranks} == {"moves"}


def test_a_rank_whose_process_is_stopped_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    state = rank_states(write_run(tmp_path, four_ranks()), LATER_NS, is_running=True, paused={1})
    assert state.verdict.startswith("stopped first: rank 1 (host0); a signal or a debugger has stopped its process")
    assert [one.standing for one in state.ranks] == ["waits", "stopped first", "waits", "waits"]


def test_a_run_that_is_being_started_again_is_neither_dead_nor_still(tmp_path: Path) -> None:
    trace = _stuck(tmp_path)
    note_incident(trace.folder, DIED, LATER_NS - 10 * 10**9, rank=1, host="host0", attempt=0)
    began_ns = LATER_NS - 5 * 10**9
    state = rank_states(trace, LATER_NS, is_running=True, began_ns=began_ns)
    assert (state.verdict, state.wrong, state.quiet_s) == ("", [], 0.0)
    assert {one.standing for one in state.ranks} == {"waits"}
    assert rank_states(trace, LATER_NS, is_running=True, began_ns=1).verdict.startswith("dead: rank 1")


def test_hosts_whose_spans_are_written_later_are_not_behind(tmp_path: Path) -> None:
    """Writers look once a second, each at its own moment: with short steps that is many of them."""
    rows = [row for row in four_ranks() if row["rank"] < 2 or row["step"] < 2]
    trace = write_run(tmp_path, rows)
    assert rank_states(trace, END_NS, is_running=True).wrong == []
    late = rank_states(trace, LATER_NS, is_running=True).wrong
    assert [(one.rank, one.standing) for one in late] == [(2, "behind"), (3, "behind")]
