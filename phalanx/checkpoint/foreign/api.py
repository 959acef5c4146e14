"""Checkpoints for any torch training loop, started by python, torchrun or srun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.engines import Blocking, Engine, Seen
from phalanx.checkpoint.foreign.peers import find_peers
from phalanx.checkpoint.foreign.putting import Putting
from phalanx.checkpoint.foreign.state import TrainingState
from phalanx.checkpoint.foreign.stopping import Stopping
from phalanx.checkpoint.foreign.updates import Updates
from phalanx.checkpoint.together import everywhere
from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

_TRIES = 3
_FORMAT = "phalanx.foreign.1"


class Checkpointer:
    """Takes checkpoints of a training loop and restores them; made and called by all ranks alike.

    ::

        with Checkpointer("runs/mine/checkpoints", model=model, optimizer=optimizer, every_steps=100) as checkpoints:
            for step in range(checkpoints.restore() + 1, steps + 1):
                loss = …
                checkpoints.before_update()
                optimizer.step()
                if checkpoints.step(step, metrics={"validation_loss": …}):
                    break

    Make it when `torch.distributed` is initialised, if that is used, and the model is in place (wrapped by
    DistributedDataParallel or `fully_shard`, compiled, on its device). Besides what is given, the random number
    generators of torch, numpy and Python of each rank are saved.

    Args:
        folder: for the checkpoints: a folder that all hosts share, or a URL that fsspec knows.
        model: a module, or a mapping of names to several.
        optimizer: a `torch.optim.Optimizer`, or a mapping of names to several.
        extra: by name, whatever else training needs: anything with ``state_dict()`` and ``load_state_dict()``
            (schedulers, samplers, loaders, scalers, modules), tensors, and plain values. Plain values are read from
            this dict when a checkpoint is taken, and replaced in it by `restore`.
        config: settings; None: those of `settings`.
        about: plain values that are kept in each checkpoint as its config, for people.
        stop_signals: catch the signals by which schedulers announce the end (SIGTERM, SIGINT, SIGUSR1, SIGUSR2,
            SIGXCPU), so that `step` can take the last checkpoint and tell the loop to end.
        report: is given lines for people, on rank 0; None: to stderr.
        settings: fields of `CheckpointConfig`, such as ``every_steps=100, keep_last=3``.

    Raises:
        UserError: a setting is wrong; something cannot be saved; the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: Any = None,
        optimizer: Any = None,
        extra: dict[str, Any] | None = None,
        config: CheckpointConfig | None = None,
        about: Mapping[str, Any] | None = None,
        stop_signals: bool = False,
        report: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        self.config = _settings(config, settings, folder)
        self.peers = find_peers()
        self._report = report or partial(print, file=sys.stderr)
        self._training = TrainingState(model, optimizer, extra, self.peers.rank, self.peers.size)
        everywhere(self.peers, lambda: self._training.collect() and None)
        self._engine = _engine(folder, self.config, self._training, self.peers, about or {}, self._say)
        self._stopping = Stopping(self.config, self.peers, os.environ, time.time(), catch=stop_signals)
        self._updates = Updates(self._training.optimizers.values(), self.before_update)
        self._step = 0
        self._ended = True

    @property
    def extra(self) -> dict[str, Any]:
        """The dict of extras, in which `restore` replaces plain values."""
        return self._training.extra

    def restore(self, *, strict: bool = True) -> int:
        """Put everything back into the newest good state that there is; returns its step, 0 where there is none.

        Args:
            strict: whether objects and tensors have to be the same here and in the checkpoint; otherwise what is not
                there stays as it is, and a line says so.

        Raises:
            UserError: it does not fit: what is missing, of another shape, or was written by something else.
        """
        for _ in range(_TRIES):
            seen = self._engine.look()
            if seen is None:
                return 0
            putting, filled = self._fill(seen, strict)
            if filled is not None and filled.step == seen.step:
                everywhere(self.peers, partial(_require_fit, filled, self._training, strict))
                everywhere(self.peers, putting.finish)
                self._note_left(putting, filled)
                self._step = seen.step
                return seen.step
        raise UserError("a state was found and lost again several times", cure="see the lines above for what was wrong")

    def before_update(self) -> None:
        """Call it before parameters or optimizer state change, once a step.

        Where all updates are made by ``step()`` of the optimizers given, they call it themselves.
        """
        self._engine.fence(self._step + 1)

    def step(self, step: int, metrics: Mapping[str, float] | None = None, *, ending: bool = False) -> bool:
        """Optimizer step `step` (the first is 1) is done: take a snapshot if one is due.

        Args:
            metrics: figures of this step, for `keep_best` and for people.
            ending: it is the last one: return when its checkpoint is durable.

        Returns:
            Whether the loop has to end now, because of a signal or because the scheduler's time is over; the checkpoint
            of this step is durable then.

        Raises:
            UserError: a checkpoint that was waited for could not be written; a state holds what cannot be saved.
        """
        stop = self._stopping.agreed(self._engine.expected_durable_s)
        last = ending or bool(stop)
        self._engine.after_step(step, stepped=self._updates.stepped(), metrics=metrics or {}, ending=last)
        self._step, self._ended = step, last
        if stop:
            self._say(f"{stop}: stopping after step {step}, whose checkpoint is durable")
        return bool(stop)

    def changed(self) -> None:
        """Say, on all ranks, that tensors have come, gone or changed their shapes since the first step."""
        self._engine.changed()

    def close(self, *, failed: bool = False) -> None:
        """End: the last step's checkpoint is durable when this returns.

        Args:
            failed: training has not ended well: take no checkpoint, keep what is in memory for the next start.
        """
        if not failed and not self._ended:
            self._engine.after_step(self._step, stepped=False, metrics={}, ending=True)
            self._ended = True
        self._updates.close()
        self._stopping.close()
        self._engine.close(clean=not failed)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _fill(self, seen: Seen, strict: bool) -> tuple[Putting, Seen | None]:
        if not isinstance(seen.state, dict) or seen.state.get("format") != _FORMAT:
            problem = f"the checkpoint of step {seen.step} was not written by this interface"
            raise UserError(problem, cure="resume it with what wrote it, or give another folder")
        blob = self._training.blob_target(seen.state)
        if self.peers.size > 1:
            again = self._engine.fill(blob, {})
            if again is None or again.step != seen.step:
                return Putting(self._training, seen.state, b"", strict=False), None
        own = b"".join(tensor.numpy().tobytes() for tensor in blob.values())
        made: list[Putting] = []
        everywhere(
            self.peers, lambda: made.append(Putting(self._training, seen.state, own.rstrip(b" \0"), strict=strict))
        )
        return made[0], self._engine.fill(*made[0].targets())

    def _note_left(self, putting: Putting, filled: Seen) -> None:
        for what, names in (("objects", putting.left), ("tensors", filled.missing)):
            if names:
                self._say(f"{len(names)} {what} not in the checkpoint, left as they were: {', '.join(names[:8])}")

    def _say(self, line: str) -> None:
        if self.peers.rank == 0:
            self._report(line)


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    model: Any = None,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Write one checkpoint, durable when this returns; see `Checkpointer` for what is given.

    Raises:
        UserError: it cannot be written, or something cannot be saved; names it.
    """
    about = {"model": model, "optimizer": optimizer, "extra": extra}
    with Checkpointer(folder, **about, **{"mode": "blocking"} | settings) as checkpoints:
        checkpoints.step(step, ending=True)


def restore_checkpoint(
    folder: str | Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    strict: bool = True,
    **settings: Any,
) -> int:
    """Put back the newest good checkpoint of `folder`; returns its step, 0 where there is none.

    What is not given is not restored: ``restore_checkpoint(folder, model=model)`` takes over weights only.

    Raises:
        UserError: it does not fit; lists what.
    """
    about = {"model": model, "optimizer": optimizer, "extra": extra}
    checkpoints = Checkpointer(folder, **about, **{"mode": "blocking"} | settings)
    try:
        return checkpoints.restore(strict=strict)
    finally:
        checkpoints.close(failed=True)


def _settings(config: CheckpointConfig | None, settings: Mapping[str, Any], folder: str | Path) -> CheckpointConfig:
    if config is not None and settings:
        named = ", ".join(settings)
        raise UserError(f"config and also {named} were given", cure="give the one or the other")
    if config is not None:
        return config
    return validate(CheckpointConfig, {"folder": str(folder), **settings})


def _engine(
    folder: str | Path,
    config: CheckpointConfig,
    training: TrainingState,
    peers: Peers,
    about: Mapping[str, Any],
    report: Callable[[str], None],
) -> Engine:
    return Blocking(Path(folder), config, training, peers, about, report)


def _require_fit(filled: Seen, training: TrainingState, strict: bool) -> None:
    """Refuse names on one side only, of the objects that are given."""
    prefixes = tuple(f"{key}." for key in training.models)
    unexpected = [name for name in filled.unexpected if name.startswith(prefixes)] if prefixes else []
    problems = [
        f"{len(names)} {what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        for what, names in (("missing in the checkpoint", filled.missing), ("only in the checkpoint", unexpected))
        if names
    ]
    if strict and problems:
        cure = "build the model as it was, or restore with strict=False"
        raise UserError(f"the checkpoint of step {filled.step} does not fit: {'; '.join(problems)}", cure=cure)
