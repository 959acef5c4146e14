"""The schedule of faults of one worker (its agenda): kinds of faults, orders, when each is due, and records.

Beside the agenda's file, in a folder, every fault that has happened leaves a record: that is how *once* stays once when
the process is gone, and how the controller knows that a fault has really happened, when and where. Whether an order is
due is pure, without a clock of its own. `telling_words` finds words that would give an injected fault away to a
detector.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes

TELLING = re.compile(
    r"fault|inject|incident|manifest|campaign|chaos|sabotage|deliberate|on purpose"
    r"|disguis|pretend|simulat|ground.?truth|referee",
    re.IGNORECASE,
)

_REAL = re.compile(r"segmentation fault|segfault|page ?faults?|faulthandler|default", re.IGNORECASE)


def telling_words(text: str) -> list[str]:
    """Those in `text`, each once; what systems say of real faults (``Segmentation fault``, page faults) is none."""
    return sorted({match.group().lower() for match in TELLING.finditer(_REAL.sub("", text))})


Safety = Literal["safe_in_process", "isolated_destructive", "cluster_destructive"]
PlaceKind = Literal["ranks", "hosts", "spares", "driver", "links"]

SAFETY_ORDER: tuple[Safety, ...] = ("safe_in_process", "isolated_destructive", "cluster_destructive")
"""From harmless to dangerous: the process goes on; a process or a group of them is lost; more than one host suffers."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        text: what happens, for people.
        safety: the least that an incident of this kind has to admit to.
        places: where it may happen.
        settings: what may be set, with the type of each.
        repeats: it happens again at every step for as long as it lasts.
    """

    text: str
    safety: Safety
    places: frozenset[PlaceKind]
    settings: Mapping[str, type] = field(default_factory=dict)
    repeats: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether the worker does it to itself; else the controller of the campaign does it from outside."""
        return "ranks" in self.places


def _worker(does: str, safety: Safety = "isolated_destructive", *, repeats: bool = False, **settings: type) -> Kind:
    return Kind(does, safety, frozenset({"ranks"}), settings, repeats)


def _outside(does: str, safety: Safety, *places: PlaceKind, **settings: type) -> Kind:
    return Kind(does, safety, frozenset(places), settings)


KINDS: Mapping[str, Kind] = {
    "exception": _worker("a Python exception out of the optimizer's step", error=str, text=str),
    "exit": _worker("sys.exit with a status", status=int),
    "signal": _worker("the process sends itself a signal", name=str),
    "pause": _worker("SIGSTOP; SIGCONT when its time is over"),
    "segfault": _worker("a read of address 0"),
    "abort": _worker("abort() of the C library"),
    "deadlock": _worker("a second lock of a C mutex, or a wait in C, with the interpreter's lock held"),
    "sleep": _worker("a sleep in the main thread"),
    "busy-loop": _worker("a loop in the main thread that does nothing"),
    "out-of-memory": _worker("memory is taken until there is none", limit_mb=int),
    "nan": _worker("a parameter becomes NaN after every step", "safe_in_process", repeats=True),
    "corruption": _worker("one bit of one element of a parameter flips", "safe_in_process", bit=int, element=int),
    "slow": _worker("the rank's own time is multiplied", "safe_in_process", factor=float, burn=int),
    "evaluation": _worker("all works for a while without an optimizer step", "safe_in_process"),
    "log-lines": _worker("innocent lines with the words that alarm", "safe_in_process", repeats=True),
    "cpu-hog": _worker("other processes use the cores", "safe_in_process", processes=int),
    "long-checkpoint": _worker("a checkpoint writes for longer than usual", "safe_in_process"),
    "executor-killed": _outside("SIGKILL to the executor of a host", "isolated_destructive", "hosts"),
    "host-killed": _outside("SIGKILL to all processes of a host, its keeper too", "isolated_destructive", "hosts"),
    "link-down": _outside("the network interface of a host goes down", "isolated_destructive", "hosts"),
    "disk-full": _outside("no byte is left on a host's disk", "isolated_destructive", "hosts"),
    "clock-jump": _outside("the wall clock of a host jumps", "safe_in_process", "hosts", offset_s=float),
    "spare-bad": _outside("a spare dies, or stops, as soon as it is needed", "isolated_destructive", "spares", how=str),
    "driver-killed": _outside("SIGKILL to the driver", "cluster_destructive", "driver"),
    "driver-stopped": _outside("SIGSTOP to the driver, SIGCONT later", "cluster_destructive", "driver"),
    "link-cut": _outside("connections of driver and executor break, new ones are refused", "safe_in_process", "links"),
    "link-silent": _outside("nothing of what driver and executor say arrives", "safe_in_process", "links"),
    "link-delayed": _outside("what they say arrives late", "safe_in_process", "links", delay_s=float),
}
"""By name."""


Clock = Literal["optimizer", "calls"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One incident, as a worker reads it: the fields of `phalanx.faults.case_manifest.Incident`."""

    number: int
    kind: str
    ranks: list[int]
    step: int
    phase: Literal["start", "step", "checkpoint", "recovery"]
    attempt: int
    delay_s: float
    unit: Literal["calls", "steps", "seconds", "forever"]
    amount: float
    retrigger: Literal["once", "attempt", "host"]
    settings: dict[str, int | float | str] = {}

    @property
    def seconds(self) -> float | None:
        """How long it lasts, where that is said in seconds; None: for ever."""
        return self.amount if self.unit == "seconds" else None


class Agenda(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a worker may have to do to itself.

    Attributes:
        seed: for what is drawn at random.
        clock: whose steps count: the optimizers' of torch, or calls of `Injection.advance`.
    """

    seed: int
    clock: Clock
    orders: list[Order]


class Record(msgspec.Struct, frozen=True):
    """An incident has happened in a rank.

    Attributes:
        refused: why it did not happen after all.
        unix_ns, monotonic_ns: when.
    """

    number: int
    kind: str
    rank: int
    attempt: int
    step: int
    host: str
    pid: int
    unix_ns: int
    monotonic_ns: int
    refused: str = ""


def write_agenda(agenda: Agenda, path: Path) -> None:
    """Write it where workers shall read it.

    Raises:
        UserError: the path, which workers see in their environment, would give the faults away.
    """
    if words := telling_words(str(path)):
        raise UserError(f"gives itself away ({', '.join(words)})", cure="choose a plain name", value=str(path))
    write_bytes(path, msgspec.json.encode(agenda))


def read_agenda(path: Path) -> Agenda:
    """The agenda in a file.

    Raises:
        UserError: there is none, or it is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Agenda)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="check the path", value=str(path)) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"is no agenda ({error})", cure="write it with write_agenda", value=str(path)) from None


class Memory:
    """Records in the folder beside an agenda; every process of the job may write to it at once."""

    def __init__(self, agenda: Path) -> None:
        self.folder = agenda.with_name(f"{agenda.name}.d")

    def claim(self, record: Record, retrigger: Literal["once", "attempt", "host"]) -> bool:
        """Write the record; False: the incident has had its turn, and shall not happen.

        The record is there, whole, before this returns, so a process that dies of the fault has left it.
        """
        name = (
            f"{record.number}-{record.rank}"
            if retrigger == "once"
            else f"{record.number}-{record.rank}-{record.attempt}"
        )
        if retrigger == "host":
            key = record.number, record.rank
            homes = {known.host for known in self.records() if (known.number, known.rank) == key}
            if homes and record.host not in homes:
                return False
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{secrets.token_hex(8)}"
        aside.write_bytes(msgspec.json.encode(record))
        try:
            os.link(aside, self.folder / name)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def records(self) -> Sequence[Record]:
        """All of them, oldest first."""
        found = []
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if not path.name.startswith("."):
                    found.append(msgspec.json.decode(path.read_bytes(), type=Record))
        return sorted(found, key=lambda record: record.unix_ns)


def new_record(order: Order, rank: int, attempt: int, step: int, host: str, refused: str = "") -> Record:
    """A record of now."""
    clock_ns = time.time_ns(), time.monotonic_ns()
    return Record(order.number, order.kind, rank, attempt, step, host, os.getpid(), *clock_ns, refused)


@dataclass(frozen=True)
class Begun:
    """When an incident began in this process: after how many steps, and at what time of the process's clock."""

    step: int
    at_s: float


def is_due(order: Order, step: int, begun: Begun | None, now_s: float) -> bool:
    """Whether it happens now, right after `step` optimizer steps.

    Args:
        begun: when it began in this process; None: it has not.
        now_s: of the clock that `begun` was read from.
    """
    if order.phase != "step":
        return False
    repeats = KINDS[order.kind].repeats
    if begun is not None:
        return repeats and still_lasts(order, step, begun, now_s)
    if step <= order.step or order.retrigger == "host":
        return step >= order.step
    # A later attempt may begin beyond the step: what stays with a host, or lasts longer, is then there already.
    return repeats and (order.unit in ("forever", "seconds") or step < order.step + order.amount)


def still_lasts(order: Order, step: int, begun: Begun, now_s: float) -> bool:
    """Whether what began then goes on right after `step` optimizer steps."""
    if order.unit == "forever":
        return True
    if order.unit == "seconds":
        return now_s - begun.at_s < order.amount
    return step - begun.step < order.amount
