"""What every snapshot cost and what became of it, for ``metrics.jsonl``; how long training stood still. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper_contract import Progress, Stage

LOST = "the keeper of a host was lost meanwhile"
"""What becomes of a snapshot that only a keeper had which is gone."""

_FIGURES = {"committed": "examine", "replicated": "replicate", "durable": "persist"}


@dataclass
class Event:
    """A snapshot of this rank that has come to the last of its stages, or will not.

    Attributes:
        step: optimizer steps done.
        persist: whether it was to become a durable checkpoint.
        stall_s: how long training stood still for it, in this process: agreeing, copying, waiting at the fence.
        snapshot_s, snapshot_bytes: copying it, beside training or not.
        examine_s: summing and examining it, in the keeper.
        replicate_s, replicate_bytes: sending it to the keeper of another host; 0: none was asked for.
        persist_s, persist_bytes: writing this rank's part, and publishing; 0: it is not durable.
        durable_s: from the copy until the checkpoint was durable.
        name: of the durable checkpoint; empty: there is none.
        problem: what went wrong; empty: nothing.
        put_off: steps, since the snapshot before, at which one was due and could not be taken.
        skipped: durable checkpoints that were due by steps since the one before and are left out for good.
    """

    step: int
    persist: bool
    stall_s: float = 0.0
    snapshot_s: float = 0.0
    snapshot_bytes: int = 0
    examine_s: float = 0.0
    replicate_s: float = 0.0
    replicate_bytes: int = 0
    persist_s: float = 0.0
    persist_bytes: int = 0
    durable_s: float = 0.0
    name: str = ""
    problem: str = ""
    put_off: int = 0
    skipped: int = 0

    def figures(self) -> dict[str, float]:
        """Those that are numbers, by their names in metrics (``checkpoint/stall_s``)."""
        kept = {name: value for name, value in asdict(self).items() if not isinstance(value, str | bool)}
        return {f"checkpoint/{name}": float(value) for name, value in kept.items() if name != "step"}


@dataclass
class _Open:
    event: Event
    awaits: set[Stage]
    taken_s: float


@dataclass
class Ledger:
    """The snapshots under way, those that have ended since they were last asked for, and what became of the newest one
    that was to become durable: a state, which can be asked for whenever and by whomever the news was heard."""

    put_off: int = 0
    _under_way: dict[int, _Open] = field(default_factory=dict)
    _ended: list[Event] = field(default_factory=list)
    _newest: tuple[int, str | None] = (-1, None)

    @property
    def is_under_way(self) -> bool:
        """Whether some snapshot has not come to its last stage."""
        return bool(self._under_way)

    def begin(self, event: Event, awaits: set[Stage], now_s: float) -> None:
        """A snapshot is taken; it is over when it has come to all stages of `awaits`."""
        event.put_off, self.put_off = self.put_off, 0
        self._under_way[event.step] = _Open(event, awaits, now_s)
        if "durable" in awaits:
            self._newest = (event.step, None)

    def note(self, progress: Progress, now_s: float) -> Event | None:
        """Take in what the keeper tells; the event that became durable by it, if any."""
        found = self._under_way.get(progress.step)
        if found is None:
            return None
        event = found.event
        what = _FIGURES[progress.stage]
        setattr(event, f"{what}_s", progress.seconds)
        if progress.stage != "committed":
            setattr(event, f"{what}_bytes", progress.bytes)
        event.problem = event.problem or progress.problem
        event.name = progress.name or event.name
        found.awaits.discard(progress.stage)
        if progress.stage == "committed" and progress.problem:
            self._settle(progress.step, progress.problem)
            found.awaits.clear()  # what is not committed goes nowhere
        elif progress.stage == "durable":
            self._settle(progress.step, progress.problem)
        if not found.awaits:
            self._end(progress.step)
        if progress.stage != "durable" or progress.problem:
            return None
        event.durable_s = now_s - found.taken_s
        return event

    def awaits_durable(self, step: int) -> bool:
        """Whether the snapshot of `step` is to become durable, and is not yet."""
        found = self._under_way.get(step)
        return found is not None and "durable" in found.awaits

    def outcome(self, step: int) -> str | None:
        """What became of the snapshot of `step`, which was to become durable: empty: it is; else why it is not. None:
        it is on its way."""
        newest, problem = self._newest
        return problem if newest == step else LOST  # no keeper was ever given it

    def lose(self) -> list[int]:
        """The keeper is gone, so nothing more will be heard of what is under way; the steps that were to become
        durable."""
        lost = [step for step in self._under_way if self.awaits_durable(step)]
        for step in list(self._under_way):
            event = self._under_way[step].event
            event.problem = event.problem or "the keeper of this host was lost"
            self._settle(step, LOST)
            self._end(step)
        return lost

    def take_ended(self) -> list[Event]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _settle(self, step: int, problem: str) -> None:
        if self._newest == (step, None):
            self._newest = (step, problem)

    def _end(self, step: int) -> None:
        self._ended.append(self._under_way.pop(step).event)


class Stall:
    """Charges time to the snapshot under way, or to the next one.

    Args:
        is_copying: whether the last snapshot is still being copied, so that waiting is for that.
    """

    def __init__(self, is_copying: Callable[[], bool]) -> None:
        self._is_copying = is_copying
        self._event: Event | None = None
        self._blocked_s = 0.0

    def begin(self, event: Event) -> None:
        """A snapshot is taken: what training waited for since the one before was for this one."""
        event.stall_s, self._blocked_s = self._blocked_s, 0.0
        self._event = event

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time in here is time in which training stands still."""
        began_s = time.perf_counter()
        before = self._event
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_s
            if self._event is not None and (self._event is not before or self._is_copying()):
                self._event.stall_s += seconds  # it was taken in here, or is not copied yet
            else:
                self._blocked_s += seconds


@dataclass
class StepPace:
    """Measures from the beginning of one step to that of the next."""

    clock: Callable[[], float] = time.monotonic
    _last: tuple[int, float] | None = field(default=None)
    _was_plain: bool = True

    def began(self, step: int, auto: AutoInterval, *, is_plain: bool) -> None:
        """A step begins; the one before counts if nothing was under way at either end of it.

        Args:
            step: its number.
            auto: is told.
            is_plain: whether no snapshot is under way.
        """
        now_s = self.clock()
        if self._last is not None and self._last[0] == step - 1 and is_plain and self._was_plain:
            auto.note_step(now_s - self._last[1])
        self._last, self._was_plain = (step, now_s), is_plain
