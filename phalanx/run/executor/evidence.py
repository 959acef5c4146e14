"""What can be learnt of ranks before they are killed, in a limited time, whatever they hang in. Torch-free.

Everything that may block is asked in a thread of its own that nobody waits for longer than the limit. A rank that does
not answer is silent, and that is evidence too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.kernel_files import PROC
from phalanx.core.process_table import read_process
from phalanx.run.executor.flight_recorder import FlightSource, collect
from phalanx.run.executor.reaping.tree import waits_in
from phalanx.run.executor.stacks import Stacks, Start, py_spy_program, stacks_of
from phalanx.run.messages import Accelerator, Evidence, RankEvidence

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
        dump: the file to which it writes its stacks, if it has called `phalanx.core.stack_dump.register`.
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
