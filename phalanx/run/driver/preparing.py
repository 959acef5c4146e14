"""What executors have been told to run, and whether they are ready to: soft state of the driver. Torch-free.

What one host's template has learnt to import is handed on to those that are prepared later, and to spares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from phalanx.run.decide.events import Event, Unprepared
from phalanx.run.messages import Hello, Prepare, Prepared
from phalanx.run.now import Now

SETTLES_S = 5.0
"""What was learnt is handed on to spares when nothing new has come for so long: each time costs them a template."""


class Preparing:
    """Of all hosts of a job.

    Args:
        versions: what is to be run, by the version of the code; empty: executors know by themselves.
    """

    def __init__(self, versions: Mapping[str, Prepare]) -> None:
        self._versions = versions
        self._told: dict[str, tuple[str, Prepare]] = {}
        self._problems: dict[str, str] = {}
        self._reported: set[str] = set()
        self._ready: set[str] = set()
        self._learnt: dict[str, list[str]] = {}
        self._grown_s: float | None = None

    def on_hello(self, host: str, hello: Hello, version: str) -> Prepare | None:
        """What a host is told that has connected; it is told the same again, for it may not have heard it."""
        known = self._told.get(host)
        if known is not None and known[0] == version:
            return known[1]
        # Ranks that run there would be ended; a host that they run on has been prepared.
        return None if hello.running else self._tell(host, version)

    def before_start(self, host: str, version: str) -> Prepare | None:
        """What a host is told before it starts ranks; None: it has been told."""
        known = self._told.get(host)
        return None if known is not None and known[0] == version else self._tell(host, version)

    def answered(self, host: str, answer: Prepared, version: str, now: Now) -> list[Event]:
        """A host is ready, or has learnt something, or cannot get ready."""
        told = self._told.get(host)
        if told is None or told[0] != version:
            return []
        if answer.problem:
            self._problems[host] = answer.problem
        else:
            self._ready.add(host)
            self._problems.pop(host, None)
            self._learn(version, answer.learnt, now)
        return self._unprepared(now)

    def renew(self, is_idle: Callable[[str], bool], version: str, now: Now) -> list[tuple[str, Prepare]]:
        """What idle hosts are told because others have learnt more."""
        if self._grown_s is None or now.monotonic_s - self._grown_s < SETTLES_S:
            return []
        self._grown_s = None
        known = set(self._learnt.get(version, ()))
        behind = [
            host
            for host, (theirs, prepare) in self._told.items()
            if theirs == version and host in self._ready and known - {*prepare.preload} and is_idle(host)
        ]
        return [(host, prepare) for host in behind if (prepare := self._tell(host, version)) is not None]

    def forget(self, host: str) -> None:
        """It is gone."""
        self._told.pop(host, None)
        self._forget_answer(host)

    def _tell(self, host: str, version: str) -> Prepare | None:
        plain = self._versions.get(version)
        if plain is None:
            return None
        learnt = [name for name in self._learnt.get(version, ()) if name not in plain.preload]
        prepare = msgspec.structs.replace(plain, preload=[*plain.preload, *learnt])
        self._told[host] = (version, prepare)
        self._forget_answer(host)
        return prepare

    def _forget_answer(self, host: str) -> None:
        self._problems.pop(host, None)
        self._reported.discard(host)
        self._ready.discard(host)

    def _learn(self, version: str, learnt: Iterable[str], now: Now) -> None:
        known = self._learnt.setdefault(version, [])
        new = [name for name in learnt if name not in set(known)]
        if new:
            known += new
            self._grown_s = now.monotonic_s

    def _unprepared(self, now: Now) -> list[Event]:
        """Hosts that have not been told of, once it is clear whether they or the script is wrong."""
        open_ones = {host: text for host, text in self._problems.items() if host not in self._reported}
        is_common = not self._ready and 2 * len(self._problems) > len(self._told)
        if not (self._ready or is_common):
            return []
        self._reported |= set(open_ones)
        return [Unprepared(now.unix_s, host, text, is_common) for host, text in open_ones.items()]
