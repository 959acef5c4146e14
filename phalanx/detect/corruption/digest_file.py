"""Digests of a run's state, in ``RUN/telemetry/digests.jsonl``: what training writes and judges read.

Of every step that was checked one line holds a digest of each whole tensor, whatever ranks hold of it:

    {"kind": "digests", "step": 100, "start": 1, "unix_s": 1764080000.0, "layout": "dp4",
     "of": {"gradient": {"embedding": "00000c4e…", …}, "weight": {…}, "optimizer": {"embedding.exp_avg": "…", …}},
     "compared": 96, "unlike": 0}

``gradient`` is what the update of that step was made from (left out where a step was checked only because a checkpoint
was due), ``weight`` and ``optimizer`` are the state after it. Names are the logical ones of checkpoints, in the order
of the model. ``start`` is the attempt of the run as checkpoints count it: a step that was made again counts as it was
made last. ``compared`` is how many tensors had copies on other ranks, ``unlike`` how many of those differed.

A digest is of the bits, so that one flipped bit, or two elements that changed places, give another. It is 32
hexadecimal digits: two sums modulo 2^64 over the words of the tensor, read as int32 in row-major order,

    sum(word[i])        sum((2 * i + 1) * word[i])

An element of four bytes is a word; other types are read as bytes, four to a word, the last filled up with zeros. Since
sums of parts add up, the digest of a tensor of float32 does not depend on how it is split over ranks. (Of other types,
such as quantised moments, it does: compare those of runs of one layout.)

For each tensor whose copies differed there is a line of its own, before that of its step:

    {"kind": "copies", "step": 100, "start": 1, "unix_s": …, "quantity": "weight", "tensor": "layers.0.attention.q",
     "digests": {"0": "…", "1": "…", "2": "…"}, "hosts": {"0": "h0", …}, "programs": {"0": "5f2c…", …}, "agreed": 50}

``digests`` are of the part that all of these ranks hold; ``programs`` tells whether the ranks compute alike (the same
libraries, device and number of threads); ``agreed`` is the last step at which all copies were equal, -1: none was seen.

And for each micro-batch that a neighbour computed again with other bits:

    {"kind": "replay", "step": 200, "start": 1, "unix_s": …, "digests": {"0": {"0": "…", "1": "…"}, …}, "hosts": …,
     "programs": …, "agreed": 100}

where ``digests[owner][by]`` is that of the loss and the gradients of the micro-batch of `owner`, computed by `by`.

A step whose gradient norm jumped and was another when the step was computed again:

    {"kind": "recomputed", "step": 300, "start": 1, "unix_s": …, "first": "812.5", "second": "1.0625"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phalanx.telemetry.loggers import parse_line

Quantity = Literal["gradient", "weight", "optimizer"]

QUANTITIES: tuple[Quantity, ...] = ("gradient", "weight", "optimizer")
"""In the order in which a step makes them."""

FILE = Path("telemetry") / "digests.jsonl"

_MASK = (1 << 64) - 1


def digest_text(plain: int, weighted: int) -> str:
    """The two sums of a tensor, which may be negative, as 32 hexadecimal digits."""
    return f"{plain & _MASK:016x}{weighted & _MASK:016x}"


@dataclass(frozen=True)
class StepDigests:
    """Digests of the whole state of a step, by quantity and tensor; in the order of the model."""

    step: int
    start: int
    unix_s: float
    layout: str
    of: Mapping[Quantity, Mapping[str, str]]
    compared: int = 0
    unlike: int = 0


@dataclass(frozen=True)
class UnlikeCopies:
    """A tensor of which ranks hold parts that should be equal, and that are not all.

    Attributes:
        digests: by rank.
        hosts: of these ranks.
        programs: what decides their arithmetic besides the data, as a text to compare.
        agreed: the last step at which all copies were equal; -1: none was seen.
    """

    step: int
    start: int
    unix_s: float
    quantity: Quantity
    tensor: str
    digests: Mapping[int, str]
    hosts: Mapping[int, str] = field(default_factory=dict)
    programs: Mapping[int, str] = field(default_factory=dict)
    agreed: int = -1


@dataclass(frozen=True)
class UnlikeReplays:
    """Micro-batches that were computed by more than one rank, and that did not give the same bits every time.

    Attributes:
        digests: of loss and gradients, by the rank that the micro-batch belongs to and the rank that computed it.
    """

    step: int
    start: int
    unix_s: float
    digests: Mapping[int, Mapping[int, str]]
    hosts: Mapping[int, str] = field(default_factory=dict)
    programs: Mapping[int, str] = field(default_factory=dict)
    agreed: int = -1


@dataclass(frozen=True)
class RecomputedStep:
    """A step that was computed twice and gave two gradient norms, which may be infinite or NaN."""

    step: int
    start: int
    unix_s: float
    first: str
    second: str


Record = StepDigests | UnlikeCopies | UnlikeReplays | RecomputedStep

_KINDS: dict[str, type[Record]] = {
    "digests": StepDigests,
    "copies": UnlikeCopies,
    "replay": UnlikeReplays,
    "recomputed": RecomputedStep,
}


def append_digests(run: Path, records: Sequence[Record]) -> None:
    """Add lines, in one write.

    Raises:
        OSError: the file cannot be written.
    """
    names = {made: kind for kind, made in _KINDS.items()}
    lines = "".join(json.dumps({"kind": names[type(one)]} | vars(one)) + "\n" for one in records)
    path = run / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, lines.encode())
    finally:
        os.close(descriptor)


def read_records(run: Path) -> Iterator[Record]:
    """Every line of a run in the order of writing; none where no digests were written. Torn lines are left out."""
    try:
        file = (run / FILE).open("rb")
    except OSError:
        return
    with file:
        for entry in filter(None, map(parse_line, file)):
            made = _KINDS.get(entry.pop("kind"))
            if made is not None and (record := _record(made, entry)) is not None:
                yield record


def read_digests(run: Path) -> dict[int, StepDigests]:
    """Digests by step, ascending; of a step that was made more than once, as it was made last."""
    found = {one.step: one for one in read_records(run) if isinstance(one, StepDigests)}
    return {step: found[step] for step in sorted(found)}


class SuspectSpan(NamedTuple):
    """States of one start of a run that are suspect: those after `agreed` and up to `last`.

    Attributes:
        agreed: the last step at which all was equal; -1: none was seen.
        found: the last step at which it was not.
        last: the step before copies were found equal again; None: they were not, so all that came after is suspect.
    """

    start: int
    agreed: int
    found: int
    last: int | None

    def cause(self, start: int, step: int) -> str:
        """Why a state of this start and step is not to be used; empty: it may be."""
        if start != self.start or step <= self.agreed or (self.last is not None and step > self.last):
            return ""
        since = f"since step {self.agreed}" if self.agreed >= 0 else "in its attempt"
        return f"silent corruption was found at step {self.found}, and nothing was known to be good {since}"


def suspect_spans(run: Path) -> list[SuspectSpan]:
    """Starts of a run in which state was found to differ.

    Where ranks did not compute alike it is rounding that differs, and nothing is suspect.
    """
    spans: dict[int, tuple[int, int]] = {}
    equal: dict[int, list[int]] = {}
    for one in read_records(run):
        if isinstance(one, StepDigests) and not one.unlike:
            equal.setdefault(one.start, []).append(one.step)
        if isinstance(one, UnlikeCopies | UnlikeReplays) and len(set(one.programs.values())) <= 1:
            agreed, found = spans.get(one.start, (one.agreed, one.step))
            spans[one.start] = min(agreed, one.agreed), max(found, one.step)
    found_spans = []
    for start, (agreed, found) in spans.items():
        again = min((step for step in equal.get(start, ()) if step > found), default=None)
        found_spans.append(SuspectSpan(start, agreed, found, None if again is None else again - 1))
    return found_spans


def _record(made: type[Record], entry: dict[str, Any]) -> Record | None:
    """None: a line of another version, or of another program."""
    for name in ("hosts", "programs") + (("digests",) if made in (UnlikeCopies, UnlikeReplays) else ()):
        if isinstance(entry.get(name), dict):
            entry[name] = _by_rank(entry[name])
    try:
        return made(**{name: entry[name] for name in made.__dataclass_fields__ if name in entry})
    except TypeError:
        return None


def _by_rank(values: Mapping[str, Any]) -> dict[int, Any]:
    """JSON has no numbers for keys."""
    return {
        int(rank): _by_rank(value) if isinstance(value, dict) else value
        for rank, value in values.items()
        if rank.isdecimal()
    }
