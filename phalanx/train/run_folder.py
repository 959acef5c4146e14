"""The folder of a run: its lock, its resolved config, what it ran on, and whether it may be gone on with.

runs/NAME/config.json        every setting as it was resolved
          environment.json   versions, commit and hardware of every start
          metrics.jsonl      one line per step
          out_of_memory.json passes that one of several ranks had no memory for
          ended.json         how the newest start ended, where it could still say so
          run.json           a name, a note and tags that people gave it (`phalanx runs note`)
          moved.json         that the folder was moved or removed while the run trained
          checkpoints/       step-00000100, …
          tokenizer/         what is needed to read and write text
          samples.jsonl      what the model made of a prompt at each evaluation, when asked for
          profile/           torch.profiler traces, when asked for
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from phalanx.core.config import validate
from phalanx.core.errors import UserError, not_permitted
from phalanx.core.files import OddFileError, read_regular, write_json
from phalanx.telemetry.alerts.alert_config import without_addresses
from phalanx.train.config import RunConfig
from phalanx.train.derived.resume_changes import changes_between, require_allowed

_CONFIG_MOST_BYTES = 64 << 20
_REFUSED_MOST_BYTES = 1 << 16
_PACKAGES = ("phalanx-train", "torch", "numpy", "tokenizers", "pydantic")


@dataclass(frozen=True)
class Refused:
    """Passes that one of several ranks of `layout` had no memory for, so that all ended: the next start takes less."""

    layout: str
    micro_batch: int
    recompute: str

    def write(self, folder: RunFolder) -> None:
        """Keep it; where the disk refuses, a person has to set what to take."""
        with suppress(OSError):
            write_json(folder.out_of_memory, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Refused | None:
        """The newest that was kept; None: there is none that can be read."""
        try:
            found = cls(**json.loads(read_regular(folder.out_of_memory, _REFUSED_MOST_BYTES)))
            return replace(found, micro_batch=int(found.micro_batch))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run. Holding an object made by `open_for_training` holds the run's lock."""

    path: Path
    lock: IO[str] | None = None
    # config of the run that was in it, with which this start may go on; None: it has none that can be read
    former: RunConfig | None = None
    # settings that a run goes on with and that were others before, as ``key: old -> new``
    changes: tuple[str, ...] = ()
    note: str = ""  # what is wrong with it and stops nothing
    starts: int = 0  # of the run, with this one

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def out_of_memory(self) -> Path:
        """Where `Refused` is kept."""
        return self.path / "out_of_memory.json"

    def config(self) -> RunConfig:
        """The resolved config that was saved; refused if there is no run here, or it cannot be read."""
        path = self.path / "config.json"
        try:
            tree = json.loads(read_regular(path, _CONFIG_MOST_BYTES))
        except FileNotFoundError:
            raise self._no_run("it has no config.json") from None
        except NotADirectoryError:
            raise self._no_run("it is no folder") from None
        except (OddFileError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OddFileError) else error
            raise _TornError(
                f"its config.json is damaged ({why})",
                cure="delete it and train on in the folder: the newest checkpoint has the config too",
                value=str(self.path),
            ) from None
        except PermissionError:
            raise not_permitted(path) from None
        except OSError as error:
            raise self._no_run(error.strerror or str(error)) from None
        return kept_config(tree, str(path))

    def _no_run(self, why: str) -> UserError:
        cure = "give the folder that `phalanx train` wrote"
        return UserError(f"is no run folder ({why})", cure=cure, value=str(self.path))

    def record_config(self, config: RunConfig) -> None:
        """Write the resolved config down: from now on the folder belongs to a run of this config."""
        write_json(self.path / "config.json", config.model_dump(mode="json"))

    def release(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            self.lock.close()


def open_for_training(config: RunConfig, path: Path) -> RunFolder:
    """Make or reopen the folder of a run, take its lock, and write down the environment.

    The config is only compared here and written with `RunFolder.record_config` once the run stands: a run that cannot
    even start (a wrong path, say) must not bind the folder to its mistakes, nor change what another run wrote there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("a")
    except OSError as error:
        raise _unwritable(path, error) from None
    folder = RunFolder(path, lock)
    try:
        try:
            _take(lock)
        except BlockingIOError:
            raise UserError(
                "another process is training in it",
                cure="wait for it, stop it, or set run.folder to a new name",
                field="run.folder",
                value=str(path),
            ) from None
        if (path / "config.json").exists():
            folder = _compared(config, folder)
        folder.checkpoints.mkdir(exist_ok=True)
        environments = path / "environment.json"
        starts = [*_read_list(environments), _environment()]
        write_json(environments, starts)
        folder = replace(folder, starts=len(starts))
    except OSError as error:
        folder.release()
        raise _unwritable(path, error) from None
    except UserError:
        folder.release()
        raise
    return folder


def note_hardware(folder: RunFolder, hardware: Mapping[str, Any]) -> None:
    """Add `hardware` to the newest start in environment.json."""
    path = folder.path / "environment.json"
    starts = _read_list(path)
    if starts:
        starts[-1]["hardware"] = dict(hardware)
        write_json(path, starts)


def changes_text(changes: Iterable[str]) -> str:
    """For a person, a line each."""
    return "\n  ".join(["going on with other settings than before:", *changes])


def kept_config(tree: Any, where: str) -> RunConfig:
    """The config that a run, or a checkpoint, was kept with; refused if this version does not know its settings."""
    try:
        if not isinstance(tree, dict):
            raise UserError("is no table of settings", cure="put back the one that was written")
        return validate(RunConfig, tree)
    except UserError as error:
        raise UserError(
            f"does not hold the settings of a run: {error.field + ': ' if error.field else ''}{error.problem}",
            cure="undo what was edited there, or use the version of phalanx that wrote it",
            value=where,
        ) from None


def _take(lock: IO[str]) -> None:
    """Take the lock of a run; whoever only looks whether it is held (`phalanx runs`) has it for microseconds."""
    for _ in range(5):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


class _TornError(UserError):
    """A config.json that does not hold what was written."""


def _compared(config: RunConfig, folder: RunFolder) -> RunFolder:
    """`folder` with the config of the run in it, once it is known that the run may go on with the present one."""
    where = {"field": "run.folder", "value": str(folder.path)}
    if config.run.resume == "never":
        cure = "set run.folder to a new name, or run.resume=same to go on with it"
        raise UserError("already holds a run", cure=cure, **where)
    try:
        former = folder.config()
    except _TornError as error:
        return replace(
            folder, note=f"{folder.path}: {error.problem}; the config of its newest checkpoint takes its place"
        )
    # Steps are written down before any state of them is kept.
    has_steps = False
    with suppress(FileNotFoundError), folder.metrics.open(encoding="utf-8", errors="replace") as lines:
        has_steps = any('"kind": "step"' in line for line in lines)
    changes = require_allowed(
        changes_between(former, config),
        config.run.resume,
        has_steps=has_steps,
        elsewhere="set run.folder to a new name",
        begin_with=f"with train.init_from={folder.path} to begin with its weights",
        **where,
    )
    return replace(folder, former=former, changes=changes)


def _unwritable(path: Path, error: OSError) -> UserError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    cure = "free some space" if full else "choose a run.folder that can be written"
    return UserError(f"cannot be written ({error.strerror})", cure=cure, field="run.folder", value=str(path))


def _environment() -> dict[str, Any]:
    """Versions, commit, host and hardware of this process, for the record."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [without_addresses(os.fsencode(word).decode("utf-8", "replace")) for word in sys.argv],
        "commit": _git_commit(),
        "python": platform.python_version(),
        "packages": versions,
        "host": platform.node(),
        "directory": str(Path.cwd()),  # relative paths of the config are meant from there
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return value if isinstance(value, list) else []


def _git_commit() -> str | None:
    """Commit of the code that runs, with `+changes` where the tree differs from it; None outside a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=5, check=True).stdout

    try:
        commit, changed = git("rev-parse", "HEAD").strip(), git("status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")
