"""Reading checkpoints: find the newest whole one, and fill tensors from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint import dcp
from phalanx.checkpoint.folder import Candidate, candidates, clean
from phalanx.checkpoint.manifest import DamagedCheckpointError, Manifest, TensorEntry
from phalanx.checkpoint.verify import examine
from phalanx.core.errors import UserError

__all__ = ["Candidate", "Checkpoint", "Differences", "candidates", "newest", "open_checkpoint"]

_SHOWN = 8


@dataclass(frozen=True)
class Differences:
    """Names on one side only, after a load that was not strict."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest.step

    @property
    def state(self) -> Any:
        """What was given to `save` as state, as plain JSON values."""
        return self.manifest.state

    def load_into(self, tensors: Mapping[str, Tensor], *, strict: bool = True, cast: bool = False) -> Differences:
        """Fill `tensors` in place, on whatever device they are; nothing is changed if anything does not fit.

        Args:
            tensors: by the names under which they were saved; of the saved shapes and dtypes.
            strict: every name must be on both sides; otherwise only those on both are filled.
            cast: convert where the dtypes differ instead of refusing.

        Returns:
            The names that are not in the checkpoint (missing) or only there (unexpected); both empty when strict.

        Raises:
            UserError: listing what is missing, unexpected, or of another shape or dtype.
            DamagedCheckpointError: the files do not hold what the manifest says, or were replaced meanwhile; only then
                may some of `tensors` have been filled.
        """
        saved = self.manifest.tensors
        differences = Differences(
            missing=tuple(name for name in tensors if name not in saved),
            unexpected=tuple(name for name in saved if name not in tensors),
        )
        common = {name: tensor for name, tensor in tensors.items() if name in saved}
        problems = [p for name, t in common.items() for p in _misfits(name, saved[name], t, cast)]
        if strict:
            problems += _listed("missing in the checkpoint", differences.missing)
            problems += _listed("only in the checkpoint", differences.unexpected)
        if problems:
            cure = "use the config it was written with, or train.init_from to take over weights only"
            raise UserError("does not fit: " + "; ".join(problems[:_SHOWN]), cure=cure, field=str(self.path))
        self._fill(common)
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
            problem = "; ".join(_listed("missing in the checkpoint", tuple(absent)))
            raise UserError(problem, cure="see `phalanx checkpoint inspect` for its tensors", field=str(self.path))
        fresh = {name: torch.empty(saved[name].shape, dtype=dcp.torch_dtype(saved[name].dtype)) for name in wanted}
        self._fill(fresh)
        return fresh

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        try:
            dcp.read(self.path, self.manifest, tensors)
        except (MemoryError, torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:
            raise DamagedCheckpointError(self.path, f"its tensors cannot be read ({_first_line(error)})") from error
        if examine(self.path, checksums=False) != self.manifest:
            raise DamagedCheckpointError(self.path, "it was replaced by another process while being read")


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open the checkpoint in the folder `path`, first checking that it is whole.

    Args:
        path: the folder ``step-…`` itself.
        verify: hash every byte; otherwise only names, sizes and the manifest are checked.

    Raises:
        DamagedCheckpointError: torn, corrupted, or no checkpoint.
        UserError: written by a newer version.
    """
    while True:
        identity = _identity(path)
        try:
            return Checkpoint(path, examine(path, checksums=verify))
        except DamagedCheckpointError:
            # Another process may have published a new checkpoint of this step over the one being read: look again.
            if identity is None or _identity(path) in (identity, None):
                raise


def newest(folder: Path, report: Callable[[str], None], *, verify: bool = True) -> Checkpoint | None:
    """The newest whole checkpoint of `folder`, or None where there is none.

    Each newer one that is torn or corrupted is passed over, and `report` is called with one line that says so and why.
    Leftovers of killed writers are cleared up first. A writer or pruner at work in another process does no harm.
    """
    clean(folder)
    tried: set[tuple[int, int] | None] = set()
    while fresh := [c for c in candidates(folder) if _identity(c.path) not in tried]:
        tried.add(_identity(fresh[0].path))
        try:
            return open_checkpoint(fresh[0].path, verify=verify)
        except DamagedCheckpointError as damage:
            if fresh[0].path.exists():
                report(f"checkpoint {fresh[0].path.name} is damaged ({damage.reason}); trying the one before it")
    return None


def _misfits(name: str, saved: TensorEntry, tensor: Tensor, cast: bool) -> list[str]:
    if list(tensor.shape) != saved.shape:
        return [f"{name} has shape {tuple(tensor.shape)} here and {tuple(saved.shape)} in the checkpoint"]
    if not cast and tensor.dtype != dcp.torch_dtype(saved.dtype):
        here = str(tensor.dtype).removeprefix("torch.")
        return [f"{name} has dtype {here} here and {saved.dtype} in the checkpoint"]
    return []


def _listed(what: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"]


def _identity(path: Path) -> tuple[int, int] | None:
    """What distinguishes this folder from another that later bears its name; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
