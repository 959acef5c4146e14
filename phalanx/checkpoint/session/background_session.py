"""Checkpoints of a training loop: what it asks and tells at each step, and what this does about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.checkpoint import snapshot_schedule as agendas
from phalanx.checkpoint.all_ranks import at_first, everywhere
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.shard_plan import JobPlan, ShardPlan, SnapshotId, state_text
from phalanx.checkpoint.keeper_contract import Keeper, Slot, Stage, Taken
from phalanx.checkpoint.restoring.restore import RefusedStates, Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.keeper_link import KeeperLink, Neighbours, SessionContext
from phalanx.checkpoint.session.snapshot_outcomes import Event, GivingUp, LastCheckpoint, Ledger, News, Stall, StepPace
from phalanx.checkpoint.snapshot_copy import Copier, Copying
from phalanx.checkpoint.snapshot_plans import Roles, make_plans
from phalanx.checkpoint.snapshot_schedule import Decision, SnapshotAgenda
from phalanx.checkpoint.storage.checkpoint_store import Store, step_of
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import clean, has_names, open_store
from phalanx.checkpoint.storage.retention import add_evaluation
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

POINTS = ("snapshot.begin", "snapshot.begun", "snapshot.copied", "snapshot.taken")
"""Where a fault can be injected in a rank: before a copy, after what is copied at once, after all of it, and when the
keeper was told."""

Tensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
Stepped = Callable[[], bool] | bool
_LAST_WORDS_S = 10.0  # of a rank that has something to tell when it ends


class Session:
    """Takes snapshots of one training run and sees to it that they become checkpoints; made by `open_session`.

    A loop calls, in every step and on every rank alike: `ask` when it begins, `fence` before the first thing that
    changes parameters or optimizer state, `after_step` when both are updated. What is due, and whether every rank is
    free to take it, is agreed between `fence` and `after_step`; a snapshot is taken by all ranks or none.

    Attributes:
        blocks: training does not stand still while a checkpoint is written.
    """

    blocks = False

    def __init__(self, job: SessionContext, link: KeeperLink, agenda: SnapshotAgenda) -> None:
        self.job = job
        self._link, self._agenda = link, agenda
        self._neighbours = Neighbours(job, link)
        self._ledger = Ledger()
        self._giving_up = GivingUp(job)
        self._news = News(job, link, self._ledger, agenda, self._giving_up)
        self._pace = StepPace()
        self._tensors: Tensors = {}
        self._copier: Copier | None = None
        self._copying: Copying | None = None
        self._stall = Stall(lambda: self._copying is not None)
        self._answer: Callable[[], int] | None = None
        self._step: int | None = None
        self._taken: int | None = None
        self._persisted: int | None = None
        self._refused = RefusedStates()
        self._evaluations: dict[int, Evaluation] = {}
        self._from = SnapshotId(-1, 0, "")  # training goes on from nothing that is in memory

    @property
    def attempt(self) -> int:
        """The number of this attempt of the run."""
        return self.job.attempt

    @property
    def link(self) -> KeeperLink:
        """The connection to the keeper of this host."""
        return self._link

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot of this rank has not come to the last of its stages yet, as far as is known."""
        return self._ledger.is_under_way or (self._copying is not None and not self._copying.finished)

    def has_states(self) -> bool:
        """Whether there is anything that `restore` would try, good or not; all ranks together, the same answer."""

        peers, destination = self.job.peers, self.job.destination

        def seen() -> bool:
            if self._link.ask(lambda keeper: bool(keeper.held()), False):
                return True
            return peers.rank == 0 and has_names(destination.url, destination.options)

        return any(everywhere(peers, seen))

    def restore(self, wanted: Wanted, shards: Mapping[str, Shard] | None = None, **options: Any) -> Restored | None:
        """Fill tensors with the newest good state, from memory, another host or storage; all ranks together.

        What was refused once is not tried again.

        Args, returns and raises: as `phalanx.checkpoint.restoring.restore.restore`, which is given `options` too.
        """
        job = self.job
        store = open_store(job.destination.url, job.destination.options)
        at_first(job.peers, partial(clean, store, job.attempt))
        restored = restore(
            wanted,
            keeper=self._link.keeper,
            store=store,
            report=job.report,
            shards=shards,
            peers=job.peers,
            copies=job.copies,
            remote=self._neighbours.copies(),
            verify=job.config.verify,
            refused=self._refused,
            **options,
        )
        if restored is not None:
            self._agenda.begin(restored.step)
            self._from = SnapshotId(restored.step, restored.attempt, "")
            self._news.newest = restored.name or at_first(job.peers, lambda: _durable_name(store, restored))
        return restored

    def watch(
        self,
        tensors: Tensors,
        shards: Mapping[str, Shard] | None,
        roles: Roles,
        *,
        overlap: bool | None = None,
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
        self._end_copy()
        if self._answer is not None:  # it was about the memory so far
            self._answer()
            self._answer = None
        self._tensors = tensors
        now = self._present()
        job = self.job
        plan, whole, set_id, count = make_plans(
            now, shards, roles, peers=job.peers, config=job.run_config, layout=str(job.layout)
        )
        if self._copier is not None:
            self._copier.close()
        writes = bool(plan.pieces) or job.peers.rank == 0
        self._copier = Copier(plan, now, overlap) if writes else None
        self._giving_up.set_id = set_id
        self._neighbours.exchange()
        self._link.arrange(partial(self._lease, plan, whole, set_id, count))

    def ask(self, step: int) -> None:
        """The step that will be number `step`, the first being 1, begins.

        Raises:
            UserError: a later attempt of the run has begun.
        """
        with self._stall.timed():
            self._agenda.begin(step - 1)
            self._pace.began(step, self._agenda.auto, is_plain=not self.is_under_way)
            self._step = step
            self._news.collect()
            self._add_evaluations()

    def fence(self) -> None:
        """Parameters and optimizer state may be changed after this; called by all ranks alike.

        Here, late in the step, the ranks also begin to agree on what is done at its end: the keepers have had most of
        the step to finish the snapshot before.

        Raises:
            UserError: as `ask`. RuntimeError: a snapshot could not be copied.
        """
        with self._stall.timed():
            self._end_copy()
            if self._step is not None and self._answer is None and self._agenda.asks(self._step):
                if self._agenda.waits(self._step):
                    self._last_checkpoint().until_free(even_lost=False)  # if it takes too long, all stays due
                self._answer = self.job.peers.ask_highest(self._agenda.says(self._step, self._state()))

    def _end_copy(self) -> None:
        if self._copying is None:
            return
        try:
            self._copying.fence()
        except RuntimeError as error:
            self._copying = None
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
            step: optimizer steps done.
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
        with self._stall.timed():
            decision = self._decide(step)
            self._step = None
            if ending:
                self._end(taken, state, stepped)
            elif decision.take:
                self._take(taken, state, stepped, persist=decision.persist)
                if decision.persist and self.job.config.wait:
                    self._wait(step)

    def evaluated(self, evaluation: Evaluation) -> None:
        """The state of a step was evaluated after `after_step`: kept with its checkpoint, if one is or becomes durable.

        Called by all ranks alike; rank 0 writes.
        """
        if self.job.peers.rank == 0:
            self._evaluations[evaluation.step] = evaluation
            self._news.collect()
            self._add_evaluations()

    def _add_evaluations(self) -> None:
        """Write down those whose checkpoints are durable, and forget those that have none any more."""
        if not self._evaluations:
            return
        durable = step_of(self._news.newest) if self._news.newest else -1
        job = self.job
        if durable in self._evaluations:
            store = open_store(job.destination.url, job.destination.options)
            add_evaluation(store, self._news.newest, self._evaluations[durable], job.config, job.report)
        self._evaluations = {s: e for s, e in self._evaluations.items() if durable < s == self._persisted}

    def events(self) -> list[Event]:
        """Snapshots of this rank that have ended since the last call, durable or not."""
        self._news.collect()
        return self._ledger.take_ended()

    def costs(self) -> dict[str, Any]:
        """What was measured for ``auto``, as JSON values: to be kept with the state of training, on rank 0."""
        return self._agenda.auto.to_json()

    def recall(self, costs: dict[str, Any] | None, *, failed: bool) -> None:
        """Take up `costs` of the attempt before.

        Args:
            failed: whether that attempt ended by a failure.
        """
        self._agenda.recall(costs, len(set(self.job.hosts)), failed=failed)

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds; 0: none was seen yet."""
        return self._agenda.auto.expected_durable_s

    @property
    def status(self) -> str:
        """What is durable, what is being written, and what storage can keep up with, in one line for people."""
        newest = self._news.newest
        parts = [f"{newest} is durable" if newest else "nothing is durable yet"]
        if self._persisted is not None and self._ledger.awaits_durable(self._persisted):
            parts.append(f"step {self._persisted} is being written")
        return "; ".join([*parts, *filter(None, [self._agenda.keeping_up.explanation])])

    def finish(self, *, clean: bool) -> None:
        """Hang up; all ranks, each for itself.

        Args:
            clean: training has ended well, so that nothing in memory is needed any more.
        """
        if clean and self._evaluations:
            self._news.collect()
            self._add_evaluations()
        if self._copying is not None:
            self._copying.wait()
        if self._copier is not None:
            self._copier.close()
        self._link.close(clean=clean)
        self._giving_up.settle(_LAST_WORDS_S)

    def _present(self) -> Mapping[str, Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _lease(self, plan: ShardPlan, whole: JobPlan | None, set_id: str, shards: int, keeper: Keeper) -> None:
        """What every keeper of this host is told first."""
        self._news.no_memory = ""
        keeper.begin(self.job.attempt, set_id, shards)
        if plan.pieces or plan.rank == 0:
            keeper.lease(plan, whole, self.job.config.slots, self.job.destination)
            keeper.resume_from(self._from)
            self._neighbours.tell(keeper)

    def _state(self) -> int:
        """What this rank's keeper can do now; see `phalanx.checkpoint.snapshot_schedule`."""
        if self._neighbours.changed:
            return agendas.RENEWED
        if self._copier is None:
            return agendas.FREE
        if self._copying is not None and not self._copying.finished:
            return agendas.BUSY
        if self._link.ask(lambda keeper: keeper.busy, True):
            return agendas.BUSY
        return agendas.MEMORY_ONLY if self._link.ask(lambda keeper: keeper.persisting, True) else agendas.FREE

    def _decide(self, step: int) -> Decision:
        if self._answer is None:
            return Decision(False, False, False)
        agreed, self._answer = self._answer(), None
        decision = self._agenda.decide(step, agreed)
        self._ledger.put_off += decision.put_off
        if agreed == agendas.RENEWED:
            self._neighbours.exchange()
        return decision

    def _take(
        self, taken: Taken, state: Callable[[], Any], stepped: Stepped, *, persist: bool, hurry: bool = False
    ) -> None:
        if persist and self._evaluations:  # the one before is durable by now, and is pruned by its figures
            self._news.collect()
            self._add_evaluations()
        skipped = self._agenda.skipped
        self._agenda.took(taken.step, persist=persist)
        text = self._text(state) if self.job.peers.rank == 0 else ""
        is_again, self._taken = self._taken == taken.step, taken.step
        self._persisted = taken.step if persist else self._persisted
        if self._copier is None:
            return
        given = self._link.ask(lambda keeper: (keeper, keeper.slot()), None)
        if given is None:  # lost just now, which was reported
            if persist:
                self._news.lost(taken.step)
            return
        told = {
            "state": text,
            "stepped": (stepped() if callable(stepped) else stepped) and not is_again,
            "persist": persist,
            "hurry": hurry,
            "unix_ns": time.time_ns(),
        }
        event = Event(taken.step, persist, snapshot_bytes=self._copier.plan.data_bytes)
        event.skipped = self._agenda.skipped - skipped
        self._stall.begin(event)
        self._ledger.begin(event, self._stages(persist), time.monotonic())
        self.job.points.reach("snapshot.begin", step=taken.step)
        done = partial(self._copied, given, Taken(**{**vars(taken), **told}), event)
        self._copying = self._copier.begin(given[1], done, self._present())
        self.job.points.reach("snapshot.begun", step=taken.step)

    def _text(self, state: Callable[[], Any]) -> str:
        value = state()
        manifests.check_state(value)
        return state_text(value, self.job.run_config)

    def _copied(self, given: tuple[Keeper, Slot], taken: Taken, event: Event, seconds: float) -> None:
        """Comes from whatever thread has ended the copy; there may be another keeper by now."""
        event.snapshot_s = seconds
        self.job.points.reach("snapshot.copied", step=taken.step)
        giver, slot = given
        self._link.ask(lambda keeper: keeper.taken(slot, taken) if keeper is giver else None, None)
        self.job.points.reach("snapshot.taken", step=taken.step)

    def _stages(self, persist: bool) -> set[Stage]:
        stages: set[Stage] = {"committed"}
        if self._neighbours.replicates:
            stages.add("replicated")
        if persist:
            stages.add("durable")
        return stages

    def _end(self, taken: Taken, state: Callable[[], Any], stepped: Stepped) -> None:
        """The checkpoint of the last step, which may have been taken when the step was done."""
        is_taken = self._persisted == taken.step
        if is_taken:
            self._end_copying()
        take = partial(self._take_now, taken, state, stepped)
        self._last_checkpoint().make(taken.step, take, lambda: self._news.newest, is_taken=is_taken)

    def _last_checkpoint(self) -> LastCheckpoint:
        about = (self._news.take_in, self._ledger.outcome, self._hopeless, self._giving_up)
        return LastCheckpoint(self.job, self._link, *about)

    def _hopeless(self) -> str | None:
        """Why no checkpoint can become durable here; None: this rank has no part in any."""
        return None if self._copier is None else self._news.no_memory

    def _take_now(self, taken: Taken, state: Callable[[], Any], stepped: Stepped) -> None:
        self._take(taken, state, stepped, persist=True, hurry=True)
        self._end_copying()

    def _wait(self, step: int) -> None:
        """Until the checkpoint of `step` is durable, or will not be; problems are reported, training goes on."""
        self._end_copying()
        self._last_checkpoint().wait(step)

    def _end_copying(self) -> None:
        if self._copying is not None:
            self._copying.wait()
            self._copying = None


def _durable_name(store: Store, restored: Restored) -> str:
    """Of the durable checkpoint of a state that came from memory; empty: it has none, as far as can be seen."""
    try:
        latest = read_latest(store)
    except (OSError, UserError):
        return ""
    return latest.name if latest is not None and latest.step == restored.step else ""
