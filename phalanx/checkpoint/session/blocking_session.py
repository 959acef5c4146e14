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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from phalanx.checkpoint.all_ranks import agreed, at_first
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.dcp import Block
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Piece, Record, state_text
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper_contract import Destination, PersistTask
from phalanx.checkpoint.persist.checkpoint_writer import Publisher, describe, write_shard
from phalanx.checkpoint.restoring.restore import RefusedStates, Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.background_session import Tensors
from phalanx.checkpoint.session.snapshot_outcomes import Event
from phalanx.checkpoint.snapshot_plans import Plans, Roles, agree, plans_of
from phalanx.checkpoint.snapshot_schedule import FREE, SnapshotAgenda
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import superseded
from phalanx.checkpoint.storage.location import claimed, clean, has_names, open_store
from phalanx.checkpoint.storage.retention import add_evaluation, prune
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.layout import Layout, Shard
from phalanx.core.peers import ALONE, Copies, Peers

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

NO_SLOT = -1
"""The descriptor of a task whose elements are not in a slot."""


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
        step: optimizer steps done.
        tensors: by logical name (``model.layers.0.attention.q``), as far as this rank has them; on any device; views
            are written without their base.
        state: anything made of dicts with string keys, lists, strings, numbers and None, returned unchanged on resume.
            Rank 0's is kept.
        meta: where it comes from; rank 0's is kept.
        roles: what each tensor is to training.
        stepped: whether the optimizer has stepped since the checkpoint before.
        points: where tests inject faults, see `STAGES`; the first two are reached by every rank, the others by rank 0.
        shards: which block of its logical tensor each of `tensors` is, and whether this rank writes it. Those not
            named here are whole, and the first rank that has them writes them: of the state of random number
            generators, for example, rank 0's is kept.
        peers: the ranks that save together.
        is_fenced: see `Publisher`.

    Raises:
        UserError: the disk is full or the storage cannot be written; names the rank. Earlier checkpoints are untouched.
            Or a higher attempt is in charge.
        TypeError: `state` holds something JSON cannot.
        ValueError: a shard has not the size of its tensor.
        RuntimeError: the blocks of all ranks do not cover each tensor exactly once.
    """
    who_writes = agree(tensors, shards or {}, peers, lambda: manifests.check_state(state) if peers.rank == 0 else None)
    plans = plans_of(who_writes, roles or {}, peers=peers, config=meta.config, layout=meta.layout)
    record = _record(plans, step, state if peers.rank == 0 else None, meta, stepped=stepped)
    saving = _Saving(store, points, who_writes.needed_bytes)
    with ExitStack() as stack:
        nonce, area = at_first(peers, lambda: saving.begin(stack, plans, record, is_fenced=is_fenced))
        task = saving.task(plans, record, nonce)
        agreed(peers, lambda: saving.write(area, task, who_writes.mine))
        return at_first(peers, lambda: saving.finish(area))


def _record(plans: Plans, step: int, state: Any, meta: Meta, *, stepped: bool) -> Record:
    """As the keeper makes one of a slot, but for what examining the slot would tell.

    Nothing is examined here: training stands still, and whoever asked for that wants the state as it is.
    """
    text = state_text(state, meta.config) if plans.job is not None else ""
    return Record(
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


@dataclass
class _Saving:
    """The steps of a save, with refusals of the storage turned into one line with the cure."""

    store: Store
    points: Points
    needed_bytes: int
    _publisher: Publisher | None = None

    def task(self, plans: Plans, record: Record, nonce: str) -> PersistTask:
        """What this rank writes."""
        return PersistTask(plans.shard, record, NO_SLOT, Destination(self.store.url, nonce=nonce), plans.job)

    def begin(self, stack: ExitStack, plans: Plans, record: Record, *, is_fenced: bool) -> list[str]:
        """Make an empty area; what is still there when `stack` ends is removed."""
        nonce = secrets.token_hex(4)
        publisher = Publisher(self.store, self.task(plans, record, nonce), self.points, is_fenced=is_fenced)
        with self._refusals():
            if isinstance(self.store, LocalStore):
                self.store.path.mkdir(parents=True, exist_ok=True)
                self.store.clean(record.attempt)  # what is cleared up makes room
                _require_room(self.store.path, self.needed_bytes)
            area = publisher.begin()
        self._publisher = publisher
        stack.callback(self._discard, area)
        return [nonce, area]

    def write(self, area: str, task: PersistTask, mine: Mapping[str, Block]) -> None:
        """Write this rank's blocks."""

        def elements(piece: Piece) -> Iterable[Buffer]:
            return _elements(mine[piece.name].tensor)

        with self._refusals():
            if self._publisher is None:
                self._require_same_place(task)
            self.points.reach("checkpoint.begin", path=area)
            if task.plan.pieces or task.job is not None:
                write_shard(self.store, area, task, self.points, elements)
            self.points.reach("checkpoint.tensors-written", path=area)

    def finish(self, area: str) -> str:
        """Publish what all ranks have written."""
        assert self._publisher is not None, "the rank that has begun it finishes it"
        with self._refusals():
            return self._publisher.finish(area)

    def _require_same_place(self, task: PersistTask) -> None:
        record = task.record
        try:
            self.store.join(record.step, record.attempt, task.destination.nonce, 0.0)
        except TimeoutError:
            problem = "is not the same folder here and on rank 0"
            cure = "put the run on a file system that all hosts share"
            raise UserError(problem, cure=cure, field=self.store.url) from None

    def _discard(self, area: str) -> None:
        with suppress(OSError):
            self.store.discard(area)  # nothing, once it is published

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except SupersededError as error:
            raise superseded(error) from error
        except OSError as error:
            raise _explain(error, self.store.url, self.needed_bytes) from error


def _elements(tensor: Tensor) -> Iterator[memoryview]:
    """Row-major, without gaps, from host memory: at most one tensor at a time is copied there."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    whole = memoryview(cast(Buffer, host.reshape(-1).view(torch.uint8).numpy()))
    for start in range(0, whole.nbytes, CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _require_room(folder: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, "No space left on device")


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


class BlockingSession:
    """Writes each checkpoint while training waits; needs no keeper and keeps nothing in memory.

    Args:
        url: of the checkpoints; a folder has to be on a file system that all ranks share.
        config, peers, copies, layout, run_config, report, points: as of
            `phalanx.checkpoint.session.open_session.open_session`.

    Attributes:
        blocks: training stands still while a checkpoint is written.
    """

    blocks = True

    def __init__(
        self,
        url: str,
        config: CheckpointConfig,
        *,
        peers: Peers = ALONE,
        copies: Copies | None = None,
        layout: Layout | str = "1",
        run_config: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print,
        points: Points = NO_POINTS,
    ) -> None:
        self._config, self._peers, self._copies = config, peers, copies
        self._layout, self._run_config = str(layout), dict(run_config or {})
        self._report, self._points = report, points
        self._store = open_store(url, config.storage_options, points)
        self.attempt: int = at_first(peers, lambda: claimed(url, config.storage_options, 0, report))
        self._agenda = SnapshotAgenda(config, AutoInterval(config), decides=peers.rank == 0)
        self._answer: Callable[[], int] | None = None
        self._tensors: Tensors = {}
        self._shards: Mapping[str, Shard] = {}
        self._roles: Roles = {}
        self._events: list[Event] = []
        self._asked: int | None = None
        self._saved: int | None = None
        self._newest = (-1, "")
        self._refused = RefusedStates()

    def has_states(self) -> bool:
        """Whether there is anything that `restore` would try, good or not; all ranks together, the same answer."""
        return at_first(self._peers, lambda: has_names(self._store.url, self._config.storage_options))

    def restore(self, wanted: Wanted, shards: Mapping[str, Shard] | None = None, **options: Any) -> Restored | None:
        """Fill tensors from the newest good checkpoint; see `Session.restore`."""
        at_first(self._peers, partial(clean, self._store, self.attempt))
        restored = restore(
            wanted,
            keeper=None,
            store=self._store,
            report=self._report,
            shards=shards,
            peers=self._peers,
            copies=self._copies,
            verify=self._config.verify,
            refused=self._refused,
            **options,
        )
        self._newest = (-1, "") if restored is None else (restored.step, restored.name)
        return restored

    def watch(
        self, tensors: Tensors, shards: Mapping[str, Shard] | None, roles: Roles, *, overlap: bool | None = None
    ) -> None:
        """Say what checkpoints consist of; `overlap` matters in the background only."""
        self._tensors, self._shards, self._roles = tensors, shards or {}, roles

    def ask(self, step: int) -> None:
        """The step that will be number `step` begins."""
        self._asked = step
        self._agenda.begin(step - 1)
        if self._agenda.asks(step):
            self._answer = self._peers.ask_highest(self._agenda.says(step, FREE))

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
        """Write a checkpoint if one is due, or this is the last step of the process; see `Session.after_step`."""
        if self._asked != step:
            self.ask(step)  # a loop that does not call it
        answer, self._answer = self._answer, None
        due = answer is not None and self._agenda.decide(step, answer()).persist
        if (due or ending) and self._saved != step:  # an end comes again after the last step, and knows no metrics
            self._agenda.took(step, persist=True)
            self._save(step, state, dict(metrics or {}), stepped=stepped() if callable(stepped) else stepped)
            self._saved = step

    def evaluated(self, evaluation: Evaluation) -> None:
        """As of `Session.evaluated`; the checkpoint, if one was taken, is durable."""
        step, name = self._newest
        if self._peers.rank == 0 and step == evaluation.step:
            add_evaluation(self._store, name, evaluation, self._config, self._report)

    def events(self) -> list[Event]:
        """Checkpoints written since the last call."""
        events, self._events = self._events, []
        return events

    def costs(self) -> dict[str, Any]:
        """As of `Session.costs`."""
        return self._agenda.auto.to_json()

    def recall(self, costs: dict[str, Any] | None, *, failed: bool) -> None:
        """As of `Session.recall`."""
        self._agenda.recall(costs, 1, failed=failed)

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take, seconds; 0: none was seen yet."""
        return self._agenda.auto.expected_durable_s

    @property
    def status(self) -> str:
        """As of `Session.status`; training waits, so that what is asked for is durable."""
        return f"{self._newest[1]} is durable" if self._newest[1] else "nothing is durable yet"

    def finish(self, *, clean: bool) -> None:
        """Nothing is left open."""

    def _save(self, step: int, state: Callable[[], Any], metrics: dict[str, float], *, stepped: bool) -> None:
        began_s = time.perf_counter()
        tensors = self._tensors() if callable(self._tensors) else self._tensors
        name = write_checkpoint(
            self._store,
            step,
            tensors,
            state() if self._peers.rank == 0 else None,
            Meta(self._run_config, self.attempt, metrics=metrics, layout=self._layout),
            roles=self._roles,
            stepped=stepped,
            points=self._points,
            shards=self._shards,
            peers=self._peers,
        )
        self._newest = (step, name)
        at_first(self._peers, partial(self._prune, step))
        seconds = time.perf_counter() - began_s
        written_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._agenda.durable(seconds, 0.0)
        self._events.append(
            Event(step, True, stall_s=seconds, persist_s=seconds, persist_bytes=written_bytes, name=name)
        )

    def _prune(self, step: int) -> None:
        """Delete what is no longer to be kept."""
        try:
            prune(self._store, self._config, good_step=step)
        except OSError as error:  # the checkpoint is there; the next one tries again
            self._report(f"old checkpoints were not deleted: {describe(error)}")
