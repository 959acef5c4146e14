"""Checkpoints for which training stands still: the ranks do what keeper and persister do in the background.

They write through the same writer and the same stores (`phalanx.checkpoint.persist.checkpoint_writer`), so the files
are the same. Two things differ: the elements come from the tensors themselves, one tensor at a time, and need no memory
for a copy of all; and the ranks wait for each other, so that a failure of one ends the save on all of them at once.
"""

from __future__ import annotations

import errno
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from phalanx.checkpoint.all_ranks import agreed, at_first
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, state_text
from phalanx.checkpoint.keeper_contract import Destination, PersistTask
from phalanx.checkpoint.persist.checkpoint_writer import Publisher, describe, write_shard
from phalanx.checkpoint.restoring.restore import Wanted
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.checkpoint_session import CheckpointSession, Tensors
from phalanx.checkpoint.session.keeper_link import SessionContext
from phalanx.checkpoint.session.snapshot_outcomes import SnapshotEvent
from phalanx.checkpoint.snapshot_plans import Roles, agree_on_blocks, plans_of
from phalanx.checkpoint.snapshot_schedule import FREE, SnapshotSchedule
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import superseded
from phalanx.checkpoint.storage.location import has_names, open_store
from phalanx.checkpoint.storage.retention import add_evaluation, prune
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.layout import Shard
from phalanx.core.peers import ALONE, Peers

STAGES = (
    "checkpoint.begin",
    "checkpoint.tensors-written",
    "persist.manifest-written",
    "checkpoint.before-rename",
    "checkpoint.between-renames",  # only where one of the same step is replaced and names cannot be exchanged
    "checkpoint.after-rename",
    "checkpoint.published",
)
"""The points of a save into a folder, in order, at which a fault can be injected; the writer has more between them."""

_NO_SLOT = -1  # the descriptor of a task whose elements are not in a slot


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Any = None,
    meta: Meta | None = None,
    *,
    points: Points = NO_POINTS,
    shards: Mapping[str, Shard] | None = None,
    peers: Peers = ALONE,
) -> Path:
    """Write a checkpoint that belongs to no attempt of a run into `folder`, and return its path.

    The pointer to the latest checkpoint is neither heeded nor moved.

    Args, raises: as `write_checkpoint`.
    """
    store = LocalStore(folder, points)
    about = (tensors, state, meta or Meta())
    return folder / write_checkpoint(store, step, *about, points=points, shards=shards, peers=peers, is_fenced=False)


def write_checkpoint(
    store: Store,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Any,
    meta: Meta,
    *,
    roles: Roles | None = None,
    stepped: bool = True,
    points: Points = NO_POINTS,
    shards: Mapping[str, Shard] | None = None,
    peers: Peers = ALONE,
    is_fenced: bool = True,
) -> str:
    """Write the checkpoint of `step`, publish it, and return its name.

    It is there whole or not at all, whatever happens; a checkpoint of the same step in a folder is replaced. When this
    returns it is on the disk, not only in caches. Leftovers of killed writers are removed first.

    Called by all ranks of a job together, each writes the blocks it owns into a file of its own; rank 0 publishes. A
    rank that fails ends the save on all of them. While others write, a rank waits in `peers`, whose time limit has to
    allow for that.

    Args:
        store: where; a folder has to be on a file system that all ranks share.
        tensors: by logical name (``model.layers.0.attention.q``), as far as this rank has them; on any device; views
            are written without their base.
        state: anything made of dicts with string keys, lists, strings, numbers and None, returned unchanged on resume.
            Rank 0's is kept.
        points: where tests inject faults, see `STAGES`; the first two are reached by every rank, the others by rank 0.
        shards: which block of its logical tensor each of `tensors` is, and whether this rank writes it. Those not
            named here are whole, and the first rank that has them writes them: of the state of random number
            generators, for example, rank 0's is kept.
        is_fenced: see `Publisher`.

    Raises:
        UserError: the disk is full or the storage cannot be written; names the rank. Earlier checkpoints are untouched.
            Or a higher attempt is in charge.
        TypeError: `state` holds something JSON cannot.
        ValueError: a shard has not the size of its tensor.
        RuntimeError: the blocks of all ranks do not cover each tensor exactly once.
    """
    agreed_blocks = agree_on_blocks(
        tensors, shards or {}, peers, lambda: manifests.check_state(state) if peers.rank == 0 else None
    )
    plans = plans_of(agreed_blocks, roles or {}, peers=peers, config=meta.config, layout=meta.layout)
    text = state_text(state, meta.config) if plans.job is not None else ""
    # As the keeper makes one of a slot, but for the sums and what examining the slot would find: training stands still,
    # and whoever asked for that wants the state as it is.
    record = Record(
        step=step,
        attempt=meta.attempt,
        set_id=plans.set_id,
        rank=plans.shard.rank,
        shards=plans.shards,
        plan_sha256=plans.shard.sha256,
        data_bytes=plans.shard.data_bytes,
        sums=(),
        state=text,
        state_sum=state_sum(text) if text else 0,
        stepped=stepped,
        unix_ns=time.time_ns(),
        metrics=dict(meta.metrics),
    )
    publisher: Publisher | None = None

    def task(nonce: str) -> PersistTask:
        return PersistTask(plans.shard, record, _NO_SLOT, Destination(store.url, nonce=nonce), plans.job)

    @contextmanager
    def refusals() -> Iterator[None]:
        """Refusals of the storage become one line with the cure."""
        try:
            yield
        except SupersededError as error:
            raise superseded(error) from error
        except OSError as error:
            raise _explain(error, store.url, agreed_blocks.needed_bytes) from error

    with ExitStack() as stack:

        def begin() -> list[str]:
            """Make an empty area; what is still there at the end, because it was not published, is removed."""
            nonlocal publisher
            nonce = secrets.token_hex(4)
            publisher = Publisher(store, task(nonce), points, is_fenced=is_fenced)
            with refusals():
                if isinstance(store, LocalStore):
                    store.path.mkdir(parents=True, exist_ok=True)
                    store.clean(record.attempt)  # what is cleared up makes room
                    if shutil.disk_usage(store.path).free < agreed_blocks.needed_bytes:
                        raise OSError(errno.ENOSPC, "No space left on device")
                area = publisher.begin()
            stack.callback(_discard, store, area)
            return [nonce, area]

        nonce, area = at_first(peers, begin)

        def write() -> None:
            with refusals():
                if publisher is None:
                    _require_same_place(store, record, nonce)
                points.reach("checkpoint.begin", path=area)
                if plans.shard.pieces or plans.job is not None:
                    blocks = agreed_blocks.mine
                    write_shard(store, area, task(nonce), points, lambda piece: _elements(blocks[piece.name].tensor))
                points.reach("checkpoint.tensors-written", path=area)

        agreed(peers, write)

        def publish() -> str:
            assert publisher is not None, "the rank that has begun it finishes it"
            with refusals():
                return publisher.finish(area)

        return at_first(peers, publish)


def _require_same_place(store: Store, record: Record, nonce: str) -> None:
    try:
        store.join(record.step, record.attempt, nonce, 0.0)
    except TimeoutError:
        problem = "is not the same folder here and on rank 0"
        cure = "put the run on a file system that all hosts share"
        raise UserError(problem, cure=cure, field=store.url) from None


def _discard(store: Store, area: str) -> None:
    with suppress(OSError):
        store.discard(area)  # nothing, once it is published


def _elements(tensor: Tensor) -> Iterator[memoryview]:
    """Row-major, without gaps, from host memory: at most one tensor at a time is copied there."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    whole = memoryview(cast(Buffer, host.reshape(-1).view(torch.uint8).numpy()))
    for start in range(0, whole.nbytes, CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _explain(error: OSError, place: str, needed_bytes: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = f"{needed_bytes} bytes ({units.size(needed_bytes)})"
        cure = "free space there, lower checkpoint.keep_last, or put the run on another disk"
        return UserError(f"has no room for a checkpoint of {need}", cure=cure, field=place)
    if "://" in place:
        cure = "see to bucket, credentials (in the environment) and network"
        return UserError(f"a checkpoint cannot be written ({describe(error)})", cure=cure, field=place)
    problem = f"a checkpoint cannot be written ({error.strerror or describe(error)})"
    return UserError(problem, cure="make the folder writable, or put the run elsewhere", field=place)


class BlockingSession(CheckpointSession):
    """Writes each checkpoint while training waits; needs no keeper and keeps nothing in memory.

    Its methods are those of `phalanx.checkpoint.session.background_session.Session`.

    Attributes:
        blocks: training stands still while a checkpoint is written.
    """

    blocks = True

    def __init__(self, job: SessionContext, schedule: SnapshotSchedule) -> None:
        super().__init__(job, schedule)
        self._store = open_store(job.destination.url, job.destination.options, job.points)
        self._shards: Mapping[str, Shard] = {}
        self._roles: Roles = {}
        self._events: list[SnapshotEvent] = []
        self._saved: int | None = None
        self._newest = (-1, "")

    def has_states(self) -> bool:
        """Whether there is anything that `restore` would try, good or not; all ranks together, the same answer."""
        return at_first(self.job.peers, lambda: has_names(self._store.url, self.job.destination.options))

    def restore(self, wanted: Wanted, shards: Mapping[str, Shard] | None = None, **options: Any) -> Restored | None:
        """Fill tensors from the newest good checkpoint."""
        restored = self._restore(wanted, shards, self._store, **options)
        self._newest = (-1, "") if restored is None else (restored.step, restored.name)
        return restored

    def watch(
        self, tensors: Tensors, shards: Mapping[str, Shard] | None, roles: Roles, *, overlap: bool | None = None
    ) -> None:
        """Say what checkpoints consist of; `overlap` matters in the background only."""
        self._tensors, self._shards, self._roles = tensors, shards or {}, roles

    def ask(self, step: int) -> None:
        """The step that will be number `step` begins."""
        self._step = step
        self._schedule.begin(step - 1)
        if self._schedule.needs_agreement(step):
            self._agreement = self.job.peers.ask_highest(self._schedule.vote(step, FREE))

    def fence(self) -> None:
        """Nothing is under way that parameters must not be changed for."""

    def after_step(
        self,
        step: int,
        state: Callable[[], Any],
        *,
        stepped: Callable[[], bool] | bool = True,
        metrics: Mapping[str, float] | None = None,
        ending: bool = False,
    ) -> None:
        """Write a checkpoint if one is due, or this is the last step of the process."""
        if self._step != step:
            self.ask(step)  # a loop that does not call it
        agreement, self._agreement = self._agreement, None
        due = agreement is not None and self._schedule.decide(step, agreement()).persist
        # An end comes again after the last step, and knows no metrics.
        if not (due or ending) or self._saved == step:
            return
        self._schedule.note_taken(step, persist=True)
        moved = stepped() if callable(stepped) else stepped
        began_s, job, tensors = time.perf_counter(), self.job, self._present_tensors()
        name = write_checkpoint(
            self._store,
            step,
            tensors,
            state() if job.peers.rank == 0 else None,
            Meta(dict(job.run_config), self.attempt, metrics=dict(metrics or {}), layout=str(job.layout)),
            roles=self._roles,
            stepped=moved,
            points=job.points,
            shards=self._shards,
            peers=job.peers,
        )
        self._newest = (step, name)
        at_first(job.peers, partial(self._prune, step))
        seconds = time.perf_counter() - began_s
        written_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._schedule.note_durable(seconds, 0.0)
        event = SnapshotEvent(step, True, stall_s=seconds, persist_s=seconds, persist_bytes=written_bytes, name=name)
        self._events.append(event)
        self._saved = step

    def evaluated(self, evaluation: Evaluation) -> None:
        """The state of a step was evaluated: kept with its checkpoint, if one was taken."""
        step, name = self._newest
        if self.job.peers.rank == 0 and step == evaluation.step:
            add_evaluation(self._store, name, evaluation, self.job.config, self.job.report)

    def events(self) -> list[SnapshotEvent]:
        """Checkpoints written since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def status(self) -> str:
        """What is durable, in one line for people."""
        return f"{self._newest[1]} is durable" if self._newest[1] else "nothing is durable yet"

    def finish(self, *, clean: bool) -> None:
        """Nothing is left open."""

    def _prune(self, step: int) -> None:
        try:
            prune(self._store, self.job.config, good_step=step)
        except OSError as error:  # the checkpoint is there; the next one tries again
            self.job.report(f"old checkpoints were not deleted: {describe(error)}")
