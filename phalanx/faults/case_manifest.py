"""The manifest of a case: what goes wrong where and when, and what the right answer is. JSON, versioned, torch-free.

It is the ground truth, for the controller and the referee only; workers read no more than what
`phalanx.faults.fault_schedule` makes of it. Machines are numbered: 0 to hosts-1 are the hosts of the job, and its
spares follow.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from phalanx.core.config import Config, validate
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.faults.fault_schedule import KINDS, SAFETY_ORDER, PlaceKind, Safety

VERSION = 1

ActionName = Literal["restart", "evict", "stop", "shrink", "wait"]


class Place(Config):
    """Where it happens."""

    what: PlaceKind = Field(description="what it happens to")
    numbers: tuple[int, ...] = Field((), description="ranks; machines for hosts, spares and links; none for the driver")

    @model_validator(mode="after")
    def _check(self) -> Place:
        numbers = self.numbers
        if (self.what == "driver") != (not numbers):
            raise ValueError(
                f"what = {self.what!r} does not go with numbers = {list(numbers)}: give numbers, but for the driver"
            )
        if list(numbers) != sorted(set(numbers)) or min(numbers, default=0) < 0:
            raise ValueError(f"numbers = {list(numbers)} are not in order: write each once, upwards from 0")
        return self


class When(Config):
    """When it happens: the clock is training's own, its optimizer steps."""

    step: int = Field(0, ge=0, description="optimizer steps done before it; 0 for start and recovery")
    phase: Literal["start", "step", "checkpoint", "recovery"] = Field(
        "step",
        description="start: as the script begins; step: right after that step; checkpoint: inside the first one after "
        "that step; recovery: between the beginning of a later attempt and its first step",
    )
    attempt: int = Field(1, ge=1, description="the first attempt, counted from 1, in which it can happen")
    delay_s: float = Field(0.0, ge=0, le=3600, description="seconds between that moment and the fault")

    @model_validator(mode="after")
    def _check(self) -> When:
        if self.phase in ("start", "recovery") and self.step:
            raise ValueError(f"step = {self.step} does not go with phase = {self.phase!r}: leave the step out")
        if self.phase in ("step", "checkpoint") and not self.step:
            raise ValueError(f"phase = {self.phase!r} needs a step: give step, from 1")
        if self.phase == "recovery" and self.attempt < 2:
            raise ValueError(f"attempt = {self.attempt} is no recovery: give an attempt from 2")
        return self


class Lasts(Config):
    """How long it goes on."""

    unit: Literal["calls", "steps", "seconds", "forever"] = Field("calls", description="what amount counts")
    amount: float = Field(1, gt=0, le=1e9, description="how many; 1 for forever")

    @model_validator(mode="after")
    def _check(self) -> Lasts:
        if self.unit in ("calls", "steps") and self.amount != int(self.amount):
            raise ValueError(f"amount = {self.amount} is no number of {self.unit}: give a whole number")
        return self


class Incident(Config):
    """One fault."""

    kind: str = Field(description="one of the kinds of docs/faults.md")
    place: Place = Field(description="where")
    when: When = Field(default_factory=When, description="when")
    lasts: Lasts = Field(default_factory=Lasts, description="how long")
    retrigger: Literal["once", "attempt", "host"] = Field(
        "once", description="once: over all attempts; attempt: in each; host: in each in which the rank is where it was"
    )
    safety: Safety = Field("isolated_destructive", description="the worst that it may do")
    settings: dict[str, int | float | str] = Field(default_factory=dict, description="what this kind lets be set")

    @model_validator(mode="after")
    def _check(self) -> Incident:
        kind = KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"kind = {self.kind!r} is not known: write one of {', '.join(KINDS)}")
        if self.place.what not in kind.places:
            raise ValueError(
                f"place.what = {self.place.what!r} does not go with kind = {self.kind!r}: "
                f"write {' or '.join(sorted(kind.places))}"
            )
        if SAFETY_ORDER.index(self.safety) < SAFETY_ORDER.index(kind.safety):
            raise ValueError(
                f"safety = {self.safety!r} is less than kind = {self.kind!r} does: write at least {kind.safety}"
            )
        for name, value in self.settings.items():
            wanted = kind.settings.get(name)
            if wanted is None:
                known = ", ".join(kind.settings) or "nothing"
                raise ValueError(
                    f"settings.{name} = {value!r} is not known to kind = {self.kind!r}: it lets be set {known}"
                )
            if wanted is not float and not isinstance(value, wanted):
                raise ValueError(f"settings.{name} = {value!r} is of the wrong type: give {wanted.__name__}")
            if wanted is float and (isinstance(value, str) or not math.isfinite(value)):
                raise ValueError(f"settings.{name} = {value!r} is no number: give one")
        return self


class Cluster(Config):
    """What the case runs on."""

    hosts: int = Field(4, ge=1, description="hosts of the job")
    workers_per_host: int = Field(2, ge=1, description="ranks of each")
    spares: int = Field(1, ge=0, description="hosts that wait")
    may_shrink: bool = Field(
        False, description="whether the job goes on with fewer hosts where none is left to replace one"
    )

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.hosts * self.workers_per_host

    def host_of(self, rank: int) -> int:
        """The machine on which a rank begins."""
        return rank // self.workers_per_host


class Response(Config):
    """Something that the supervisor does."""

    action: ActionName = Field(description="what it does")
    hosts: tuple[int, ...] = Field((), description="machines that it does it to; only for evict")

    @model_validator(mode="after")
    def _check(self) -> Response:
        if (self.action == "evict") != bool(self.hosts):
            problem = f"hosts = {list(self.hosts)} does not go with action = {self.action!r}"
            raise ValueError(f"{problem}: name machines where they are evicted, and only there")
        return self


class Expected(Config):
    """The right answer."""

    responses: tuple[Response, ...] = Field((), description="in this order; empty: nothing is to be done")
    blame_ranks: tuple[int, ...] = Field((), description="exactly these ranks are named")
    blame_hosts: tuple[int, ...] = Field((), description="exactly these machines are named")
    goes_on: bool = Field(True, description="training reaches its last step")
    same_layout: bool = Field(True, description="with as many ranks as before, so that its losses are bit-equal")


class Manifest(Config):
    """One case."""

    version: Literal[1] = Field(1, description="of this form")
    id: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,99}$", description="a name for files: small letters, digits, hyphens"
    )
    seed: int = Field(ge=0, lt=2**63, description="of the case, not of its training")
    cluster: Cluster = Field(default_factory=Cluster, description="what it runs on")
    steps: int = Field(60, ge=1, description="optimizer steps of the whole training")
    incidents: tuple[Incident, ...] = Field((), description="what goes wrong; empty: a healthy run")
    expected: Expected = Field(default_factory=Expected, description="the right answer")

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        hosts, spares = self.cluster.hosts, self.cluster.spares
        allowed = {
            "ranks": range(self.cluster.ranks),
            "hosts": range(hosts),
            "spares": range(hosts, hosts + spares),
            "links": range(hosts + spares),
            "driver": range(0),
        }
        for number, incident in enumerate(self.incidents):
            place = incident.place
            _check_numbers(f"incidents.{number}.place.numbers", place.numbers, allowed[place.what])
            if incident.when.step > self.steps:
                raise ValueError(
                    f"incidents.{number}.when.step = {incident.when.step} is never reached: give at most {self.steps}"
                )
        _check_numbers("expected.blame_ranks", self.expected.blame_ranks, allowed["ranks"])
        named = (self.expected.blame_hosts, *(response.hosts for response in self.expected.responses))
        for numbers in named:
            _check_numbers("hosts of expected", numbers, allowed["links"])
        return self

    def digest(self) -> str:
        """By which a result is known to belong to this very case."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def parse(text: str | bytes) -> Manifest:
    """A manifest out of its JSON text.

    Raises:
        UserError: it is no JSON, or a field is wrong; says which, its value and the cure.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})", cure="write one JSON object", field="manifest") from None
    if not isinstance(tree, Mapping):
        raise UserError("is no JSON object", cure="write {…}", field="manifest", value=type(tree).__name__)
    return validate(Manifest, tree)


def load(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        UserError: there is none that can be read, or it is wrong.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="check the path", value=str(path)) from None
    try:
        return parse(text)
    except UserError as error:
        named = UserError(f"{path}: {str(error).removesuffix(f'; {error.cure}')}", cure=error.cure)
        named.field = error.field
        raise named from error


def save(manifest: Manifest, path: Path) -> None:
    """Write a manifest, all at once."""
    write_bytes(path, (manifest.model_dump_json(indent=1) + "\n").encode())


def _check_numbers(field: str, numbers: tuple[int, ...], allowed: range) -> None:
    wrong = [number for number in numbers if number not in allowed]
    if wrong:
        bounds = f"{allowed.start} to {allowed.stop - 1}" if allowed else "no number"
        raise ValueError(f"{field} = {wrong[0]} does not exist: give {bounds}")
