"""One durable checkpoint, opened by hand: reading some of its tensors, or all of them, into any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.all_ranks import agreed, at_first
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Files, examine, files_of
from phalanx.checkpoint.format.dcp import Block, held, torch_dtype
from phalanx.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, Manifest
from phalanx.checkpoint.restoring.compatibility import CHECKPOINT, Differences, listed, read_items, require_fit
from phalanx.checkpoint.restoring.durable_source import DurableSource
from phalanx.checkpoint.restoring.restore import Opened, Targets, restore
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.location import clean
from phalanx.core.errors import UserError
from phalanx.core.files import store_failures_told
from phalanx.core.layout import Shard
from phalanx.core.peers import ALONE, Peers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: its files, and what they are; `verify`: what is read is checked once more."""

    files: Files
    manifest: Manifest
    verify: bool = True

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
        blocks: dict[str, Block] = {}
        agreed(peers, lambda: blocks.update(held(tensors, shards or {})))
        differences = require_fit(
            self.files.url,
            self.manifest.tensors,
            blocks,
            peers,
            strict=strict,
            cast=cast,
            misses_empty=True,
            words=CHECKPOINT,
        )
        agreed(peers, lambda: self._fill(blocks))
        at_first(peers, self._require_same)
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
        fresh = {name: torch.empty(saved[name].shape, dtype=torch_dtype(saved[name].dtype)) for name in wanted}
        self._fill(held(fresh, {}))
        self._require_same()
        return fresh

    def _fill(self, blocks: Mapping[str, Block]) -> None:
        source = DurableSource(self.files, self.manifest, verify=self.verify)
        faults = source.read(read_items(source.tensors, blocks)).faults
        if faults:
            raise DamagedCheckpointError(self.files.url, f"its tensors cannot be read ({faults[0].cause})")

    def _require_same(self) -> None:
        try:
            with store_failures_told():
                now = manifests.decode(self.files.read(MANIFEST), self.files.url)
            is_same = now.model_copy(update={"metrics": self.manifest.metrics}) == self.manifest
        except OSError:
            is_same = False
        if not is_same:
            raise DamagedCheckpointError(self.files.url, "it was replaced by another process while being read")


def open_checkpoint(place: Path | Files, *, verify: bool = True, manifest_sha256: str = "") -> Checkpoint:
    """Open the checkpoint at `place`, first checking that it is whole: every file, needed or not.

    Args:
        place: the folder ``step-…`` itself, or the files of a checkpoint in a store (`Stored`).
        verify: hash every byte; otherwise only names, sizes and the manifest are checked.
        manifest_sha256: what the manifest's checksum has to be, where that is known.

    Raises:
        DamagedCheckpointError: torn, corrupted, or no checkpoint.
        UserError: written by a newer version, or the store fails.
    """
    files = files_of(place)
    while True:
        identity = files.identity()
        try:
            with store_failures_told():
                return Checkpoint(files, examine(files, checksums=verify, manifest_sha256=manifest_sha256), verify)
        except DamagedCheckpointError:
            # Another process may have published a new checkpoint of this step over the one being read: look again.
            if files.identity() in (identity, "") or not identity:
                raise


def newest(
    place: Path | Store, report: Callable[[str], None], *, verify: bool = True, peers: Peers = ALONE
) -> Checkpoint | None:
    """The newest checkpoint at `place`, a folder or a store, from which everything can be read; None: there is none.

    It is the one that `phalanx.checkpoint.restoring.restore.restore` takes, to which this is a door like others.
    Leftovers of killed writers in a folder are cleared up first. A writer or pruner at work in another process does no
    harm. Called by several ranks together (with `peers`), all get the same one, and every byte is read once.

    Args:
        place: where they are.
        report: called on rank 0 with one line for each one that is passed over, and for damage to a file that nothing
            is restored from.
        verify: read every byte of the tensors and check it.
        peers: the ranks.

    Raises:
        UserError: it was written by a newer version, or storage refuses to say what there is, or there are checkpoints
            and none is good.
    """
    store = LocalStore(place) if isinstance(place, Path) else place
    found: list[DurableSource] = []

    def look(opened: Opened) -> Targets:
        if verify:
            opened.verify()
        assert isinstance(opened.source, DurableSource)
        found[:] = [opened.source]
        return Targets({})

    at_first(peers, lambda: clean(store, 0))
    restored = restore(look, keeper=None, store=store, report=report, peers=peers, strict=False, verify=verify)
    return None if restored is None else Checkpoint(found[0].files, found[0].manifest, verify)
