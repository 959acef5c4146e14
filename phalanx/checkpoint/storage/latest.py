"""The pointer to the latest checkpoint, which is also the fence against leftovers of earlier attempts. Torch-free.

The pointer is a row of small files, ``latest-00000001.json``, ``latest-00000002.json`` …, each made by exclusive
creation (`Store.create`) with the number after the highest there is; the highest counts. So writers change it one after
another, whoever they are, on every storage that has this one conditional operation:

- An attempt begins by *claiming*: it appends an entry with its own, higher number; what the entry points to is kept.
- Its publisher *advances* the pointer when a checkpoint is there. If it finds an entry of a higher attempt instead, it
  is a leftover itself, and is told so.

An entry names the one before it by that one's `mark`. That way a writer that was asleep between looking and writing,
while others wrote and cleared up, sees that its entry went into a gap and counts for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass

from phalanx.checkpoint.storage.base import Store, SupersededError

_PREFIX = "latest-"
_KEY = re.compile(r"latest-(\d{8,})\.json")
_KEPT = 16
"""Entries that stay; more than others can append while one writer looks whether its own is in the row."""


@dataclass(frozen=True)
class Latest:
    """An entry of the pointer.

    Attributes:
        number: its place in the row.
        attempt: which attempt is in charge.
        step, name: of the latest checkpoint; -1 and empty while there is none.
        manifest_sha256: of its ``manifest.json``.
        mark: random; tells this entry from any other.
        after: the mark of the entry before.
    """

    number: int
    attempt: int
    step: int = -1
    name: str = ""
    manifest_sha256: str = ""
    mark: str = ""
    after: str = ""

    def to_bytes(self) -> bytes:
        """As JSON with a checksum of itself."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _sum(tree)}, indent=1).encode() + b"\n"

    @staticmethod
    def from_bytes(content: bytes, number: int) -> Latest:
        """The entry of that number that `to_bytes` wrote.

        Raises:
            ValueError: it is damaged, or no entry.
        """
        try:
            tree = json.loads(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(tree, dict):
            raise ValueError("it is no JSON object")
        if tree.pop("sha256", None) != _sum(tree):
            raise ValueError("it does not match its checksum")
        try:
            entry = Latest(**tree)
        except TypeError:
            raise ValueError("it has other fields") from None
        if entry.number != number:
            raise ValueError(f"it is entry {entry.number}")
        return entry


def ignore(line: str) -> None:
    """For the default of a parameter: what is reported is not wanted."""


def read_latest(store: Store, report: Callable[[str], None] = ignore) -> Latest | None:
    """The entry that counts, or None where there is none that can be read.

    Args:
        store: where to look.
        report: is called with one line for each newer entry that cannot be read.
    """
    return _look(store, report, forgive=True).entry


def claim(store: Store, at_least: int = 0) -> int:
    """Put a new attempt in charge.

    Args:
        store: where the pointer is.
        at_least: the highest attempt that is known from elsewhere.

    Returns:
        The number of the new attempt, higher than all before; no other claim gets it.

    Raises:
        OSError: storage refuses.
    """
    while True:
        row = _look(store, ignore)
        former = row.entry or Latest(0, 0)
        # Each entry that cannot be read may have been a claim.
        attempt = max(former.attempt + row.unread, at_least) + 1
        if _append(store, row, attempt, (former.step, former.name, former.manifest_sha256)):
            return attempt


def advance(store: Store, attempt: int, step: int, name: str, manifest_sha256: str) -> None:
    """Point to the checkpoint `name` of `step`, which is there, for the attempt in charge.

    Raises:
        SupersededError: a higher attempt is in charge.
        OSError: storage refuses.
    """
    while True:
        row = _look(store, ignore)
        require_charge(row.entry, attempt)
        if _append(store, row, attempt, (step, name, manifest_sha256)):
            return


def require_charge(latest: Latest | None, attempt: int) -> None:
    """Find out whether `attempt` may still write.

    Raises:
        SupersededError: a higher attempt is in charge.
    """
    if latest is not None and latest.attempt > attempt:
        raise SupersededError(
            f"attempt {latest.attempt} is in charge (entry {latest.number} of the pointer), not attempt {attempt}"
        )


@dataclass(frozen=True)
class _Row:
    """What a look at the pointer showed: the entry that counts, the highest number, and how many between are unread."""

    entry: Latest | None
    highest: int
    unread: int


def _look(store: Store, report: Callable[[str], None], *, forgive: bool = False) -> _Row:
    """Where an entry cannot be read because storage fails, rather than because it is damaged, a writer must not go on:
    it might be that of a higher attempt. A reader may (`forgive`)."""
    while True:
        numbers = _numbers(store)
        unread = 0
        for number in numbers:
            try:
                entry = Latest.from_bytes(store.get(_key(number)), number)
            except FileNotFoundError:
                break  # cleared up since it was listed, so newer ones are there
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and not forgive:
                    raise
                unread += 1
                report(f"{_key(number)} in {store.url} cannot be read ({error}); the entry before it is used")
            else:
                return _Row(entry, numbers[0], unread)
        else:
            return _Row(None, numbers[0] if numbers else 0, unread)


def _append(store: Store, row: _Row, attempt: int, target: tuple[int, str, str]) -> bool:
    """Append an entry after the row that was seen; False: another one was faster, so look again."""
    after = row.entry.mark if row.entry is not None else ""
    entry = Latest(row.highest + 1, attempt, *target, mark=secrets.token_hex(8), after=after)
    store.create(_key(entry.number), entry.to_bytes())
    # Not what `create` answers but what lies there says whose entry it is: an answer may have been lost on the network.
    if _read(store, entry.number) != entry:
        return False
    numbers = _numbers(store)
    if not _is_in_row(store, entry, numbers):
        store.remove(_key(entry.number))  # it went into a gap that clearing up had left
        return False
    _clear_up(store, numbers)
    return True


def _is_in_row(store: Store, entry: Latest, numbers: list[int]) -> bool:
    if entry.number == max(numbers, default=0):
        return True
    following = _read(store, entry.number + 1)
    return following is not None and following.after == entry.mark


def _read(store: Store, number: int) -> Latest | None:
    try:
        return Latest.from_bytes(store.get(_key(number)), number)
    except (FileNotFoundError, ValueError):
        return None


def _clear_up(store: Store, numbers: list[int]) -> None:
    """Remove old entries, the oldest first; never the newest, whose number would be used again."""
    for number in reversed(numbers):
        if number <= numbers[0] - _KEPT:
            with contextlib.suppress(OSError):
                store.remove(_key(number))


def _numbers(store: Store) -> list[int]:
    """Highest first."""
    matches = (_KEY.fullmatch(key) for key in store.keys(_PREFIX))
    return sorted((int(match[1]) for match in matches if match is not None), reverse=True)


def _key(number: int) -> str:
    return f"{_PREFIX}{number:08d}.json"


def _sum(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
