"""What executors know of ranks, as text for files beside the page: bounded, and without secrets. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.run.logs.lines import strip_ansi
from phalanx.run.messages import Evidence, RankEvidence, WorkerEnded

MOST_FILES = 24
"""Beside one page."""

FILE_CHARS = 256 << 10
_RANK_CHARS = 32 << 10
_KERNEL_LINES = 200
_MOST_KEPT = 512

Scrub = Callable[[str], str]


@dataclass(frozen=True)
class Exhibit:
    """A file beside the page.

    Attributes:
        name: of the file, such as ``rank-3.txt``.
        matters: it is kept before others.
    """

    name: str
    text: str
    matters: bool = False


def of_end(host: str, ended: WorkerEnded, scrub: Scrub) -> Exhibit:
    """The last words of a rank."""
    about = f"rank {ended.rank} on {host}, attempt {ended.attempt}: {ended.summary or 'it said nothing'}"
    text = f"{about}\nexit code {ended.code}, at step {ended.step}\n\n{ended.text}".rstrip()
    return Exhibit(f"rank-{ended.rank}.txt", _clean(text, scrub) + "\n", matters=not ended.follows)


def of_evidence(host: str, evidence: Evidence, scrub: Scrub) -> Exhibit:
    """What a host has gathered of its ranks: stacks, and what the kernel said."""
    parts = [f"{host}, attempt {evidence.attempt}, gathered in {evidence.seconds:.2f} s"]
    parts += [_of_rank(rank) for rank in evidence.ranks]
    if evidence.kernel_lines:
        parts.append("\n".join(["kernel log:", *evidence.kernel_lines[-_KERNEL_LINES:]]))
    return Exhibit(f"{_file_name(host)}.txt", _clean("\n\n".join(parts), scrub) + "\n")


def _of_rank(rank: RankEvidence) -> str:
    known = [f"process state {rank.state}"] if rank.state else []
    known += [f"phase {rank.phase}"] if rank.phase else []
    known += [f"step {rank.step}"] if rank.step >= 0 else []
    known += [f"{rank.cpu_s:.1f} s of CPU time"] if rank.cpu_s > 0 else []
    known += [rank.note] if rank.note else []
    silent = "did not answer; " if rank.is_silent else ""
    stacks = rank.stacks[:_RANK_CHARS] or "no stacks"
    record = f"\nflight record:\n{rank.flight_record[:_RANK_CHARS]}" if rank.flight_record else ""
    return f"rank {rank.rank}: {silent}{', '.join(known) or 'nothing is known'}\n{stacks}{record}"


def _clean(text: str, scrub: Scrub) -> str:
    """Without secrets and without anything that moves a terminal."""
    whole = scrub(text)[:FILE_CHARS].encode(errors="replace").decode()
    return "\n".join(strip_ansi(line) for line in whole.split("\n"))


def _file_name(host: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in host).strip(".")[:100] or "host"


class Exhibits:
    """Those of the present attempt, that an incident may want."""

    def __init__(self) -> None:
        self._attempt = self._over = 0
        self._all: dict[str, Exhibit] = {}
        self._wanted: set[str] = set()
        self._written: set[str] = set()

    def add(self, attempt: int, exhibit: Exhibit) -> None:
        """Keep it; a newer attempt's takes the place of all, and of one that is over nothing is kept."""
        if attempt > self._attempt:
            self.clear()
            self._attempt = attempt
        if attempt == self._attempt > self._over and (exhibit.name in self._all or len(self._all) < _MOST_KEPT):
            self._all[exhibit.name] = exhibit
            self._written.discard(exhibit.name)

    def want(self, host: str) -> None:
        """What this host has gathered matters."""
        self._wanted.add(f"{_file_name(host)}.txt")

    def clear(self, over: int = 0) -> None:
        """Forget all; and what still comes of attempts up to `over` belongs to no report any more."""
        self._over = max(self._over, over)
        self._all.clear()
        self._wanted.clear()
        self._written.clear()

    def take(self, already: Iterable[str]) -> list[Exhibit]:
        """Those to be written now, as far as there is room beside those that have been."""
        names = set(already)
        waiting = [one for one in self._all.values() if one.name not in self._written]
        waiting.sort(key=lambda one: not (one.matters or one.name in self._wanted))
        taken = []
        for one in waiting:
            room = MOST_FILES if one.matters or one.name in self._wanted else MOST_FILES // 2
            if one.name in names or len(names) < room:
                names.add(one.name)
                self._written.add(one.name)
                taken.append(one)
        return taken
