"""Checkpoints taken beside training: snapshots go to the keeper of the host, which makes them durable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.checkpoint import snapshot_schedule as schedules
from phalanx.checkpoint.all_ranks import at_first, everywhere
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.shard_plan import SnapshotId, state_text
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import Slot, Stage, Taken
from phalanx.checkpoint.restoring.restore import Wanted
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.checkpoint_session import CheckpointSession, Tensors
from phalanx.checkpoint.session.keeper_link import KeeperLink, ReplicaPeer, SessionContext
from phalanx.checkpoint.session.snapshot_outcomes import DurableWait, SnapshotEvent, SnapshotTracker
from phalanx.checkpoint.snapshot_copy import Copier, Copying
from phalanx.checkpoint.snapshot_plans import Plans, Roles, make_plans
from phalanx.checkpoint.snapshot_schedule import SnapshotSchedule
from phalanx.checkpoint.storage.checkpoint_store import Store, step_of
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import has_names, open_store
from phalanx.checkpoint.storage.retention import add_evaluation
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

POINTS = ("snapshot.begin", "snapshot.begun", "snapshot.copied", "snapshot.taken")
"""Where a fault can be injected in a rank: before a copy, after what is copied at once, after all of it, and when the
keeper knows."""

Stepped = Callable[[], bool] | bool
_WITHDRAW_S = 10.0  # for withdrawals that are still being written when a rank ends


class Session(CheckpointSession):
    """Takes snapshots of one training run and sees to it that they become checkpoints; made by `open_session`.

    A loop calls, in every step and on every rank alike: `ask` when it begins, `fence` before the first thing that
    changes parameters or optimizer state, `after_step` when both are updated. The way of one snapshot:

    1. `fence`: the ranks begin to agree on whether one is due and every rank is free to take it (all or none).
    2. `after_step` → `_take`: `Copier` copies the tensors into a slot of the keeper, or begins to; the `fence` of the
       next step waits for that. Then `_on_copied` hands the slot to the keeper.
    3. The keeper sums it, sends it to another host and persists it; `SnapshotTracker` notes what it reports.
    4. `events` returns the snapshot when it has come to its last stage.

    Attributes:
        blocks: training does not stand still while a checkpoint is written.
    """

    blocks = False

    def __init__(self, job: SessionContext, link: KeeperLink, schedule: SnapshotSchedule) -> None:
        super().__init__(job, schedule)
        self.link = link
        self._replica_peer = ReplicaPeer(job, link)
        self._tracker = SnapshotTracker(job, link, schedule)
        self._copier: Copier | None = None  # None: this rank has no part in snapshots
        self._copying: Copying | None = None
        self._taken: int | None = None
        self._persisted: int | None = None
        self._evaluations: dict[int, Evaluation] = {}
        self._resumed_from = SnapshotId(-1, 0, "")  # nothing that is in memory
        self._newest_event: SnapshotEvent | None = None
        self._stall_s = 0.0  # since the last snapshot; the next one's
        self._step_began: tuple[int, float, bool] = (-1, 0.0, False)

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot of this rank has not come to the last of its stages yet, as far as is known."""
        return not self._tracker.is_idle or self._is_copying

    @property
    def _is_copying(self) -> bool:
        return self._copying is not None and not self._copying.finished

    def has_states(self) -> bool:
        """Whether there is anything that `restore` would try, good or not; all ranks together, the same answer."""
        peers, destination = self.job.peers, self.job.destination

        def seen() -> bool:
            # All ranks ask their own keeper; storage is the same for all, so rank 0 alone asks it.
            if self.link.ask(lambda keeper: bool(keeper.held()), False):
                return True
            return peers.rank == 0 and has_names(destination.url, destination.options)

        return any(everywhere(peers, seen))

    def restore(self, wanted: Wanted, shards: Mapping[str, Shard] | None = None, **options: Any) -> Restored | None:
        """Fill tensors with the newest good state, from memory, another host or storage; all ranks together.

        What was refused once is not tried again.

        Args, returns and raises: as `phalanx.checkpoint.restoring.restore.restore`, which is given `options` too.
        """
        store = open_store(self.job.destination.url, self.job.destination.options)
        copies = self._replica_peer.copies()
        restored = self._restore(wanted, shards, store, self.link.keeper, copies, **options)
        if restored is not None:
            self._schedule.begin(restored.step)
            self._resumed_from = SnapshotId(restored.step, restored.attempt, "")
            self._tracker.newest = restored.name or at_first(self.job.peers, lambda: _durable_name(store, restored))
        return restored

    def watch(
        self, tensors: Tensors, shards: Mapping[str, Shard] | None, roles: Roles, *, overlap: bool | None = None
    ) -> None:
        """Say what snapshots consist of; all ranks together, again whenever names, shapes or shards change.

        Args:
            tensors: by logical name, or a function that gives the present ones, for those that are not always the same
                objects (the state of generators).
            shards: which block of its logical tensor each is, as in `phalanx.checkpoint.session.blocking_session.save`.
            roles: what each is to training, see `phalanx.checkpoint.format.shard_plan.Role`.
            overlap: see `phalanx.checkpoint.snapshot_copy.Copier`.

        Raises:
            UserError, ValueError, RuntimeError: as `phalanx.checkpoint.snapshot_plans.make_plans`.
        """
        self._fence_copy()
        if self._agreement is not None:  # it was about the memory so far
            self._agreement()
            self._agreement = None
        self._tensors = tensors
        present, job = self._present_tensors(), self.job
        plans = make_plans(present, shards, roles, peers=job.peers, config=job.run_config, layout=str(job.layout))
        if self._copier is not None:
            self._copier.close()
        # Rank 0 takes part without tensors too: it carries the state, and publishes.
        writes = bool(plans.shard.pieces) or job.peers.rank == 0
        self._copier = Copier(plans.shard, present, overlap) if writes else None
        self._tracker.set_id = plans.set_id
        self._replica_peer.exchange()
        self.link.set_up(partial(self._set_up_keeper, plans))

    def _set_up_keeper(self, plans: Plans, keeper: KeeperClient) -> None:
        job = self.job
        self._tracker.no_memory = ""
        keeper.begin(job.attempt, plans.set_id, plans.shards)
        if plans.shard.pieces or plans.shard.rank == 0:
            keeper.lease(plans.shard, plans.job, job.config.slots, job.destination)
            keeper.resume_from(self._resumed_from)
            self._replica_peer.set_up(keeper)

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        """Training stands still in here, for the snapshot that is taken or still copied, else for the next one."""
        began_s, before = time.perf_counter(), self._newest_event
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_s
            # The event may be made within the block: then what came before it in there counts for it too.
            event = self._newest_event
            if event is not None and (event is not before or self._copying is not None):
                event.stall_s += seconds
            else:
                self._stall_s += seconds

    def ask(self, step: int) -> None:
        """The step that will be number `step`, the first being 1, begins.

        Raises:
            UserError: a later attempt of the run has begun.
        """
        with self._stalled():
            self._schedule.begin(step - 1)
            # For ``auto`` only steps count that have no snapshot under way at either end.
            now_s, is_plain = time.monotonic(), not self.is_under_way
            last_step, last_s, was_plain = self._step_began
            if last_step == step - 1 and is_plain and was_plain:
                self._schedule.auto.note_step(now_s - last_s)
            self._step_began = (step, now_s, is_plain)
            self._step = step
            self._collect()

    def fence(self) -> None:
        """Parameters and optimizer state may be changed after this; called by all ranks alike.

        Raises:
            UserError: as `ask`. RuntimeError: a snapshot could not be copied.
        """
        with self._stalled():
            self._fence_copy()
            # The ranks begin to agree on what is done at the end of the step only here, late in it: the keepers have
            # had most of the step to finish the snapshot before.
            if self._step is not None and self._agreement is None and self._schedule.needs_agreement(self._step):
                if self._schedule.waits_until_free(self._step):
                    self._durable_wait().until_free(even_lost=False)  # if it takes too long, all stays due
                vote = self._schedule.vote(self._step, self._keeper_state())
                self._agreement = self.job.peers.ask_highest(vote)

    def _keeper_state(self) -> int:
        """What this rank's keeper can do now; see `phalanx.checkpoint.snapshot_schedule`."""
        if self._replica_peer.is_outdated:
            return schedules.RENEWED
        # Nothing to copy here, so this rank keeps nobody from a snapshot.
        if self._copier is None:
            return schedules.FREE
        if self._is_copying or self.link.ask(lambda keeper: keeper.busy, True):
            return schedules.BUSY
        return schedules.MEMORY_ONLY if self.link.ask(lambda keeper: keeper.persisting, True) else schedules.FREE

    def _fence_copy(self) -> None:
        if self._copying is None:
            return
        try:
            self._copying.fence()
        except RuntimeError as error:
            self._copying = None
            # A later attempt that has begun is for people to read, not a failed copy.
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from error
            raise
        if self._copying.finished:
            self._copying = None

    def after_step(
        self,
        step: int,
        state: Callable[[], Any],
        *,
        stepped: Stepped = True,
        metrics: Mapping[str, float] | None = None,
        ending: bool = False,
    ) -> None:
        """Step `step` is done: take a snapshot if one is due and every rank is free to; if not, it stays due.

        Args:
            state: gives what training wants back besides tensors, as JSON values; called on rank 0 where it is needed.
            stepped: whether the optimizer has stepped with a learning rate above zero since the last snapshot, or a
                function that says so; called where a snapshot is taken. What any rank says counts for all.
            metrics: figures for keeping the best.
            ending: the last step of this process: wait until its checkpoint is durable, the same on all ranks.

        Raises:
            UserError: a later attempt has begun, or the last checkpoint did not become durable: why.
            TypeError: `state` gives something JSON cannot hold.
        """
        if self._step != step:
            self.ask(step)  # a loop that does not call it
        self.fence()
        taken = Taken(step, metrics=dict(metrics or {}))
        with self._stalled():
            take = persist = False
            if self._agreement is not None:
                agreed, self._agreement = self._agreement(), None
                take, persist, put_off = self._schedule.decide(step, agreed)
                self._tracker.put_off += put_off
                if agreed == schedules.RENEWED:
                    self._replica_peer.exchange()
            self._step = None
            if ending:
                # If it was due in this step anyway it is taken: the last checkpoint is not written twice.
                is_taken = self._persisted == step  # when the step was done
                if is_taken:
                    self._finish_copy()

                def take_now() -> None:
                    self._take(replace(taken, persist=True, hurry=True), state, stepped)
                    self._finish_copy()

                self._durable_wait().make(step, take_now, is_taken=is_taken)
            elif take:
                self._take(replace(taken, persist=persist), state, stepped)
                if persist and self.job.config.wait:
                    self._finish_copy()
                    self._durable_wait().wait(step)  # problems are reported, training goes on

    def _take(self, taken: Taken, state: Callable[[], Any], stepped: Stepped) -> None:
        """Copy a snapshot into a free slot of the keeper, or begin to."""
        step, persist = taken.step, taken.persist
        if persist and self._evaluations:  # the one before is durable by now, and is pruned by its figures
            self._collect()
        skipped = self._schedule.skipped
        self._schedule.note_taken(step, persist=persist)
        text = ""
        if self.job.peers.rank == 0:
            value = state()
            manifests.check_state(value)
            text = state_text(value, self.job.run_config)
        is_again, self._taken = self._taken == step, step
        self._persisted = step if persist else self._persisted
        if self._copier is None:
            return
        given = self.link.ask(lambda keeper: (keeper, keeper.slot()), None)
        if given is None:  # lost just now, which was reported
            if persist:
                self._tracker.withdraw_lost(step)
            return
        # A second snapshot of one step has the same weights: "nothing changed" must not make it stale.
        moved = (stepped() if callable(stepped) else stepped) and not is_again
        taken = replace(taken, state=text, stepped=moved, unix_ns=time.time_ns())
        event = SnapshotEvent(step, persist, snapshot_bytes=self._copier.plan.data_bytes)
        event.skipped = self._schedule.skipped - skipped
        event.stall_s, self._stall_s = self._stall_s, 0.0
        self._newest_event = event
        awaits: set[Stage] = {"committed"}
        if self._replica_peer.endpoint is not None:
            awaits.add("replicated")
        if persist:
            awaits.add("durable")
        # Before copying begins, since a small copy ends, and reports, within the call.
        self._tracker.begin(event, awaits)
        self.job.points.reach("snapshot.begin", step=step)
        done = partial(self._on_copied, *given, taken, event)
        self._copying = self._copier.begin(given[1], done, self._present_tensors())
        self.job.points.reach("snapshot.begun", step=step)

    def _on_copied(self, giver: KeeperClient, slot: Slot, taken: Taken, event: SnapshotEvent, seconds: float) -> None:
        """Called on whatever thread has ended the copy; there may be another keeper by now."""
        event.snapshot_s = seconds
        self.job.points.reach("snapshot.copied", step=taken.step)
        self.link.ask(lambda keeper: keeper.taken(slot, taken) if keeper is giver else None, None)
        self.job.points.reach("snapshot.taken", step=taken.step)

    def _finish_copy(self) -> None:
        if self._copying is not None:
            self._copying.wait()
            self._copying = None

    def _durable_wait(self) -> DurableWait:
        return DurableWait(self.job, self.link, self._tracker, has_part=self._copier is not None)

    def evaluated(self, evaluation: Evaluation) -> None:
        """The state of a step was evaluated after `after_step`: kept with its checkpoint, if one is or becomes durable.

        Called by all ranks alike; rank 0 writes.
        """
        if self.job.peers.rank == 0:
            self._evaluations[evaluation.step] = evaluation
            self._collect()

    def _collect(self) -> None:
        """Note what the keeper reports; write down evaluations of checkpoints that are durable by now."""
        self._tracker.poll()
        if not self._evaluations:
            return
        newest, job = self._tracker.newest, self.job
        durable = step_of(newest) if newest else -1
        if durable in self._evaluations:
            store = open_store(job.destination.url, job.destination.options)
            add_evaluation(store, newest, self._evaluations[durable], job.config, job.report)
        # The others are forgotten, unless their checkpoint may yet become durable.
        self._evaluations = {s: e for s, e in self._evaluations.items() if durable < s == self._persisted}

    def events(self) -> list[SnapshotEvent]:
        """Snapshots of this rank that have ended since the last call, durable or not."""
        self._tracker.poll()
        return self._tracker.take_ended()

    @property
    def status(self) -> str:
        """What is durable, what is being written, and what storage can keep up with, in one line for people."""
        newest = self._tracker.newest
        parts = [f"{newest} is durable" if newest else "nothing is durable yet"]
        if self._persisted is not None and self._tracker.awaits_durable(self._persisted):
            parts.append(f"step {self._persisted} is being written")
        return "; ".join([*parts, *filter(None, [self._schedule.pace.explanation])])

    def finish(self, *, clean: bool) -> None:
        """Hang up; all ranks, each for itself.

        Args:
            clean: training has ended well, so that nothing in memory is needed any more.
        """
        if clean and self._evaluations:
            self._collect()
        if self._copying is not None:
            self._copying.wait()
        if self._copier is not None:
            self._copier.close()
        self.link.close(clean=clean)
        self._tracker.wait_for_withdrawals(_WITHDRAW_S)


def _durable_name(store: Store, restored: Restored) -> str:
    """Of the durable checkpoint of a state that came from memory; empty: it has none, as far as can be seen."""
    try:
        latest = read_latest(store)
    except (OSError, UserError):
        return ""
    return latest.name if latest is not None and latest.step == restored.step else ""
