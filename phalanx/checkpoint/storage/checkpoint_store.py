"""What durable storage of checkpoints can do (a folder or an object store), and the names in it.

A checkpoint is a flat set of files under a name (``step-00000012``; object stores, which have no rename, add the
attempt and the job: ``step-00000012.a3-1f…``). It is there once it is published; while it is written it is an *area*.
Which checkpoint is the latest, and which attempt may write, is the business of `phalanx.checkpoint.storage.latest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import Files
from phalanx.checkpoint.format.manifest import FileEntry
from phalanx.checkpoint.storage.folder import checkpoint_name

QUARANTINES = ("stale", "sick")
"""Why a checkpoint may be kept aside, the beginning of its name then."""

# Attempt and nonce keep two writers of one step apart where a store has no rename: each has an area of its own, and the
# published one keeps that name.
_NAME = re.compile(r"step-(\d{8,})(?:\.a(\d+)-([A-Za-z0-9]+))?")


class Parsed(NamedTuple):
    """The parts of a checkpoint's name; attempt 0 and no nonce where it has only the step."""

    step: int
    attempt: int = 0
    nonce: str = ""


def parse(name: str) -> Parsed | None:
    """The parts of `name`; None if it is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    # A step has one name alone: `step-000000012`, with a digit too many, would be a second checkpoint of step 12.
    if match is None or not name.startswith(checkpoint_name(int(match[1]))):
        return None
    return Parsed(int(match[1]), int(match[2] or 0), match[3] or "")


def step_of(name: str) -> int:
    """The step in the name of a checkpoint; ValueError: it is not one."""
    parsed = parse(name)
    if parsed is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return parsed.step


def full_name(step: int, attempt: int, nonce: str) -> str:
    """``step-00000012.a3-1f…``; ValueError: `nonce` is not made of letters and digits."""
    if not re.fullmatch("[A-Za-z0-9]+", nonce):
        raise ValueError(f"nonce = {nonce!r}: must be letters and digits only")
    return f"{checkpoint_name(step)}.a{attempt}-{nonce}"


def quarantine_name(why: str, name: str) -> str:
    """``stale-step-00000012.a3-1f…``; ValueError: `why` is not in `QUARANTINES`."""
    if why not in QUARANTINES:
        raise ValueError(f"why = {why!r}: must be one of {', '.join(QUARANTINES)}")
    return f"{why}-{name}"


def quarantined(name: str) -> Parsed | None:
    """The parts of the name of a quarantined checkpoint; None if it is not one."""
    why, _, rest = name.partition("-")
    return parse(rest) if why in QUARANTINES else None


def newest_first(names: list[str]) -> list[str]:
    """Names of checkpoints, kept aside or not, by step and attempt; others are left out."""
    # By numbers, not by text: as text step 100,000,000, of nine digits, comes before step 99,999,999.
    parsed = {name: parse(name) or quarantined(name) for name in names}
    found = [(place, name) for name, place in parsed.items() if place is not None]
    return [name for _, name in sorted(found, reverse=True)]


KEY_MOST_BYTES = 1 << 20
"""The largest small file beside the checkpoints; an entry of the pointer has about 300 bytes, a failure a few lines."""


class SupersededError(RuntimeError):
    """An attempt with a higher number is in charge: this process is a leftover, and must discard what it wrote."""


class Store(Protocol):
    """A place that holds the checkpoints of one run. Refusals are `OSError`s that name the file."""

    @property
    def url(self) -> str:
        """For people, and to open it again."""

    def names(self) -> list[str]:
        """Names of checkpoints that are published, whole or damaged, newest (largest step) first."""

    def quarantined(self) -> list[str]:
        """Names of those that are kept aside (see `quarantine`), newest first."""

    def at(self, name: str) -> Files:
        """The files of a checkpoint, one kept aside, or an area; whether it is there or not."""

    def files(self, name: str) -> list[str]:
        """Names of the files of a checkpoint or an area; empty if there is none."""

    def begin(self, step: int, attempt: int, nonce: str) -> str:
        """The publisher makes the area of a checkpoint, and holds it until it is published or discarded."""

    def join(self, step: int, attempt: int, nonce: str, timeout_s: float) -> str:
        """Other writers wait for that area to be there; TimeoutError: it is not."""

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        """Write a file into an area; when this returns it is durable. Its size and SHA-256 are taken on the way."""

    def publish(self, area: str, step: int) -> str:
        """Make an area a checkpoint, durably, all at once; returns its name. One of the same name is replaced.

        ``manifest.json`` and ``SHA256SUMS`` have been written into it before, through this very store: of object
        stores, ``SHA256SUMS`` is held back until now, since it is what makes the area a checkpoint.

        Raises:
            ValueError: the area was not begun here. OSError: it lacks one of the two files, or storage refuses.
        """

    def discard(self, area: str) -> None:
        """Remove an area, and release it."""

    def quarantine(self, area: str, why: str) -> str:
        """Instead of publishing: keep an area under a name that is not a checkpoint's (``stale-…``, ``sick-…``)."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint; killed half way, no part of it bears its name."""

    def clean(self, attempt: int) -> None:
        """Remove what dead writers of earlier attempts have left."""

    # What follows is for `storage.latest`, which needs no more than that one of several writers wins.
    def create(self, key: str, content: bytes) -> bool:
        """Make a small file beside the checkpoints, durably, only if there is none of this name: whether it was made.
        This is the one conditional operation that all storage has (link(2); ``If-None-Match: *``)."""

    def keys(self, prefix: str) -> list[str]:
        """Names of the small files that begin with `prefix`, and of whatever else bears such a name."""

    def get(self, key: str) -> bytes:
        """One of them; FileNotFoundError if nothing is there, OddFileError if it is not a file, or larger than
        `KEY_MOST_BYTES`."""

    def remove(self, key: str) -> None:
        """Remove one of them, if it is there."""
