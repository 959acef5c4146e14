"""What the keeper tells of the snapshots of a rank: into the ledger, to people, and where need be to other hosts."""

from __future__ import annotations

import os
import time

from phalanx.checkpoint.keeper.contract import Progress
from phalanx.checkpoint.session.agenda import Agenda
from phalanx.checkpoint.session.giving_up import GivingUp
from phalanx.checkpoint.session.job import Job
from phalanx.checkpoint.session.ledger import Ledger
from phalanx.checkpoint.session.link import Link
from phalanx.core.progress import say_checkpoints


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
