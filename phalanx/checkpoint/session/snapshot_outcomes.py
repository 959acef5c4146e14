"""What every snapshot of a rank cost and what becomes of it: the ledger of ``metrics.jsonl``; waiting for the last one.

The keeper tells it, training may wait for it, other hosts may have to hear it. What is waited for is a state, which the
ledger has, and never a message: that may have been heard long before. Where the keeper is lost, this rank itself tells
the persisters of other hosts that its part of a checkpoint will not come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial

from phalanx.checkpoint.all_ranks import at_first
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper_contract import Keeper, KeeperLostError, SnapshotProgress, Stage
from phalanx.checkpoint.persist.publication import Writing, forget_failure, withdraw
from phalanx.checkpoint.session.keeper_link import KeeperLink, SessionContext
from phalanx.checkpoint.snapshot_schedule import SnapshotAgenda
from phalanx.checkpoint.storage.checkpoint_store import SupersededError
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError
from phalanx.core.progress import say_checkpoints

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

    def note(self, progress: SnapshotProgress, now_s: float) -> Event | None:
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


@dataclass
class GivingUp:
    """What this rank has to say; storage is written beside training.

    Without a word the publisher would wait for the part until `Destination.timeout_s` is over, and others, where the
    publisher itself is gone, twice as long; no other checkpoint could be made durable until then.

    Args:
        job: whose checkpoints.

    Attributes:
        set_id: of the present snapshots.
    """

    job: SessionContext
    set_id: str = ""
    _telling: list[threading.Thread] = field(default_factory=list)

    def tell(self, step: int, problem: str) -> None:
        """The part of this rank of the checkpoint of `step` does not come because of `problem`; does not wait."""
        writing = Writing(step, self.job.attempt, self.set_id, self.job.destination.nonce)
        thread = threading.Thread(target=self._tell, args=(writing, problem), name="giving up", daemon=True)
        self._telling = [one for one in self._telling if one.is_alive()] + [thread]
        thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until all is told, or for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._telling:
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _tell(self, writing: Writing, problem: str) -> None:
        destination = self.job.destination
        try:
            withdraw(open_store(destination.url, destination.options), writing, self.job.peers.rank, problem)
        except SupersededError:
            pass  # then nobody waits for it
        except (OSError, UserError) as error:
            self.job.report(
                f"snapshot of step {writing.step}: the persisters of other hosts cannot be told that it will not be "
                f"durable ({error}); they wait for it for up to {2 * destination.timeout_s:.0f} s"
            )


class News:
    """Takes in what has happened to snapshots since it was last asked.

    Args:
        job: of this rank.
        link: to the keeper.
        ledger: what the snapshots have cost.
        agenda: learns what a durable checkpoint has cost.
        giving_up: tells others of what will not become durable.

    Attributes:
        newest: name of the newest durable checkpoint that this rank has heard of; empty: none.
        no_memory: why there is no memory for snapshots; empty: there is.
    """

    def __init__(
        self, job: SessionContext, link: KeeperLink, ledger: Ledger, agenda: SnapshotAgenda, giving_up: GivingUp
    ) -> None:
        self._job, self._link, self._ledger = job, link, ledger
        self._agenda, self._giving_up = agenda, giving_up
        self._losses = 0
        self.newest = ""
        self.no_memory = ""

    def collect(self) -> None:
        """Ask the keeper."""
        self.take_in(self._link.ask(lambda keeper: keeper.poll(), []))

    def take_in(self, progress: list[SnapshotProgress]) -> None:
        """Note what the keeper has told, and whether it was lost."""
        for one in progress:
            if one.step < 0:
                self.no_memory = f"rank {self._job.peers.rank} has no memory for snapshots on its host: {one.problem}"
                self._job.report(f"{self.no_memory}; no checkpoints can be taken")
            elif one.problem and self._concerns_us(one):
                self._job.report(f"snapshot of step {one.step}: not {one.stage}: {one.problem}")
            self._note(one)
        if self._link.losses > self._losses:
            self._losses = self._link.losses
            for step in self._ledger.lose():
                self.lost(step)

    def lost(self, step: int) -> None:
        """The keeper was lost before the snapshot of `step` was durable."""
        rank = self._job.peers.rank
        self._giving_up.tell(step, f"the keeper of rank {rank}'s host was lost before the checkpoint was published")

    def _note(self, one: SnapshotProgress) -> None:
        if one.stage == "committed" and one.problem and self._ledger.awaits_durable(one.step):
            self._giving_up.tell(one.step, one.problem)
        event = self._ledger.note(one, time.monotonic())
        if event is not None:
            self.newest = event.name
            self._agenda.durable(event.stall_s, event.durable_s)
            if self._job.peers.rank == 0:
                self._say_pace()

    def _say_pace(self) -> None:
        """What storage can keep up with: to people where that is new, and to whoever supervises this rank."""
        pace = self._agenda.keeping_up
        line = pace.news()
        if line:
            self._job.report(line)
        say_checkpoints(os.environ, pace.explanation)

    def _concerns_us(self, progress: SnapshotProgress) -> bool:
        """What all ranks are told alike, rank 0 tells."""
        return progress.stage != "durable" or self._job.peers.rank == 0


_LOOK_S = 0.01  # between two looks at a keeper that is busy
_TRIES = 2


@dataclass
class LastCheckpoint:
    """The checkpoint that training waits for, all ranks together.

    Args:
        job: its `final_timeout_s` bounds all waiting.
        link: to the keeper.
        collect: is given whatever the keeper tells meanwhile, and takes note of a keeper that was lost.
        outcome: see `phalanx.checkpoint.session.snapshot_outcomes.Ledger.outcome`.
        hopeless: says why waiting is in vain, such as no memory; empty: it is not; None: this rank has no part of the
            checkpoint, and waits for the others only.
        giving_up: tells other hosts when the keeper of this one is lost.
    """

    job: SessionContext
    link: KeeperLink
    collect: Callable[[list[SnapshotProgress]], None]
    outcome: Callable[[int], str | None]
    hopeless: Callable[[], str | None]
    giving_up: GivingUp
    _deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline_s = time.monotonic() + self.job.config.final_timeout_s

    def make(self, step: int, take: Callable[[], None], newest: Callable[[], str], *, is_taken: bool) -> None:
        """Take the checkpoint of `step` as soon as all ranks can, and wait until it is durable.

        Args:
            take: copies the snapshot and tells the keeper.
            newest: name of the newest durable checkpoint so far; for people.
            is_taken: it was taken when the step was done, and is taken again only if nothing comes of that.

        Raises:
            UserError: it is not durable: why; on all ranks.
        """
        if is_taken and not self._agreed(self._until_durable(step)):
            return
        problem = ""
        for _ in range(_TRIES):
            problem = self._agreed(self.until_free(even_lost=True))
            if not problem:
                at_first(self.job.peers, partial(self._forget, step))
                take()
                problem = self._agreed(self._until_durable(step))
            if not problem.endswith(LOST):
                break
        if problem:
            known = f"the newest that is durable is {newest()}" if newest() else "none became durable before it"
            cure = "put that right and start the run again: it goes on from the newest good copy of its state"
            problem = f"the last checkpoint (step {step}) is not durable, {known}: {problem}"
            raise UserError(problem, cure=cure, field=self.job.destination.url)

    def wait(self, step: int) -> None:
        """Wait until the checkpoint of `step`, which was taken, is durable, or will not be, on all ranks."""
        self._agreed(self._until_durable(step))

    def until_free(self, *, even_lost: bool) -> str:
        """Wait until a snapshot of this rank can be taken and made durable; or why it cannot.

        Args:
            even_lost: a keeper that is lost is waited for, too.
        """
        self.giving_up.settle(self._left_s)  # or it would be taken for the next try's
        if self.hopeless() is None:
            return ""
        while self.link.ask(lambda keeper: keeper.busy or keeper.persisting, even_lost):
            self.collect(self.link.ask(lambda keeper: keeper.poll(), []))
            problem = self.hopeless()
            if problem:
                return problem
            if time.monotonic() > self._deadline_s:
                return self._too_late("the snapshot before it is still being written, or there is no memory for one")
            time.sleep(_LOOK_S)
        self.collect(self.link.ask(lambda keeper: keeper.poll(), []))  # what made it free is known when it was
        return ""

    def _agreed(self, mine: str) -> str:
        """The first problem that any rank has, on all of them; a lost keeper comes before what follows from it."""
        if self.job.peers.size == 1:
            return mine
        rank = self.job.peers.rank
        first = self.job.peers.lowest([not mine.endswith(LOST), rank, mine] if mine else None)
        return f"rank {first[1]}: {first[2]}" if first else ""

    def _forget(self, step: int) -> None:
        """What was told of an earlier try at the checkpoint of `step` does not count for the next one."""
        destination = self.job.destination
        with suppress(OSError):  # the next try meets it too, and says so
            forget_failure(
                open_store(destination.url, destination.options),
                Writing(step, self.job.attempt, self.giving_up.set_id, destination.nonce),
            )

    def _until_durable(self, step: int) -> str:
        if self.hopeless() is None:
            return ""
        keeper = self.link.keeper
        self.collect([])  # if it is another one than was given the snapshot, the ledger knows that now
        if keeper is not None and self.outcome(step) is None:
            try:
                self.collect(keeper.wait(step, "durable", self._left_s))
            except TimeoutError:
                return self._too_late("it is still being written")
            except KeeperLostError:
                self.link.ask(_is_alive, False)  # so that it is looked for
                self.collect([])
        outcome = self.outcome(step)
        return LOST if outcome is None else outcome

    @property
    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def _too_late(self, why: str) -> str:
        return f"{why} after checkpoint.final_timeout_s = {self.job.config.final_timeout_s:g} s"


def _is_alive(keeper: Keeper) -> bool:
    return keeper.busy or True
