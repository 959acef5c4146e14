"""What becomes of the snapshots of a rank: the keeper tells, training may wait, other hosts may have to hear it.

What is waited for is a state, which the ledger has, and never a message: that may have been heard long before. Where
the keeper is lost, this rank itself tells the persisters of other hosts that its part of a checkpoint will not come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from phalanx.checkpoint.all_ranks import at_first
from phalanx.checkpoint.due import Agenda
from phalanx.checkpoint.keeper_contract import Keeper, KeeperLostError, Progress
from phalanx.checkpoint.persist.publication import Writing, forget_failure, withdraw
from phalanx.checkpoint.session.keeper_link import Job, Link
from phalanx.checkpoint.session.ledger import LOST, Ledger
from phalanx.checkpoint.storage.checkpoint_store import SupersededError
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError
from phalanx.core.progress import say_checkpoints


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

    job: Job
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

    def __init__(self, job: Job, link: Link, ledger: Ledger, agenda: Agenda, giving_up: GivingUp) -> None:
        self._job, self._link, self._ledger = job, link, ledger
        self._agenda, self._giving_up = agenda, giving_up
        self._losses = 0
        self.newest = ""
        self.no_memory = ""

    def collect(self) -> None:
        """Ask the keeper."""
        self.take_in(self._link.ask(lambda keeper: keeper.poll(), []))

    def take_in(self, progress: list[Progress]) -> None:
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

    def _note(self, one: Progress) -> None:
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

    def _concerns_us(self, progress: Progress) -> bool:
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
        outcome: see `phalanx.checkpoint.session.ledger.Ledger.outcome`.
        hopeless: says why waiting is in vain, such as no memory; empty: it is not; None: this rank has no part of the
            checkpoint, and waits for the others only.
        giving_up: tells other hosts when the keeper of this one is lost.
    """

    job: Job
    link: Link
    collect: Callable[[list[Progress]], None]
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
