"""Processes that the kernel killed for want of memory, and the ranks of the job that they were: by their ids.

A rank that is killed says nothing. Its launcher says which process ended by SIGKILL (torchrun: ``failed (exitcode: -9)
local_rank: 1 (pid: 4132)``), the kernel of its host which process it killed: where host and id agree, memory was full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.detect.logs.log_digest import LogDigest, LogEvent

_PROCESS = re.compile(
    r"[Kk]ill(?:ed)? process (\d{1,9})\b|reaped process (\d{1,9})\b|oom-kill:.{0,400}\bpid=(\d{1,9})\b|"
    r"\((?:pid|PID):? ?(\d{1,9})\)|received by PID (\d{1,9})\b|: line \d{1,6}:? +(\d{1,9}) Killed\b|"
    r"[Pp]rocess (\d{1,9}) (?:\w{1,20} ){0,4}(?:SIGKILL|signal 9)\b"
)
_LONGEST_S = 600.0  # between what the kernel says and what a launcher says, whose clocks may differ


@dataclass(frozen=True)
class KilledRank:
    """A process of the job that the kernel killed: what the kernel says, and which rank it was (None: not known)."""

    event: LogEvent
    rank: int | None
    why: str


def process_of(text: str) -> int | None:
    """The id of the process that a line says was killed or failed."""
    match = _PROCESS.search(text[:1000])
    return int(match[match.lastindex]) if match and match.lastindex else None


def killed_ranks(events: Sequence[LogEvent], digest: LogDigest) -> list[KilledRank]:
    """Those of whose end a launcher speaks and whose kernel says that it killed them for want of memory."""
    found = []
    for event in events:
        is_kill = event.source == "kernel" and event.rule is not None and event.rule.kind == "out of memory"
        if not is_kill or event.process is None:
            continue
        root = digest.root_cause
        is_root = event.process == root.process and _is_same(root.host, event.host)
        told = [
            one
            for one in events
            if one.source == "output" and one.process == event.process and _is_same(one.host, event.host)
            and (one.unix_s is None or event.unix_s is None or abs(one.unix_s - event.unix_s) < _LONGEST_S)
        ]  # fmt: skip
        if is_root or told:
            whose = root.rank if is_root else None
            name = f"rank {whose}" if whose is not None else "a process of this job"
            why = f"the kernel of {event.host or 'its host'} killed process {event.process}, which was {name}"
            found.append(KilledRank(event, whose, why))
    return found


def _is_same(one: str, other: str) -> bool:
    """Whether two names of hosts may be of the same."""
    return not one or not other or one.partition(".")[0] == other.partition(".")[0]


def is_told_by_launcher(event: LogEvent) -> bool:
    """Whether a line only says that a process of that id was killed."""
    return event.process is not None and event.rule is not None and event.rule.general and event.source == "output"
