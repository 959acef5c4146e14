"""What a driver's journal says of a job: whatever is no part of a healthy one's life is a sign of trouble.

What is harmless is listed and not what is alarming, so that a new kind of event or action is seen here at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.run.journal import Entry

HARMLESS = frozenset(
    {
        *("job-begun", "tick", "host-joined", "check-passed", "store-opened", "started", "running", "advanced"),
        *("stopped", "workers-returned", "open-store", "start", "check", "ask-for-hosts"),
    }
)
"""What a healthy job's journal holds from its begin to its end."""

NOTES = frozenset(["noticed", "host-unknown", "driver-restarted"])
"""What people are told, and nothing more: lines of logs, a host that is not heard of for a while."""

FOLLOWS = frozenset(["open-incident", "add-to-incident", "close-incident", "gather", "suspects-named", "stop"])
"""What follows from an alarm that is counted already."""

BLAME = frozenset(["evict", "release"])

VERDICTS = frozenset(["no-progress", "traffic-silent", "worker-failed", "host-gone", "loss-broken"])
"""What the driver takes for a fault of the job."""


@dataclass(frozen=True)
class Sign:
    """One entry that is not harmless.

    Attributes:
        name: such as ``no-progress``.
        fields: of the event or action.
    """

    name: str
    unix_s: float
    attempt: int
    fields: dict[str, object]

    def words(self, since_s: float = 0.0) -> str:
        """In one line."""
        kept = {
            name: value for name, value in self.fields.items() if name not in ("event", "action", "at_s", "attempt")
        }
        told = " ".join(f"{name}={str(value)[:120]}" for name, value in kept.items() if value not in ("", [], {}, None))
        return f"+{self.unix_s - since_s:.1f} s {self.name} {told}"


@dataclass
class Signs:
    """Of one job; take in entries, oldest first.

    Attributes:
        began_s, ended_s: the ranks of the first attempt were started, and the job was over (or a person ended it);
            Unix time, None: not yet.
        running: attempts all of whose ranks have made a step, and when.
        attempts: how many have begun.
        alarms: whatever is not harmless, and what followed from it.
        notes: what people were told.
        status: with which the job has ended; None: it has not.
    """

    began_s: float | None = None
    ended_s: float | None = None
    running: dict[int, float] = field(default_factory=dict)
    attempts: int = 0
    steps: int = 0
    alarms: list[Sign] = field(default_factory=list)
    notes: list[Sign] = field(default_factory=list)
    status: int | None = None
    reason: str = ""
    next_sequence: int = 1
    _is_over: bool = False
    _event: str = ""

    def take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.next_sequence = entry.sequence + 1
            if entry.kind in ("event", "action"):
                fields = json.loads(entry.json_text)
                self._take(Sign(str(fields[entry.kind]), entry.unix_s, entry.attempt, fields))

    def _take(self, sign: Sign) -> None:
        name, fields = sign.name, sign.fields
        self._event = name if "event" in fields else self._event
        if name == "finish":
            self.status, self.reason, self._is_over = int(str(fields["status"])), str(fields["reason"]), True
            self.ended_s = self.ended_s or sign.unix_s
            if self.status not in (0, STOPPED):
                self.alarms.append(sign)
        elif name == "stop-asked":
            self._is_over, self.ended_s = True, sign.unix_s
        elif self._is_over:
            return
        elif name in NOTES or (name == "alert" and (self._event in NOTES or fields["level"] == "info")):
            self.notes.append(sign)
        elif name not in HARMLESS:
            self.alarms.append(sign)
        if name == "start":
            self.attempts = max(self.attempts, sign.attempt)
        elif name == "started":
            self.began_s = self.began_s or sign.unix_s
        elif name == "running":
            self.running.setdefault(sign.attempt, sign.unix_s)
        if name in ("running", "advanced"):
            self.steps = max(self.steps, int(str(fields["step"])))

    def causes(self) -> list[Sign]:
        """Alarms without what followed from them."""
        return [sign for sign in self.alarms if sign.name not in FOLLOWS] or self.alarms[:1]

    def verdict(self, attempt: int = 1) -> Sign | None:
        """What was first taken for a fault in an attempt."""
        return next((sign for sign in self.alarms if sign.name in VERDICTS and sign.attempt == attempt), None)

    def named(self) -> tuple[int, ...]:
        """Ranks that the evidence, or their own end, has named."""
        ranks: set[int] = set()
        for sign in self.alarms:
            if sign.name == "suspects-named":
                ranks.update(sign.fields["ranks"])  # type: ignore[call-overload]
            elif sign.name == "worker-failed" and not sign.fields["follows"]:
                ranks.add(int(str(sign.fields["rank"])))
        return tuple(sorted(ranks))

    def blamed_hosts(self) -> list[str]:
        """Hosts that were evicted or given back."""
        return sorted({str(sign.fields["host"]) for sign in self.alarms if sign.name in BLAME})


STOPPED = 5
"""The status of a job that a person has ended."""
