"""Evidence of ranks that hang: NCCL's flight recorder, stacks and processes, gathered before anything is killed.

NCCL's flight recorder: what a rank's collectives were when it hung, as torch dumps it.

A dump is a pickle, and a rank may write what it likes, so it is read by an unpickler that knows data only: text,
numbers, lists, tuples and dictionaries. It admits no globals, calls nothing, and allocates no more than the file's
size explains. The base class is private to Python; a test holds it to that.

What can be learnt of ranks before they are killed, in a limited time, whatever they hang in.

Everything that may block is asked in a thread of its own that nobody waits for longer than the limit. A rank that does
not answer is silent, and that is evidence too.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from phalanx.core.host import PROC
from phalanx.ipc.processes import read_process
from phalanx.run.executor.stack_dumps import Stacks, Start, py_spy_program, stacks_of
from phalanx.run.executor.system_calls import waits_in
from phalanx.run.judge.flight_records import condense
from phalanx.run.messages import Accelerator, Evidence, RankEvidence

MAX_BYTES = 64 << 20
"""Of a dump. Those of 16 ranks of a real job have 3 to 5 kB each; the recorder's ring may be larger."""

_MAX_VALUES = 3_000_000  # after references to one value are written out: a short pickle can stand for billions
_MAX_DEPTH = 20
_JSON_BYTES = 64 << 10  # of one rank: those of a host have to fit into a frame
_DUMP_POLL_S = 0.05

_FILE_VARIABLE, _PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_NEWER_FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"  # goes before the other where torch knows it

_DATA_ONLY = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET POP POP_MARK DUP"
)


class FlightRecordError(ValueError):
    """A file is not a dump of a flight recorder."""


class _DataUnpickler(pickle._Unpickler):
    """Knows the instructions for data; any other ends it."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _DATA_ONLY.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        """No instruction that comes here is known; this is the second wall."""
        raise FlightRecordError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """As `find_class`."""
        raise FlightRecordError("it refers to something outside")


def parse_dump(content: bytes) -> dict[str, Any]:
    """What a dump holds: values that JSON has.

    Raises:
        FlightRecordError: it is not a dump, or holds more than data.
    """
    if len(content) > MAX_BYTES:
        raise FlightRecordError(f"it has {len(content)} bytes, more than {MAX_BYTES}")
    try:
        value = json.loads(content) if content[:1] == b"{" else _DataUnpickler(io.BytesIO(content)).load()
        plain = _plain(value, [_MAX_VALUES], 0)
    except FlightRecordError:
        raise
    except KeyError as error:
        raise FlightRecordError(f"it has an instruction, {error}, that is not for data") from error
    except Exception as error:  # an unpickler raises all kinds of them for what is not a pickle
        raise FlightRecordError(f"it cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(plain, dict) and "version" in plain:
        plain.setdefault("entries", [])  # text leaves out what is empty
    if not isinstance(plain, dict) or not isinstance(plain.get("entries"), list):
        raise FlightRecordError("it has no entries")
    if not all(isinstance(entry, dict) for entry in plain["entries"]):
        raise FlightRecordError("an entry is no table")
    return plain


def read_dump(path: Path) -> dict[str, Any]:
    """The dump in a file; see `parse_dump`.

    Raises:
        FlightRecordError: it is not a dump. OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO there shall not hold us up
    with os.fdopen(descriptor, "rb") as file:
        return parse_dump(file.read(MAX_BYTES + 1) or b"")


def as_json(record: dict[str, Any], max_bytes: int = _JSON_BYTES) -> str:
    """What matters of a record, as JSON text of at most `max_bytes`; see `phalanx.run.judge.flight_records.condense`.

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
    """Where a rank's dumps are.

    Attributes:
        file: which the rank writes (``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` and its rank).
        pipe: on which it can be asked to (``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``, its rank and ``.pipe``).
        since_unix_s: what is older is of an earlier attempt.
    """

    file: Path
    pipe: Path | None = None
    since_unix_s: float = 0.0


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
    before_ns = _changed_ns(source.file)
    asked = source.pipe is not None and _ask(source.pipe)
    while True:
        changed_ns = _changed_ns(source.file)
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


def _ask(pipe: Path) -> bool:
    """Whether somebody reads at the other end, and has been asked."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.write(descriptor, b"1\n") > 0
        finally:
            os.close(descriptor)
    return False


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _plain(value: Any, room: list[int], depth: int) -> Any:
    """A copy in which nothing is shared and nothing holds itself."""
    room[0] -= 1
    if room[0] < 0 or depth > _MAX_DEPTH:
        raise FlightRecordError("it holds more than a flight recorder writes")
    if isinstance(value, dict):
        return {_key(key): _plain(item, room, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, room, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    raise FlightRecordError(f"it holds a value of type {type(value).__name__}")


def _key(key: Any) -> str:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return str(key)
    raise FlightRecordError(f"it holds a key of type {type(key).__name__}")


_MARGIN_S = 0.15  # of the limit: for putting together what has come
_WORD_S = 0.05  # of the limit: for saying that something was not done in time
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
        progress: gives its last phase and step.
        flight: where its flight recorder's dumps are.
        kept_by: names of the threads that keep it alive, where its script has ended.
    """

    rank: int
    pid: int
    dump: Path | None = None
    progress: Callable[[], tuple[str, int]] | None = None
    flight: FlightSource | None = None
    kept_by: tuple[str, ...] = ()


@dataclass
class _Look:
    """What has been learnt of a rank so far."""

    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    moved_s: float | None = None
    stacks: Stacks | None = None
    progress: tuple[str, int] = ("", -1)
    flight: tuple[str, str] = ("", "")
    has_state: bool = False


def gather(
    subjects: Sequence[Subject],
    *,
    attempt: int,
    within_s: float = 2.0,
    kernel_lines: Callable[[], list[str]] = list,
    accelerators: Callable[[], list[Accelerator]] = list,
    start: Start = lambda make: make(),
    program: Path | None = None,
    proc: Path = PROC,
) -> Evidence:
    """Look at all ranks at once, for `within_s` seconds at most.

    Args:
        kernel_lines: of the kernel log since the attempt began.
        accelerators: their state.
        start: see `phalanx.run.executor.reaper.Reaper.helper`.
        program: py-spy; None: it is looked for.
        proc: where /proc is.
    """
    begin_s = time.monotonic()
    until_s = begin_s + within_s - min(_MARGIN_S, within_s / 4)
    program = py_spy_program() if program is None else program
    looks = {subject.rank: _Look() for subject in subjects}
    host = _Host()
    tasks: list[Callable[[], None]] = [
        lambda: setattr(host, "kernel_lines", kernel_lines()),
        lambda: setattr(host, "accelerators", accelerators()),
    ]
    for subject in subjects:
        tasks += _tasks(subject, looks[subject.rank], until_s - _WORD_S, program, start, proc)
    _run_all(tasks, until_s)
    return Evidence(
        attempt=attempt,
        ranks=[_rank_evidence(subject, looks[subject.rank]) for subject in subjects],
        kernel_lines=list(host.kernel_lines[-_MAX_KERNEL_LINES:]),
        accelerators=list(host.accelerators),
        seconds=time.monotonic() - begin_s,
    )


@dataclass
class _Host:
    kernel_lines: list[str] = field(default_factory=list)
    accelerators: list[Accelerator] = field(default_factory=list)


def _tasks(
    subject: Subject, look: _Look, until_s: float, program: Path | None, start: Start, proc: Path
) -> list[Callable[[], None]]:
    """What is asked of one rank, each by itself: one that hangs takes nothing along."""

    def ask_stacks() -> None:
        try:
            look.stacks = stacks_of(subject.pid, until_s, program=program, dump=subject.dump, start=start, proc=proc)
        except Exception as error:  # ours, and so nothing that tells against the rank
            look.stacks = Stacks(problem=f"{type(error).__name__}: {error}")

    def ask_flight() -> None:
        if subject.flight is not None:
            look.flight = collect(subject.flight, until_s)

    def ask_progress() -> None:
        if subject.progress is not None:
            look.progress = subject.progress()

    return [lambda: _watch(subject.pid, look, until_s, proc), ask_stacks, ask_flight, ask_progress]


def _watch(pid: int, look: _Look, until_s: float, proc: Path) -> None:
    """State and CPU time, twice; only files of /proc that need no lock of the process's memory are read."""
    first = read_process(pid, proc)
    look.has_state = True
    if first is None:
        return
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    look.state, look.cpu_s = first.state, first.cpu_ticks / ticks_per_s
    look.waits_in = waits_in(pid, proc)
    time.sleep(max(0.0, min(_REST_S, until_s - time.monotonic())))
    second = read_process(pid, proc)
    while second is not None and look.state == _TRACED and time.monotonic() < until_s:
        look.state = second.state  # it may be our own py-spy that halts it
        time.sleep(_POLL_S if look.state == _TRACED else 0)
        second = read_process(pid, proc)
    if second is not None and second.started_ticks == first.started_ticks:
        look.moved_s = (second.cpu_ticks - first.cpu_ticks) / ticks_per_s
        look.cpu_s = second.cpu_ticks / ticks_per_s


def _run_all(tasks: Sequence[Callable[[], None]], until_s: float) -> None:
    """Run them at once; those that are not done in time go on alone, and what they find is not looked at."""
    threads = [threading.Thread(target=_quietly, args=(task,), name="evidence", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _quietly(task: Callable[[], None]) -> None:
    with suppress(Exception):  # what one source raises is no reason to lose the others
        task()


def _rank_evidence(subject: Subject, look: _Look) -> RankEvidence:
    stacks = look.stacks or Stacks(is_silent=True)
    return RankEvidence(
        rank=subject.rank,
        stacks=stacks.text,
        is_silent=not stacks.text and stacks.is_silent,
        state=look.state,
        phase=look.progress[0],
        step=look.progress[1],
        cpu_s=look.cpu_s,
        flight_record=look.flight[0],
        note=_note(look)[:_NOTE_CHARACTERS],
        waits_in=look.waits_in[:_NAME_CHARACTERS],
        kept_by=list(subject.kept_by),
    )


def _note(look: _Look) -> str:
    """For people."""
    parts = []
    if look.waits_in:
        parts.append(f"waits in {look.waits_in}")
    if look.moved_s is not None:
        parts.append(f"used {look.moved_s:.2f} s of CPU between two looks")
    elif not look.has_state:
        parts.append("/proc did not answer")
    stacks = look.stacks or Stacks(problem="its stacks could not be read in time")
    parts += [words for words in (stacks.problem, look.flight[1]) if words]
    return "; ".join(parts)
