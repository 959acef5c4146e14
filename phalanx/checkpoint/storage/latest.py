"""The pointer to the latest checkpoint, which is also the fence against leftovers of earlier attempts.

The pointer is a row of small files, ``latest-00000001.json``, ``latest-00000002.json`` …, each made by exclusive
creation (`Store.create`) with the number after the highest there is; the highest counts. So writers change it one after
another, on every storage that has this one conditional operation:

- An attempt begins by *claiming*: it appends an entry with its own, higher number; what the entry points to is kept.
- Its publisher *advances* the pointer when a checkpoint is there. If it finds an entry of a higher attempt instead, it
  is a leftover itself (`SupersededError`).

An entry names the one before it by that one's `mark`. That way a writer that was asleep between looking and writing,
while others wrote and cleared up, sees that its entry went into a gap and does not count.

A restore tries the checkpoints of a store in the order that follows from it (`RestoreOrder`).
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from phalanx.checkpoint.format.checkpoint_files import json_sum, summed_json
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError, step_of
from phalanx.core.errors import UserError
from phalanx.core.files import OddFileError, StoreFailedError

_PREFIX = "latest-"
_KEY = re.compile(r"latest-([0-9]{8,})\.json")
_KEPT = 16  # entries that stay: more than others can append while one writer looks whether its own is in the row
_LOOKS = 1000  # of one writer while others append, and come before it each time
# Looks that show the same entry that counts although nothing can be appended after it: with the pauses between, 10 s,
# which is more than a listing lags behind (NFS: 3 s).
_STILL_LOOKS = 16
_PAUSES_S = (0.01, 1.0)  # after the first of them, doubled from then on, and the longest

Pause = Callable[[float], None]


@dataclass(frozen=True)
class Latest:
    """An entry of the pointer.

    Attributes:
        number: its place in the row.
        attempt: which attempt is in charge.
        step, name: of the latest checkpoint; -1 and empty while there is none.
        mark: random; distinguishes this entry from any other.
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
        return summed_json(asdict(self))

    @staticmethod
    def from_bytes(content: bytes, number: int) -> Latest:
        """The entry of that number that `to_bytes` wrote; ValueError: it is damaged, or not an entry."""
        try:
            tree = json.loads(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(tree, dict):
            raise ValueError("it is no JSON object")
        if tree.pop("sha256", None) != json_sum(tree):
            raise ValueError("it does not match its checksum")
        try:
            entry = Latest(**tree)
        except TypeError:
            raise ValueError("it has other fields") from None
        if entry.number != number:
            raise ValueError(f"it is entry {entry.number}")
        return entry


def ignore(line: str) -> None:
    """The default of `report`."""


def read_latest(store: Store, report: Callable[[str], None] = ignore) -> Latest | None:
    """The entry that counts, or None where there is none that can be read; `report` gets a line for each newer entry
    that cannot be read.

    Raises:
        OSError: storage refuses to list the entries; StoreFailedError: an object store does not give one.
    """
    return _look(store, report, forgive=True).entry


def claim(store: Store, at_least: int = 0, report: Callable[[str], None] = ignore, pause: Pause = time.sleep) -> int:
    """Put a new attempt in charge, and return its number, higher than all before; no other claim gets it.

    Args:
        at_least: the highest attempt that is known from elsewhere.
        report: as of `read_latest`.
        pause: waits so many seconds.

    Raises:
        OSError: storage refuses. UserError: nothing can be appended, whatever lies there.
    """
    for row in _rows(store, pause, report):
        former = row.entry or Latest(0, 0)
        # Each entry that cannot be read may have been a claim.
        attempt = max(former.attempt + row.unread, at_least) + 1
        if _append(store, row, attempt, (former.step, former.name, former.manifest_sha256)):
            return attempt
    raise AssertionError("unreachable")


def advance(store: Store, attempt: int, step: int, name: str, manifest_sha256: str, pause: Pause = time.sleep) -> None:
    """Point to the checkpoint `name` of `step`, which is there, for the attempt in charge.

    Raises:
        SupersededError: a higher attempt is in charge.
        OSError: storage refuses. UserError: nothing can be appended, whatever lies there.
    """
    for row in _rows(store, pause):
        require_charge(row.entry, attempt)
        if _append(store, row, attempt, (step, name, manifest_sha256)):
            return


def require_charge(latest: Latest | None, attempt: int) -> None:
    """Raise SupersededError where a higher attempt is in charge, so that `attempt` must not write any more."""
    if latest is not None and latest.attempt > attempt:
        raise SupersededError(
            f"attempt {latest.attempt} is in charge (entry {latest.number} of the pointer), not attempt {attempt}"
        )


def superseded(error: Exception) -> UserError:
    """The error for people where a process finds out, by `error`, that it is a leftover."""
    return UserError(
        f"a later attempt of this run has begun ({error}), so this one must not write checkpoints any more",
        cure="let the later one go on; if it is not there any more either, start the run again",
    )


@dataclass(frozen=True)
class _Row:
    """What a look at the pointer showed: the entry that counts, the highest number, and how many between are unread."""

    entry: Latest | None
    highest: int
    unread: int


def _rows(store: Store, pause: Pause, report: Callable[[str], None] = ignore) -> Iterator[_Row]:
    """What a writer sees each time it looks, for as long as there is hope that it may append: never for ever."""
    seen: Latest | None = None
    still = 0
    for looks in range(_LOOKS):
        row = _look(store, ignore if looks else report, pause=pause)
        # Entries are compared, not the highest numbers: those grow also by what this writer appends and cannot read.
        still = still + 1 if looks and row.entry == seen else 0
        if still >= _STILL_LOOKS:
            break
        # Nothing has changed since the last look: the listing may lag behind, so wait longer each time.
        if still:
            pause(_after(still))
        seen = row.entry
        yield row
    raise _no_way(store, row.highest + 1, "no entry of the pointer can be made of this name, or read back")


def _after(looks: int) -> float:
    first, longest = _PAUSES_S
    return min(float(first * 2 ** (looks - 1)), longest)


def _no_way(store: Store, number: int, why: str) -> UserError:
    cure = "look at what lies there, remove it if it is none of this run's, and start again"
    return UserError(f"{_key(number)}: {why}", cure=cure, field=store.url)


def _look(store: Store, report: Callable[[str], None], *, forgive: bool = False, pause: Pause = time.sleep) -> _Row:
    """The newest entry that can be read.

    Where an entry cannot be read because storage fails, rather than because it is damaged, a writer must not go on: it
    might be that of a higher attempt. A reader may (`forgive`) where it lies on a disk; an object store that fails now
    may answer later, and the entry before is that of an older checkpoint.
    """
    number = 0
    for looks in range(_STILL_LOOKS):
        if looks:
            pause(_after(looks))
        numbers = _numbers(store)
        unread = 0
        for number in numbers:
            try:
                entry = Latest.from_bytes(store.get(_key(number)), number)
            except FileNotFoundError:
                break  # cleared up since it was listed, so newer ones are there
            except (OSError, ValueError) as error:
                is_odd = isinstance(error, OddFileError)
                may_pass = is_odd or (forgive and not isinstance(error, StoreFailedError))
                if isinstance(error, OSError) and not may_pass:
                    raise
                unread += 1
                why = f"{error.strerror}: remove it" if isinstance(error, OddFileError) else str(error)
                report(f"{_key(number)} in {store.url} cannot be read ({why}); the entry before it is used")
            else:
                return _Row(entry, numbers[0], unread)
        else:
            return _Row(None, numbers[0] if numbers else 0, unread)
    raise _no_way(store, number, "it is listed, and cannot be opened")


def _append(store: Store, row: _Row, attempt: int, target: tuple[int, str, str]) -> bool:
    """Append an entry after the row that was seen; False: another one was faster, so look again."""
    # The mark of the entry before shows, after a gap, whether this one was appended to what its writer had seen.
    after = row.entry.mark if row.entry is not None else ""
    entry = Latest(row.highest + 1, attempt, *target, mark=secrets.token_hex(8), after=after)
    store.create(_key(entry.number), entry.to_bytes())
    # Not what `create` answers but what lies there says whose entry it is: an answer may have been lost on the network.
    if _read(store, entry.number) != entry:
        return False
    numbers = _numbers(store)
    following = None if entry.number == max(numbers, default=0) else _read(store, entry.number + 1)
    if entry.number != max(numbers, default=0) and (following is None or following.after != entry.mark):
        store.remove(_key(entry.number))  # it went into a gap that clearing up had left
        return False
    # The oldest first, and never the newest, whose number would be used again.
    for number in reversed(numbers):
        if number <= numbers[0] - _KEPT:
            with contextlib.suppress(OSError):
                store.remove(_key(number))
    return True


def _read(store: Store, number: int) -> Latest | None:
    try:
        return Latest.from_bytes(store.get(_key(number)), number)
    except (FileNotFoundError, OddFileError, ValueError):
        return None


def _numbers(store: Store) -> list[int]:
    """Highest first; of names as `_key` gives them only."""
    matches = ((key, _KEY.fullmatch(key)) for key in store.keys(_PREFIX))
    found = [int(match[1]) for key, match in matches if match is not None and _key(int(match[1])) == key]
    return sorted(found, reverse=True)


def _key(number: int) -> str:
    return f"{_PREFIX}{number:08d}.json"


class RestoreOrder:
    """The pointer's checkpoint, then older ones; all, where the pointer names none (or there is no pointer).

    `report` is called with one line, once, for what is passed over without being tried.
    """

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._reported: set[str] = set()

    def names(self) -> list[tuple[str, str]]:
        """Name, and what the checksum of the manifest has to be where that is known; as things stand now."""
        latest = read_latest(self._store, self._report_once)
        names = self._store.names()
        if latest is None or not latest.name:
            return [(name, "") for name in names]
        for line in _passed_over(self._store, names, latest):
            self._report_once(line)
        older = [(name, "") for name in names if step_of(name) < latest.step]
        return ([(latest.name, latest.manifest_sha256)] if latest.name in names else []) + older

    def passed_over(self) -> list[str]:
        """A line for each that `names` leaves out, as things stand now."""
        latest = read_latest(self._store)
        return [] if latest is None or not latest.name else _passed_over(self._store, self._store.names(), latest)

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)


def _passed_over(store: Store, names: list[str], latest: Latest) -> list[str]:
    others = [name for name in names if step_of(name) >= latest.step and name != latest.name]
    why = f"was not published by the attempt in charge, whose latest is {latest.name}; it is not used"
    gone = [] if latest.name in names else [f"checkpoint {latest.name}, the latest, {_why_gone(store, latest.name)}"]
    return [*(f"checkpoint {name} {why}" for name in others), *gone]


def _why_gone(store: Store, name: str) -> str:
    before = "; trying the one before it"
    if name not in store.keys(name):
        return f"is gone{before}"
    try:
        store.get(name)
        what = "it is a file"
    except OSError as error:
        what = error.strerror or str(error)
    return f"is none ({what}): that is moved aside when the step is written again{before}"
