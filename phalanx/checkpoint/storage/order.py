"""In which order the checkpoints of a store are tried when one is to be restored. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.latest import Latest, read_latest
from phalanx.checkpoint.storage.names import step_of


class Order:
    """The pointer's checkpoint, then older ones; all, where the pointer names none (or there is no pointer).

    Args:
        store: where they are.
        report: is called with one line, once, for what is passed over without being tried.
    """

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._told: set[str] = set()

    def names(self) -> list[tuple[str, str]]:
        """Name, and what the checksum of the manifest has to be where that is known; as things stand now."""
        latest = read_latest(self._store, self._tell)
        names = self._store.names()
        if latest is None or not latest.name:
            return [(name, "") for name in names]
        for line in _passed_over(self._store, names, latest):
            self._tell(line)
        older = [(name, "") for name in names if step_of(name) < latest.step]
        return ([(latest.name, latest.manifest_sha256)] if latest.name in names else []) + older

    def passed_over(self) -> list[str]:
        """A line for each that `names` leaves out, as things stand now."""
        latest = read_latest(self._store)
        return [] if latest is None or not latest.name else _passed_over(self._store, self._store.names(), latest)

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
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
