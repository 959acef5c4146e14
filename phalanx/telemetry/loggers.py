"""Where a run's figures go: ``metrics.jsonl``, TensorBoard, Weights & Biases.

A logger that keeps figures elsewhere overrides methods of `MetricsLogger` and has an entry in `open_loggers`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Literal

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer, open_regular, write_bytes
from phalanx.telemetry.config import LoggingConfig

Values = Mapping[str, float | int | str]

STEP = "step"

Kind = Literal["evaluation", "start", "checkpoint", "snapshot"]
"""Lines that are not of a step: a checkpoint is durable, a snapshot stays in memory."""


class MetricsLogger:
    """Takes figures of steps, in rising order within a kind; this one keeps nothing, as on all ranks but the first."""

    def log(self, step: int, values: Values) -> None:
        """Note the figures of training step `step`; called once for each step."""

    def log_event(self, kind: Kind, step: int, values: Values) -> None:
        """Note something else of step `step`: an evaluation after it, what its checkpoint cost, or how a start went
        that goes on after it. Its figures have names of their own, so by default it is logged like a step."""
        self.log(step, values)

    def flush(self) -> None:
        """Make durable what was logged: to be called before the checkpoint of the same step is published."""

    def close(self) -> None:
        """Write out what is still held back; nothing is logged afterwards."""


class JsonLines(MetricsLogger):
    """One JSON object per line: ``{"kind": "step", "step": 12, "loss": 3.1, ...}``, kind ``evaluation`` for those.

    Each (kind, step) is there exactly once whatever happened: opening drops a line that was torn by a kill and the
    lines after the step from which the run goes on, and a step that is there already is not written again. A line is
    written by one call, so a reader never sees part of one. Numbers that are not finite, which JSON has not, become
    null, and such a line has besides ``"not_finite": {"loss": "nan"}``, so that columns keep their type and nothing is
    lost.

    Args:
        resume_step: steps done in the checkpoint from which the run goes on; 0 starts anew.

    Raises:
        UserError: the file cannot be read or written; also from `log`, when the disk is full.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        try:
            self._last_step = _rewind(path, resume_step)
            self._file = path.open("ab", buffering=0)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise _refused(path, error) from error

    def log(self, step: int, values: Values) -> None:
        """Append the line of a step."""
        self._append(STEP, step, values)

    def log_event(self, kind: Kind, step: int, values: Values) -> None:
        """Append the line of an event; the first of each kind and step stays."""
        self._append(kind, step, values)

    def flush(self) -> None:
        """Wait until the lines are on the disk, so that they outlive a loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make the file durable and close it."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _append(self, kind: str, step: int, values: Values) -> None:
        if step <= self._last_step.get(kind, -1):
            return
        line = metrics_line(kind, step, values)
        start = self._file.tell()
        try:
            written = self._file.write(line)
            while written < len(line):  # a disk that fills up takes part of a line, then refuses the rest
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(start)
            raise _refused(self._path, error) from error
        self._last_step[kind] = step


class TensorBoard(MetricsLogger):
    """Event files for TensorBoard; on resume the steps that will be done again are purged from them."""

    def __init__(self, folder: Path, resume_step: int, run_config: Mapping[str, Any]) -> None:
        module = _optional("torch.utils.tensorboard", "logging.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=30)
        if resume_step == 0:
            self._writer.add_text("config", f"```json\n{json.dumps(run_config, indent=1)}\n```", 0)

    def log(self, step: int, values: Values) -> None:
        """Add a scalar per number and a text per string."""
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def flush(self) -> None:
        """Write out what is held back."""
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()


class WandB(MetricsLogger):
    """Weights & Biases. The run's id is kept in the run folder, so that a resumed run goes on in the same place.

    Every entry carries its training step as a value, and W&B plots the others over it. W&B's own count of steps only
    rises and drops what lies below it: an evaluation that comes before the figures of its step, or that a resumed run
    makes at the step it starts from. Steps that are done again after a kill are there twice, with equal figures.
    Nothing is flushed: W&B sends on its own, and training does not wait for it.

    Raises:
        UserError: the wandb package is not installed.
    """

    def __init__(self, config: LoggingConfig, folder: Path, run_config: Mapping[str, Any]) -> None:
        module = _optional("wandb", "logging.wandb", "wandb")
        path = folder / "wandb-id"
        run_id = path.read_text().strip() if path.exists() else ""
        if not run_id:
            run_id = uuid.uuid4().hex[:12]
            write_bytes(path, f"{run_id}\n".encode())
        self._run = module.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            name=folder.name,
            id=run_id,
            resume="allow",
            mode=config.wandb_mode,
            dir=str(folder),
            config=dict(run_config),
        )
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Values) -> None:
        """Send the figures of a step."""
        self._run.log({STEP: step, **values})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class Fanout(MetricsLogger):
    """One logger that must work and others that may fail: their first error each is reported, and training goes on.

    Args:
        main: its errors are raised.
        others: by name, for the message.
        warn: called with one line when one of them fails for the first time.
    """

    def __init__(
        self, main: MetricsLogger, others: Mapping[str, MetricsLogger], warn: Callable[[str], None] = warnings.warn
    ) -> None:
        self._main, self._others, self._warn = main, dict(others), warn
        self._failed: set[str] = set()

    def log(self, step: int, values: Values) -> None:
        """Pass on to each."""
        self._each(lambda logger: logger.log(step, values))

    def log_event(self, kind: Kind, step: int, values: Values) -> None:
        """Pass on to each."""
        self._each(lambda logger: logger.log_event(kind, step, values))

    def flush(self) -> None:
        """Flush each."""
        self._each(lambda logger: logger.flush())

    def close(self) -> None:
        """Close each."""
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[MetricsLogger], None]) -> None:
        call(self._main)
        for name, other in self._others.items():
            try:
                call(other)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    self._warn(
                        f"{name} fails ({type(error).__name__}: {error}); training goes on, some figures miss there"
                    )


def open_loggers(
    config: LoggingConfig,
    folder: Path,
    resume_step: int,
    run_config: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> MetricsLogger:
    """Everything `config` asks for, as one logger. Call it in one process of a run only.

    Args:
        folder: the run folder; figures go to ``metrics.jsonl`` and ``tensorboard/`` in it.
        resume_step: steps done in the checkpoint from which the run goes on; 0 starts anew.
        run_config: the resolved config as plain JSON values, shown beside the figures.
        warn: called with a line when a logger other than ``metrics.jsonl`` fails while training.

    Raises:
        UserError: a package is missing, a file cannot be written, or Weights & Biases refuses a run that starts anew
            (a run that goes on after a failure is not held up by it: `warn` is called instead).
    """
    run_config = run_config or {}
    main = JsonLines(folder / "metrics.jsonl", resume_step)
    others: dict[str, MetricsLogger] = {}
    if config.tensorboard:
        others["TensorBoard"] = TensorBoard(folder / "tensorboard", resume_step, run_config)
    if config.wandb:
        try:
            others["Weights & Biases"] = WandB(config, folder, run_config)
        except UserError:
            raise
        except Exception as error:
            why = " ".join(str(error).split())
            problem = f"Weights & Biases cannot be reached ({type(error).__name__}: {why})"
            if resume_step == 0:
                cure = "run `wandb login`, or set logging.wandb_mode=offline or logging.wandb=false"
                raise UserError(problem, cure=cure, field="logging.wandb") from error
            warn(f"{problem}; going on without it")
    return Fanout(main, others, warn) if others else main


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics file, also while a run writes it; a torn one at the end is left out."""
    return (entry for _, entry in _entries(path) if entry is not None)


def metrics_line(kind: str, step: int, values: Values) -> bytes:
    """A line as `JsonLines` writes it."""
    entry: dict[str, Any] = {"kind": kind, "step": step, **values}
    strange = {k: repr(v) for k, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    if strange:
        entry |= dict.fromkeys(strange)
        entry["not_finite"] = strange
    return (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _rewind(path: Path, resume_step: int) -> dict[str, int]:
    """Drop torn lines and those after `resume_step`, all at once; return the last step of each kind that stays."""
    if not path.exists():
        return {}
    last_step: dict[str, int] = {}
    dropped = False
    for _line_bytes, entry in _entries(path):
        if entry is None or entry["step"] > resume_step:
            dropped = True
        else:
            last_step[entry["kind"]] = max(entry["step"], last_step.get(entry["kind"], -1))
    if dropped:
        with atomic_writer(path) as file:
            file.writelines(line for line, entry in _entries(path) if entry and entry["step"] <= resume_step)
    return last_step


def _entries(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    # A file in object storage is no file of the system, and no pipe.
    with open_regular(path) if hasattr(path, "__fspath__") else path.open("rb") as file:
        for line in file:
            yield line, parse_line(line)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The entry on a line, or None if the line is torn or not one of ours."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("kind"), str)
    return entry if ours else None


def usual_step_s(lines: Sequence[bytes]) -> float | None:
    """Seconds of a usual step, by the newest lines of a metrics.jsonl; None: they do not say."""
    entries = filter(None, map(parse_line, lines))
    seconds = [entry["step_s"] for entry in entries if isinstance(entry.get("step_s"), float)]
    return median(seconds) if seconds else None


def _refused(path: Path, error: OSError) -> UserError:
    problem = f"figures cannot be written ({error.strerror})"
    return UserError(problem, cure="free space there, or make it writable", field=str(path))


def _optional(module: str, setting: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"needs a package that is not installed ({error})"
        cure = f"run: pip install 'phalanx-train[{extra}]', or set {setting}=false"
        raise UserError(problem, cure=cure, field=setting) from None
