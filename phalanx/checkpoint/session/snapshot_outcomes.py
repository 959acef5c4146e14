"""What every snapshot of a rank costs and what becomes of it, from the copy until it is durable or has failed.

`SnapshotTracker` turns the progress that the keeper reports into the lines of ``metrics.jsonl``. What is waited for is
always a state that it holds, never a message, which may have been read long before. Where the keeper is lost, this rank
itself withdraws its part of a checkpoint, so that the persisters of other hosts do not wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from phalanx.checkpoint.all_ranks import at_first
from phalanx.checkpoint.keeper_contract import KeeperLostError, SnapshotProgress, Stage
from phalanx.checkpoint.persist.publication import Writing, forget_failure, withdraw
from phalanx.checkpoint.session.keeper_link import KeeperLink, SessionContext
from phalanx.checkpoint.snapshot_schedule import SnapshotSchedule
from phalanx.checkpoint.storage.checkpoint_store import SupersededError
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError
from phalanx.core.progress import say_checkpoints

_LOST = "the keeper of a host was lost meanwhile"

_FIGURES = {"committed": "examine", "replicated": "replicate", "durable": "persist"}


@dataclass
class SnapshotEvent:
    """A snapshot of this rank that has come to the last of its stages, or will not.

    Attributes:
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
class _UnderWay:
    event: SnapshotEvent
    awaits: set[Stage]
    taken_s: float


class SnapshotTracker:
    """The snapshots under way, those that have ended, and the outcome of the newest that was to become durable.

    Attributes:
        set_id: of the present plans of all ranks.
        newest: name of the newest durable checkpoint that this rank knows; empty: none.
        no_memory: why there is no memory for snapshots; empty: there is.
        put_off: steps, since the last snapshot, at which one was due and could not be taken.
    """

    def __init__(self, job: SessionContext, link: KeeperLink, schedule: SnapshotSchedule) -> None:
        self._job, self._link, self._schedule = job, link, schedule
        self.set_id = ""
        self.newest = ""
        self.no_memory = ""
        self.put_off = 0
        self._losses = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._ended: list[SnapshotEvent] = []
        self._to_be_durable: tuple[int, str | None] = (-1, None)
        self._withdrawals: list[threading.Thread] = []

    @property
    def is_idle(self) -> bool:
        """Whether every snapshot has come to its last stage."""
        return not self._under_way

    def awaits_durable(self, step: int) -> bool:
        """Whether the snapshot of `step` is to become durable, and is not yet."""
        found = self._under_way.get(step)
        return found is not None and "durable" in found.awaits

    def outcome(self, step: int) -> str | None:
        """Of the snapshot of `step`, which was to become durable: empty: it is; a text: why not; None: under way."""
        newest, problem = self._to_be_durable
        return problem if newest == step else _LOST  # no keeper was ever given it

    def take_ended(self) -> list[SnapshotEvent]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def begin(self, event: SnapshotEvent, awaits: set[Stage]) -> None:
        """A snapshot is taken; it is over when it has come to all stages of `awaits`."""
        event.put_off, self.put_off = self.put_off, 0
        self._under_way[event.step] = _UnderWay(event, awaits, time.monotonic())
        if "durable" in awaits:
            self._to_be_durable = (event.step, None)

    def poll(self) -> None:
        """Note what the keeper reports."""
        self.note(self._link.ask(lambda keeper: keeper.poll(), []))

    def note(self, reported: list[SnapshotProgress]) -> None:
        """Note what the keeper has reported, and whether it was lost."""
        rank = self._job.peers.rank
        for progress in reported:
            if progress.step < 0:
                self.no_memory = f"rank {rank} has no memory for snapshots on its host: {progress.problem}"
                self._job.report(f"{self.no_memory}; no checkpoints can be taken")
            elif progress.problem and (progress.stage != "durable" or rank == 0):  # all ranks get that one alike
                self._job.report(f"snapshot of step {progress.step}: not {progress.stage}: {progress.problem}")
            if progress.step in self._under_way:
                self._advance(progress)
        if self._link.losses > self._losses:
            self._losses = self._link.losses
            # Nothing more will be reported of what is under way.
            for step, snapshot in list(self._under_way.items()):
                snapshot.event.problem = snapshot.event.problem or "the keeper of this host was lost"
                if "durable" in snapshot.awaits:
                    self.withdraw_lost(step)
                self._end(step, _LOST)

    def _advance(self, progress: SnapshotProgress) -> None:
        step, stage, problem = progress.step, progress.stage, progress.problem
        snapshot = self._under_way[step]
        event = snapshot.event
        if stage == "committed" and problem and "durable" in snapshot.awaits:
            self._withdraw(step, problem)
        figure = _FIGURES[stage]
        setattr(event, f"{figure}_s", progress.seconds)
        if stage != "committed":
            setattr(event, f"{figure}_bytes", progress.bytes)
        event.problem = event.problem or problem
        event.name = progress.name or event.name
        snapshot.awaits.discard(stage)
        if stage == "durable" and self._to_be_durable == (step, None):
            self._to_be_durable = (step, problem)
        if not snapshot.awaits or (stage == "committed" and problem):  # what is not committed goes nowhere
            self._end(step, problem)
        if stage == "durable" and not problem:
            event.durable_s = time.monotonic() - snapshot.taken_s
            self.newest = event.name
            self._schedule.note_durable(event.stall_s, event.durable_s)
            if self._job.peers.rank == 0:
                # What storage can keep up with: to people where that is new, and to whatever supervises this rank.
                pace = self._schedule.pace
                line = pace.new_explanation()
                if line:
                    self._job.report(line)
                say_checkpoints(os.environ, pace.explanation)

    def _end(self, step: int, problem: str) -> None:
        if self._to_be_durable == (step, None):
            self._to_be_durable = (step, problem)
        self._ended.append(self._under_way.pop(step).event)

    def withdraw_lost(self, step: int) -> None:
        """The keeper was lost before the snapshot of `step` was durable."""
        rank = self._job.peers.rank
        self._withdraw(step, f"the keeper of rank {rank}'s host was lost before the checkpoint was published")

    def _withdraw(self, step: int, problem: str) -> None:
        """Note in storage, beside training, that this rank's part of a checkpoint does not come.

        Without that the publisher would wait for it until `Destination.timeout_s` is over, and others, where the
        publisher itself is gone, twice as long; no other checkpoint could be made durable until then.
        """
        destination = self._job.destination
        writing = Writing(step, self._job.attempt, self.set_id, destination.nonce)

        def work() -> None:
            try:
                withdraw(open_store(destination.url, destination.options), writing, self._job.peers.rank, problem)
            except SupersededError:
                pass  # then nobody waits for it
            except (OSError, UserError) as error:
                self._job.report(
                    f"snapshot of step {step}: the persisters of other hosts cannot be told that it will not be "
                    f"durable ({error}); they wait for it for up to {2 * destination.timeout_s:.0f} s"
                )

        thread = threading.Thread(target=work, name="withdraw", daemon=True)
        self._withdrawals = [one for one in self._withdrawals if one.is_alive()] + [thread]
        thread.start()

    def wait_for_withdrawals(self, timeout_s: float) -> None:
        """Wait until all withdrawals are in storage, or for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._withdrawals:
            thread.join(max(deadline_s - time.monotonic(), 0.0))


_POLL_S = 0.01  # of a keeper that is busy
_TRIES = 2


class DurableWait:
    """Waiting for a checkpoint, all ranks together; `final_timeout_s` bounds all waiting from when this is made.

    Args:
        has_part: whether this rank writes any part of checkpoints; if not, it waits for the others only.
    """

    def __init__(self, job: SessionContext, link: KeeperLink, tracker: SnapshotTracker, *, has_part: bool) -> None:
        self._job, self._link, self._tracker, self._has_part = job, link, tracker, has_part
        self._deadline_s = time.monotonic() + job.config.final_timeout_s

    def make(self, step: int, take: Callable[[], None], *, is_taken: bool) -> None:
        """Take the checkpoint of `step` as soon as all ranks can, and wait until it is durable.

        Args:
            take: copies the snapshot and hands it to the keeper.
            is_taken: it was taken when the step was done, and is taken again only if nothing comes of that.

        Raises:
            UserError: it is not durable: why; on all ranks.
        """
        if is_taken and not self.wait(step):
            return
        problem = ""
        for _ in range(_TRIES):
            problem = self._first_problem(self.until_free(even_lost=True))
            if not problem:
                at_first(self._job.peers, partial(self._forget_failure, step))
                take()
                problem = self.wait(step)
            if not problem.endswith(_LOST):
                break
        if problem:
            newest = self._tracker.newest
            known = f"the newest that is durable is {newest}" if newest else "none became durable before it"
            cure = "put that right and start the run again: it goes on from the newest good copy of its state"
            problem = f"the last checkpoint (step {step}) is not durable, {known}: {problem}"
            raise UserError(problem, cure=cure, field=self._job.destination.url)

    def wait(self, step: int) -> str:
        """Wait until the checkpoint of `step`, which was taken, is durable, or will not be: why; on all ranks."""
        return self._first_problem(self._until_durable(step) if self._has_part else "")

    def until_free(self, *, even_lost: bool) -> str:
        """Wait until a snapshot of this rank can be taken and made durable; or why it cannot.

        Args:
            even_lost: a keeper that is lost is waited for, too.
        """
        # A withdrawal that is still being written would be taken for the next try's.
        self._tracker.wait_for_withdrawals(self._left_s)
        if not self._has_part:
            return ""
        while self._link.ask(lambda keeper: keeper.busy or keeper.persisting, even_lost):
            self._tracker.poll()
            if self._tracker.no_memory:
                return self._tracker.no_memory
            if self._left_s == 0.0:
                return self._too_late("the snapshot before it is still being written, or there is no memory for one")
            time.sleep(_POLL_S)
        self._tracker.poll()  # what made the keeper free is reported by now
        return ""

    def _until_durable(self, step: int) -> str:
        keeper = self._link.keeper
        self._tracker.note([])  # if this keeper is another one than was given the snapshot, the tracker knows that now
        if keeper is not None and self._tracker.outcome(step) is None:
            try:
                self._tracker.note(keeper.wait(step, "durable", self._left_s))
            except TimeoutError:
                return self._too_late("it is still being written")
            except KeeperLostError:
                self._link.ask(lambda keeper: keeper.busy, None)  # the link finds out, and looks for another
                self._tracker.note([])
        outcome = self._tracker.outcome(step)
        return _LOST if outcome is None else outcome

    def _first_problem(self, mine: str) -> str:
        """The first problem that any rank has, on all of them; a lost keeper comes before what follows from it."""
        peers = self._job.peers
        if peers.size == 1:
            return mine
        first = peers.lowest([not mine.endswith(_LOST), peers.rank, mine] if mine else None)
        return f"rank {first[1]}: {first[2]}" if first else ""

    def _forget_failure(self, step: int) -> None:
        """A withdrawal of an earlier try at the checkpoint of `step` does not count for the next one."""
        destination = self._job.destination
        with suppress(OSError):  # the next try meets it too, and reports it
            forget_failure(
                open_store(destination.url, destination.options),
                Writing(step, self._job.attempt, self._tracker.set_id, destination.nonce),
            )

    @property
    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def _too_late(self, why: str) -> str:
        return f"{why} after checkpoint.final_timeout_s = {self._job.config.final_timeout_s:g} s"
