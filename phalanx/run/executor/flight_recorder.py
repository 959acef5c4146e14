"""Evidence of ranks that hang: NCCL's flight recorder, stacks and processes, gathered before anything is killed.

Everything that may block is asked in a thread of its own, which is not waited for longer than the limit. A rank that
does not answer is silent, and that is evidence too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.host import PROC
from phalanx.detect.hangs.flight_records import condense
from phalanx.detect.hangs.stack_dumps import Stacks, py_spy_program, stacks_of
from phalanx.ipc.processes import StartChild, read_process
from phalanx.run.executor.system_calls import waits_in
from phalanx.run.messages import Accelerator, Evidence, RankEvidence
from phalanx.telemetry.flight_dump import FlightRecordError, read_dump

_JSON_BYTES = 64 << 10  # of one rank: those of a host have to fit into a frame
_DUMP_POLL_S = 0.05

_FILE_VARIABLE, _PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_NEWER_FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"  # goes before the other where torch knows it


def as_json(record: dict[str, Any], max_bytes: int = _JSON_BYTES) -> str:
    """What matters of a record, as JSON text of at most `max_bytes`: `phalanx.detect.hangs.flight_records.condense`.

    Raises:
        FlightRecordError: its fields have other types than those of a flight record.
    """
    most = len(record["entries"])
    try:
        while True:
            slim = condense(record, most)
            text = json.dumps(slim, separators=(",", ":"))
            if len(text) <= max_bytes:
                return text
            if not most:
                return json.dumps({"entries": [], "left_out": len(record["entries"])})
            most = min(most // 2, int(most * max_bytes / len(text)))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise FlightRecordError(f"it is none of a flight recorder: {type(error).__name__}: {error}") from error


def shortened(text: str, max_bytes: int) -> str:
    """What `as_json` has returned, with no more than so many bytes."""
    return text if len(text) <= max_bytes else as_json(json.loads(text), max_bytes)


@dataclass(frozen=True)
class FlightSource:
    """Where a rank's dumps are; see `recorder_variables`."""

    file: Path
    pipe: Path | None = None  # on which it can be asked to write one
    since_unix_s: float = 0.0  # what is older is of an earlier attempt


def recorder_variables(folder: Path, attempt: int) -> dict[str, str]:
    """Variables by which ranks write their dumps into a folder, and listen for being asked to."""
    return {
        _FILE_VARIABLE: str(folder / f"flight-{attempt}-rank-"),
        _PIPE_VARIABLE: str(folder / f"flight-{attempt}-asked-"),
    }


def source_of(environ: Mapping[str, str], rank: int, since_unix_s: float) -> FlightSource | None:
    """Where a rank with this environment has its dumps; None: nowhere that is known."""
    file, pipe = environ.get(_NEWER_FILE_VARIABLE) or environ.get(_FILE_VARIABLE), environ.get(_PIPE_VARIABLE)
    if not file:
        return None
    return FlightSource(Path(f"{file}{rank}"), Path(f"{pipe}{rank}.pipe") if pipe else None, since_unix_s)


def collect(source: FlightSource, until_s: float) -> tuple[str, str]:
    """Ask a rank for a dump if it can be asked, and wait for that until this time of the monotonic clock.

    Returns:
        The dump as JSON, empty if there is none; and why not, for people.
    """

    def changed() -> int:
        try:
            return source.file.stat().st_mtime_ns
        except OSError:
            return -1

    before_ns, asked = changed(), False
    if source.pipe is not None:
        with suppress(OSError):  # no process reads at the other end
            descriptor = os.open(source.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                asked = os.write(descriptor, b"1\n") > 0
            finally:
                os.close(descriptor)
    while True:
        changed_ns = changed()
        is_new = changed_ns > before_ns if asked else changed_ns >= 0
        is_last = not asked or time.monotonic() + _DUMP_POLL_S >= until_s
        if is_new or is_last:
            if changed_ns < 0 or changed_ns < source.since_unix_s * 1e9:
                problem = "the rank wrote none"
            else:
                try:
                    return as_json(read_dump(source.file)), ""
                except (FlightRecordError, OSError) as error:  # it may be half written
                    problem = f"{source.file}: {error}"
            if is_last:
                return "", problem
        time.sleep(_DUMP_POLL_S)


_MARGIN_S = 0.15  # of the limit: for putting together what has come
_LATE_S = 0.05  # of the limit: for saying that something was not done in time
_STATE_S = 0.2  # of the limit at most: /proc answers at once, or not at all
_REST_S = 0.25  # of the limit at most: between the two looks at CPU time
_POLL_S = 0.02
_TRACED = "t"
_MAX_KERNEL_LINES = 200
_NOTE_CHARACTERS = 1000
_NAME_CHARACTERS = 60


@dataclass(frozen=True)
class Subject:
    """A rank that is looked at.

    Attributes:
        dump: the file to which it writes its stacks, if it has called `phalanx.ipc.processes.register`.
        kept_by: names of the threads that keep it alive, where its script has ended.
    """

    rank: int
    pid: int
    dump: Path | None = None
    progress: Callable[[], tuple[str, int]] | None = None
    flight: FlightSource | None = None
    kept_by: tuple[str, ...] = ()


@dataclass
class _RankLook:
    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    moved_s: float | None = None
    stacks: Stacks | None = None
    progress: tuple[str, int] = ("", -1)
    flight: tuple[str, str] = ("", "")
    has_state: bool = False
    was_seen: threading.Event = field(default_factory=threading.Event)


def gather(
    subjects: Sequence[Subject],
    *,
    attempt: int,
    within_s: float = 2.0,
    kernel_lines: Callable[[], list[str]] = list,
    accelerators: Callable[[], list[Accelerator]] = list,
    start: StartChild = lambda make: make(),
    program: Path | None = None,
    proc: Path = PROC,
) -> Evidence:
    """Look at all ranks at once, for `within_s` seconds at most.

    Args:
        kernel_lines: of the kernel log since the attempt began.
        program: py-spy; None: it is looked for.
    """
    begin_s = time.monotonic()
    until_s = begin_s + within_s - min(_MARGIN_S, within_s / 4)
    program = py_spy_program() if program is None else program
    looks = {subject.rank: _RankLook() for subject in subjects}
    lines: list[str] = []
    devices: list[Accelerator] = []
    tasks: list[Callable[[], None]] = [lambda: lines.extend(kernel_lines()), lambda: devices.extend(accelerators())]
    for subject in subjects:
        tasks += _tasks(subject, looks[subject.rank], until_s - _LATE_S, program, start, proc)

    def quietly(task: Callable[[], None]) -> None:
        with suppress(Exception):  # what one source raises is no reason to lose the others
            task()

    # All at once; those that are not done in time go on alone, and what they find is not looked at.
    threads = [threading.Thread(target=quietly, args=(task,), name="evidence", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return Evidence(
        attempt=attempt,
        ranks=[_rank_evidence(subject, looks[subject.rank]) for subject in subjects],
        kernel_lines=lines[-_MAX_KERNEL_LINES:],
        accelerators=list(devices),
        seconds=time.monotonic() - begin_s,
    )


def _tasks(
    subject: Subject, look: _RankLook, until_s: float, program: Path | None, start: StartChild, proc: Path
) -> list[Callable[[], None]]:
    """What is asked of one rank, each by itself: one that hangs takes nothing along."""

    def ask_stacks() -> None:
        look.was_seen.wait(_STATE_S)  # who is asked to write its stacks wakes up, and seems to compute
        try:
            look.stacks = stacks_of(subject.pid, until_s, program=program, dump=subject.dump, start=start, proc=proc)
        except Exception as error:  # ours, and so not evidence against the rank
            look.stacks = Stacks(problem=f"{type(error).__name__}: {error}")

    def ask_flight() -> None:
        if subject.flight is not None:
            look.flight = collect(subject.flight, until_s)

    def ask_progress() -> None:
        if subject.progress is not None:
            look.progress = subject.progress()

    return [lambda: _watch(subject.pid, look, until_s, proc), ask_stacks, ask_flight, ask_progress]


def _watch(pid: int, look: _RankLook, until_s: float, proc: Path) -> None:
    """State and CPU time, twice; only files of /proc that need no lock of the process's memory are read."""
    first = read_process(pid, proc)
    look.has_state = True
    if first is None:
        look.was_seen.set()
        return
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    look.state, look.cpu_s = first.state, first.cpu_ticks / ticks_per_s
    look.waits_in = waits_in(pid, proc)
    look.was_seen.set()
    time.sleep(max(0.0, min(_REST_S, until_s - time.monotonic())))
    second = read_process(pid, proc)
    while second is not None and look.state == _TRACED and time.monotonic() < until_s:
        look.state = second.state  # it may be our own py-spy that halts it
        time.sleep(_POLL_S if look.state == _TRACED else 0)
        second = read_process(pid, proc)
    if second is not None and second.started_ticks == first.started_ticks:
        look.moved_s = (second.cpu_ticks - first.cpu_ticks) / ticks_per_s
        look.cpu_s = second.cpu_ticks / ticks_per_s


def _rank_evidence(subject: Subject, look: _RankLook) -> RankEvidence:
    stacks = look.stacks or Stacks(problem="its stacks could not be read in time", is_silent=True)
    note = [f"waits in {look.waits_in}"] if look.waits_in else []
    if look.moved_s is not None:
        note.append(f"used {look.moved_s:.2f} s of CPU between two looks")
    elif not look.has_state:
        note.append("/proc did not answer")
    note += [words for words in (stacks.problem, look.flight[1]) if words]
    return RankEvidence(
        rank=subject.rank,
        stacks=stacks.text,
        is_silent=not stacks.text and stacks.is_silent,
        state=look.state,
        phase=look.progress[0],
        step=look.progress[1],
        cpu_s=look.cpu_s,
        flight_record=look.flight[0],
        note="; ".join(note)[:_NOTE_CHARACTERS],
        waits_in=look.waits_in[:_NAME_CHARACTERS],
        kept_by=list(subject.kept_by),
    )
