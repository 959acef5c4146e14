"""Writing a checkpoint: aside, durably, by all ranks together, and published by one rename."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx import __version__
from phalanx.checkpoint.all_ranks import at_first, collected
from phalanx.checkpoint.format import dcp, tables
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, MANIFEST, SUMS, Manifest, Meta
from phalanx.checkpoint.format.tables import Written
from phalanx.checkpoint.snapshot_plans import Agreed, agree
from phalanx.checkpoint.storage.folder import clean, publish, writing
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.core.layout import Shard
from phalanx.core.peers import ALONE, Peers
from phalanx.core.points import NO_POINTS, Points

STAGES = (
    "checkpoint.begin",
    "checkpoint.tensors-written",
    "checkpoint.manifest-written",
    "checkpoint.before-rename",
    "checkpoint.between-renames",  # only where one of the same step is replaced and names cannot be exchanged
    "checkpoint.after-rename",
    "checkpoint.published",
)
"""The points of a save, in order, at which a fault can be injected."""


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
    """Write the checkpoint of `step` into `folder` (made if absent) and return its path.

    It is there whole or not at all, whatever happens; a checkpoint of the same step is replaced. When this returns it
    is on the disk, not only in caches. Leftovers of killed saves in `folder` are removed first.

    Called by all ranks of a job together, each writes the blocks it owns into a file of its own; rank 0 sees to the
    folder, puts the tables of all together and publishes. A rank that fails ends the save on all of them. While others
    write, a rank waits in `peers.gather`, whose time limit has to allow for that.

    Args:
        folder: the folder of the run's checkpoints, on a file system that all ranks share.
        step: optimizer steps done.
        tensors: by logical name (``model.layers.0.attention.q``), as far as this rank has them; on any device; views
            are written without their base.
        state: anything made of dicts with string keys, lists, strings, numbers and None, returned unchanged on resume.
            Rank 0's is kept.
        meta: where it comes from; rank 0's is kept.
        points: where tests inject faults, see `STAGES`; the first two are reached by every rank, the others by rank 0.
        shards: which block of its logical tensor each of `tensors` is, and whether this rank writes it. Those not
            named here are whole, and the first rank that has them writes them: of the state of random number
            generators, for example, rank 0's is kept.
        peers: the ranks that save together.

    Raises:
        UserError: the disk is full or the folder cannot be written; names the rank. Earlier checkpoints are untouched.
        TypeError: `state` holds something JSON cannot.
        ValueError: a shard has not the size of its tensor.
        RuntimeError: the blocks of all ranks do not cover each tensor exactly once.
    """
    agreed = agree(tensors, shards or {}, peers, lambda: manifests.check_state(state) if peers.rank == 0 else None)
    disk = _Disk(folder, agreed.needed_bytes)
    with ExitStack() as stack:
        aside = folder / at_first(peers, lambda: stack.enter_context(disk.begin(step)).name)
        parts = collected(peers, lambda: disk.write(aside, peers.rank, agreed, points))

        def finish() -> str:
            description = _description(step, state, meta or Meta())
            written = [tables.from_text(part) for part in parts or ()]
            return disk.finish(aside, written, description, points).name

        return folder / at_first(peers, finish)


@dataclass(frozen=True)
class _Disk:
    """The steps of a save, with refusals of the disk turned into one line with the cure."""

    folder: Path
    needed_bytes: int

    @contextmanager
    def begin(self, step: int) -> Iterator[Path]:
        """An empty folder to write in; what is still there at the end is removed."""
        with ExitStack() as stack:
            with self._errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                clean(self.folder)
                _require_room(self.folder, self.needed_bytes)
                aside = stack.enter_context(writing(self.folder, step))
            yield aside

    def write(self, aside: Path, rank: int, agreed: Agreed, points: Points) -> str:
        """Write this rank's blocks; the table of them as text."""
        with self._errors():
            if not aside.is_dir():
                problem = "is not the same folder here and on rank 0"
                raise UserError(problem, cure="put the run on a file system that all hosts share", field=str(aside))
            points.reach("checkpoint.begin", path=aside)
            written = dcp.write(aside, rank, agreed.mine)
            points.reach("checkpoint.tensors-written", path=aside)
        return tables.to_text(replace(written, left=agreed.left))

    def finish(self, aside: Path, parts: list[Written], description: dict[str, Any], points: Points) -> Path:
        """Describe what all ranks wrote, and publish it."""
        tensors = tables.merge(parts)
        with self._errors():
            files = [dcp.write_index(aside, tensors), *(part.file for part in parts if part.file is not None)]
            _write_manifest(aside, Manifest(**description, tensors=tensors, files=files))
            points.reach("checkpoint.manifest-written", path=aside)
            return publish(aside, points)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _explain(error, self.folder, self.needed_bytes) from error


def _description(step: int, state: Any, meta: Meta) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "phalanx_version": __version__,
        "torch_version": str(torch.__version__),
        "attempt": meta.attempt,
        "metrics": dict(meta.metrics),
        "layout": meta.layout,
        "config_sha256": manifests.config_sha256(meta.config),
        "config": dict(meta.config),
        "state": state,
    }


def _write_manifest(path: Path, manifest: Manifest) -> None:
    content = manifests.encode(manifest)
    write_bytes(path / MANIFEST, content)
    write_bytes(path / SUMS, manifests.sums_text(manifest.files, hashlib.sha256(content).hexdigest()))


def _require_room(folder: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, "No space left on device")


def _explain(error: OSError, folder: Path, needed_bytes: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = f"{needed_bytes} bytes ({units.size(needed_bytes)})"
        cure = "free space there, lower checkpoint.keep_last, or put the run on another disk"
        return UserError(f"has no room for a checkpoint of {need}", cure=cure, field=str(folder))
    problem = f"a checkpoint cannot be written ({error.strerror})"
    return UserError(problem, cure="make the folder writable, or put the run elsewhere", field=str(folder))
