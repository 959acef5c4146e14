"""Reading checkpoints: find the newest whole one, and fill tensors from it, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.fit import CHECKPOINT, Differences, listed, require_fit
from phalanx.checkpoint.format import dcp, tables
from phalanx.checkpoint.format.blocks import Block, held
from phalanx.checkpoint.format.files import Files, files_of
from phalanx.checkpoint.format.fill import fill
from phalanx.checkpoint.format.manifest import DamagedCheckpointError, Manifest, decode, encode
from phalanx.checkpoint.format.tables import share_out
from phalanx.checkpoint.format.verify import check_file, examine
from phalanx.checkpoint.storage.base import Store, Stored
from phalanx.checkpoint.storage.folder import Candidate, candidates
from phalanx.checkpoint.storage.local import LocalStore
from phalanx.checkpoint.storage.order import Order
from phalanx.checkpoint.together import at_first, everywhere
from phalanx.core.errors import UserError
from phalanx.core.peers import ALONE, Peers
from phalanx.core.shard import Shard

__all__ = ["Candidate", "Checkpoint", "Differences", "candidates", "newest", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: its files, and what they are."""

    files: Files
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Where it lies, of one in a folder."""
        return Path(self.files.url)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest.step

    @property
    def state(self) -> Any:
        """What was given to `save` as state, as plain JSON values."""
        return self.manifest.state

    def load_into(
        self,
        tensors: Mapping[str, Tensor],
        *,
        shards: Mapping[str, Shard] | None = None,
        strict: bool = True,
        cast: bool = False,
        peers: Peers = ALONE,
    ) -> Differences:
        """Fill `tensors` in place, on whatever device they are; nothing is changed if anything does not fit.

        Called by several ranks together (with `peers`), each fills its own, in whatever layout the checkpoint was
        written; if anything does not fit on one of them, nothing is changed on any.

        Args:
            tensors: by the names under which they were saved; of the saved shapes and dtypes.
            shards: which block of its logical tensor each of `tensors` is; those not named here are whole.
            strict: every name must be on both sides; otherwise only those on both are filled. Names of which another
                rank has a part are on both sides.
            cast: convert where the dtypes differ instead of refusing.
            peers: the ranks that load together.

        Returns:
            The names that are not in the checkpoint (missing) or only there (unexpected); both empty when strict.

        Raises:
            UserError: listing what is missing, unexpected, or of another shape or dtype.
            DamagedCheckpointError: the files do not hold what the manifest says, or were replaced meanwhile; only then
                may some of `tensors` have been filled.
            ValueError: a shard has not the size of its tensor.
        """
        saved = self.manifest.tensors
        blocks: dict[str, Block] = {}
        everywhere(peers, lambda: blocks.update(held(tensors, shards or {})))
        differences = require_fit(
            self.files.url, saved, blocks, peers, strict=strict, cast=cast, misses_empty=True, words=CHECKPOINT
        )
        self._fill({name: block for name, block in blocks.items() if name in saved}, peers)
        return differences

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors called `names` (default: all) as new tensors in host memory.

        Raises:
            UserError: one of the names is not in the checkpoint.
            DamagedCheckpointError: the files do not hold what the manifest says.
        """
        saved = self.manifest.tensors
        wanted = list(saved) if names is None else list(names)
        absent = [name for name in wanted if name not in saved]
        if absent:
            problem = "; ".join(listed("missing in the checkpoint", absent, len(absent)))
            raise UserError(problem, cure="see `phalanx checkpoint show` for its tensors", field=self.files.url)
        fresh = {name: torch.empty(saved[name].shape, dtype=dcp.torch_dtype(saved[name].dtype)) for name in wanted}
        self._fill(held(fresh, {}), ALONE)
        return fresh

    def _fill(self, targets: Mapping[str, Block], peers: Peers) -> None:
        everywhere(peers, lambda: self._fill_here(targets))
        at_first(peers, self._require_same)

    def _fill_here(self, targets: Mapping[str, Block]) -> None:
        try:
            fill(self.files, self.manifest.tensors, targets)
        except (MemoryError, torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:
            raise DamagedCheckpointError(
                self.files.url, f"its tensors cannot be read ({_first_line(error)})"
            ) from error

    def _require_same(self) -> None:
        if examine(self.files, checksums=False) != self.manifest:
            raise DamagedCheckpointError(self.files.url, "it was replaced by another process while being read")


def open_checkpoint(place: Path | Files, *, verify: bool = True, manifest_sha256: str = "") -> Checkpoint:
    """Open the checkpoint at `place`, first checking that it is whole.

    Args:
        place: the folder ``step-…`` itself, or the files of a checkpoint in a store (`Stored`).
        verify: hash every byte; otherwise only names, sizes and the manifest are checked.
        manifest_sha256: what the manifest's checksum has to be, where that is known.

    Raises:
        DamagedCheckpointError: torn, corrupted, or no checkpoint.
        UserError: written by a newer version.
    """
    files = files_of(place)
    while True:
        identity = files.identity()
        try:
            return Checkpoint(files, examine(files, checksums=verify, manifest_sha256=manifest_sha256))
        except DamagedCheckpointError:
            # Another process may have published a new checkpoint of this step over the one being read: look again.
            if files.identity() in (identity, "") or not identity:
                raise


def newest(
    place: Path | Store, report: Callable[[str], None], *, verify: bool = True, peers: Peers = ALONE
) -> Checkpoint | None:
    """The newest whole checkpoint at `place`, a folder or a store, or None where there is none.

    Where there is a pointer (`phalanx.checkpoint.storage.latest`), the one that it names comes first, then older ones;
    others were not published by the attempt in charge and are not used, which is reported. Each one that is torn or
    corrupted is passed over, and `report` is called with one line that says so and why. Leftovers of killed writers in
    a folder are cleared up first. A writer or pruner at work in another process does no harm.

    Called by several ranks together (with `peers`), all get the same one. Rank 0 looks, clears up, reports, and sends
    the manifest to the others, so that not all of them read it from the disk; the files are divided among all ranks
    to be hashed, so every byte is read once, and by as many ranks at a time as there are.

    Raises:
        UserError: it was written by a newer version.
        OSError: storage refuses to say what there is.
    """
    look = _Look(LocalStore(place) if isinstance(place, Path) else place, report)
    while (found := look.offer(peers)) is not None:
        reasons = everywhere(peers, partial(_damage, found, peers)) if verify else []
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return found
        if peers.rank == 0:
            look.refuse(found.files, reason)
    return None


class _Look:
    """Rank 0's search for the newest checkpoint, which remembers what it has offered."""

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store = store
        self._order = Order(store, report)
        self._report = report
        self._tried: set[tuple[str, str]] = set()

    def offer(self, peers: Peers) -> Checkpoint | None:
        """The next newest one in which nothing is wrong at first sight; the same on all ranks."""
        here: list[Checkpoint] = []

        def look() -> list[str] | None:
            here.extend(self._next())
            content = (encode(found.manifest).decode() for found in here if peers.size > 1)
            return [here[0].files.name, tables.pack(next(content, None))] if here else None

        told = at_first(peers, look)
        if told is None or here:
            return here[0] if here else None
        files = Stored(self._store, told[0])
        return Checkpoint(files, decode(tables.unpack(told[1]).encode(), files.url))

    def refuse(self, files: Files, reason: str) -> None:
        """Report that it is damaged, unless another has meanwhile taken its place."""
        identity = files.identity()
        if identity and (files.name, identity) in self._tried:
            self._report(f"checkpoint {files.name} is damaged ({reason}); trying the one before it")

    def _next(self) -> list[Checkpoint]:
        self._store.clean(0)
        while fresh := [c for c in self._order.names() if (c[0], self._store.identity(c[0])) not in self._tried]:
            name, manifest_sha256 = fresh[0]
            files = Stored(self._store, name)
            self._tried.add((name, files.identity()))
            try:
                return [open_checkpoint(files, verify=False, manifest_sha256=manifest_sha256)]
            except DamagedCheckpointError as damage:
                self.refuse(files, damage.reason)
        return []


def _damage(found: Checkpoint, peers: Peers) -> str | None:
    """What is wrong with this rank's share of the files."""
    files = {file.name: file for file in found.manifest.files}
    share = share_out({name: file.size_bytes for name, file in files.items()}, peers.size)[peers.rank]
    try:
        for name in share:
            check_file(found.files, files[name])
    except DamagedCheckpointError as damage:
        return damage.reason
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
