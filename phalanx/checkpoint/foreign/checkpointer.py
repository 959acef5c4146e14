"""Checkpoints for any torch training loop, started by python, torchrun or srun: the public API.

The ranks are those of torch.distributed where it is initialised, else this process alone.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.checkpoint.all_ranks import agreed
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.foreign_session import Saving, Updates
from phalanx.checkpoint.foreign.restore_objects import UndrawnParameters, look, put_back
from phalanx.checkpoint.foreign.training_state import TrainingState
from phalanx.checkpoint.restoring.restore import Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.stopping import Stopping
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.peers import ALONE, Peers
from phalanx.core.progress import say_restored


def find_peers() -> Peers:
    """The ranks of the default group, in a group of their own; called by all of them together.

    A group of its own, over gloo: values stay on the host, and nothing gets between the collectives of training. It is
    for `leave` to end it.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return DistributedPeers(dist.new_group(backend="gloo"))


def leave(peers: Peers) -> None:
    """Nothing more will be said to `peers`, and all they have said has come; called by all of them.

    A thread of gloo that lets go of its last operation while Python ends takes the process down with SIGABRT
    (pytorch/pytorch#190489), so none of them may be left. Where a rank has failed, do not call it: it would wait for
    what the others had begun.
    """
    if isinstance(peers, DistributedPeers):
        peers.close()


class DistributedPeers:
    """The members of a process group as `phalanx.core.peers.Peers`; values travel as JSON text.

    Args:
        group: of all ranks, with a back end that takes CPU tensors (gloo).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._groups = [group]  # the only reference: gloo ends when that is dropped

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    def close(self) -> None:
        """End the group and its threads, unless they have ended already."""
        groups, self._groups = self._groups, []
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all members, in order, on every member."""
        text = _encode(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self._group)
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(texts, padded, group=self._group)
        return [_decode(row[: int(length)]) for row, length in zip(texts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first member's value, on every member."""
        text = _encode(value if self.rank == 0 else None)
        length = torch.tensor([len(text)])
        first = dist.get_global_rank(self._group, 0)
        dist.broadcast(length, first, group=self._group)
        if self.rank:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, first, group=self._group)
        return _decode(text)

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all members, in order, on the first."""
        values = self.gather(value)
        return None if self.rank else values

    def lowest(self, value: Any) -> Any:
        """The lowest of the values that are not None, on every member."""
        return min((one for one in self.gather(value) if one is not None), default=None)

    def barrier(self) -> None:
        """Wait until every member is here."""
        dist.barrier(group=self._group)

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all members for a number; what is returned waits for the highest of them."""
        number = torch.tensor([value])
        work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            if work is not None:
                work.wait()
            return int(number)

        return answer


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


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
        agreed(self.peers, self._training.collect)
        self._saving = Saving(str(folder), self.config, self._training, self.peers, about or {}, self._say)
        self._stopping = Stopping(self.config, self.peers, os.environ, time.time(), catch=stop_signals)
        self._updates = Updates(self._training.optimizers.values(), self.before_update)
        self._step = 0
        self._ended = True
        self._is_blank = False
        self._is_closed = False

    @property
    def extra(self) -> dict[str, Any]:
        """The dict of extras, in which `restore` replaces plain values."""
        return self._training.extra

    def add(self, *, model: Any = None, optimizer: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Give what was not there yet when this was made; before `restore` and the first `step`."""
        self._training.add(model, optimizer, extra or {})
        agreed(self.peers, self._training.collect)
        self._updates.watch(self._training.optimizers.values())

    def look(self) -> dict[str, Any]:
        """The JSON of the state that `restore` would put back now; empty where there is none.

        All of the state is read and checked for this, so that `restore` does not find it damaged afterwards.
        """
        return dict(look(self._saving.restore) or {})

    @contextmanager
    def blank_weights(self) -> Iterator[bool]:
        """For making a model: where `restore` will replace its weights, no random numbers are drawn for them first.

        ::

            checkpoints = Checkpointer("runs/mine/checkpoints", every_steps=100)
            with checkpoints.blank_weights() as is_blank:
                model = make_model()
            …
            checkpoints.add(model=model, optimizer=optimizer)
            step = checkpoints.restore()

        Every module made in here has to be given to `add`. Generators of random numbers are not where they would be
        else, until `restore` puts them back, which is strict then.

        Returns:
            Whether there is something to restore, so that such weights are zero until then.
        """
        self._is_blank = bool(self.look())
        with UndrawnParameters() if self._is_blank else nullcontext():
            yield self._is_blank

    def restore(self, *, strict: bool = True) -> int:
        """Put everything back into the newest good state that there is; returns its step, 0 where there is none.

        Args:
            strict: whether objects and tensors have to be the same here and in the checkpoint; otherwise what is not
                there stays as it is, and a line says so.

        Raises:
            UserError: it does not fit: what is missing, of another shape, or was written by something else; nothing was
                given; or nothing good is left to fill `blank_weights` with.
        """
        self._training.require_any()
        strict = strict or self._is_blank
        restored = put_back(self._saving.restore, self._training, self.peers, self._say, strict=strict)
        self._step = 0 if restored is None else restored.step
        say_restored(os.environ, self._step)
        if self._is_blank and not self._step:
            problem = "the state that was there when the model was made is gone or damaged, and its weights are blank"
            raise UserError(problem, cure="start again: without a state the model is made as ever")
        self._is_blank = False
        self._ended = not self._saving.only_in_memory  # if no step follows, `close` has to make it durable
        return self._step

    def before_update(self) -> None:
        """Call it before parameters or optimizer state change, once a step.

        Where all updates are made by ``step()`` of the optimizers given, they call it themselves.
        """
        self._saving.fence()

    def step(self, step: int, metrics: Mapping[str, float] | None = None, *, ending: bool = False) -> bool:
        """Optimizer step `step` (the first is 1) is done: take a snapshot if one is due.

        Args:
            step: not below that of the call before, or of what `restore` has put back.
            metrics: figures of this step, for `keep_best` and for people.
            ending: it is the last one: return when its checkpoint is durable.

        Returns:
            Whether the loop has to end now, because of a signal or because the scheduler's time is over; the checkpoint
            of this step is durable then.

        Raises:
            UserError: a checkpoint that was waited for could not be written; a state holds what cannot be saved;
                nothing was given; the weights are blank; `step` is not a whole number or goes back; this is closed.
        """
        step = self._next(step)
        self._training.require_any()
        if self._is_blank:
            raise UserError("the weights are blank: restore() was not called", cure="call it before the first step")
        stop = self._stopping.agreed(self._saving.expected_durable_s)
        last = ending or bool(stop)
        self._saving.after_step(step, stepped=self._updates.stepped, metrics=metrics or {}, ending=last)
        self._step, self._ended = step, last
        if stop:
            self._say(f"{stop}: stopping after step {step}, whose checkpoint is durable")
        return bool(stop)

    @property
    def status(self) -> str:
        """What is durable, what is being written, and what storage can keep up with, in one line for people; this
        rank's knowledge."""
        return self._saving.status

    def changed(self) -> None:
        """Say, on all ranks, that tensors have come, gone or changed their shapes since the first step."""
        self._saving.changed()

    def close(self, *, failed: bool = False, last: bool = True) -> None:
        """End: the last step's checkpoint is durable when this returns.

        Args:
            failed: training has not ended well: take no checkpoint, keep what is in memory for the next start.
            last: False where the state is no longer that of the last step, so that it must not be saved as such.
        """
        if last and not failed and not self._ended:
            self._saving.after_step(self._step, stepped=self._updates.stepped, metrics={}, ending=True)
            self._ended = True
        self._is_closed = True
        self._updates.close()
        self._stopping.close()
        self._saving.close(clean=not failed)
        if not failed:
            leave(self.peers)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _next(self, step: int) -> int:
        """A step that may follow the one before."""
        if self._is_closed:
            raise UserError("the Checkpointer is closed, and takes no more checkpoints", cure="make a new one")
        try:
            number = operator.index(step)
        except TypeError:
            raise UserError(
                "is no whole number", cure="give the number of the step", field="step", value=step
            ) from None
        if number < self._step:
            problem = f"comes after step {self._step}, and a checkpoint of it would not be the newest"
            cure = "count on from what restore() returns, or give another folder to begin anew"
            raise UserError(problem, cure=cure, field="step", value=number)
        return number

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
    given = {"model": model, "optimizer": optimizer, "extra": extra, "mode": "blocking"}
    with Checkpointer(folder, **{**given, **settings}) as checkpoints:
        checkpoints.step(step, ending=True)


def restore_checkpoint(
    folder: str | Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    strict: bool = True,
    report: Callable[[str], None] | None = None,
    **settings: Any,
) -> int:
    """Put back the newest good checkpoint of `folder`; returns its step, 0 where there is none.

    Nothing is written, so a run that is under way there is not disturbed; what it has in memory only is not seen. What
    is not given is not restored: ``restore_checkpoint(folder, model=model)`` takes over weights only.

    Raises:
        UserError: it does not fit; lists what.
    """
    peers = find_peers()
    config = _settings(None, settings, folder)
    training = TrainingState(model, optimizer, extra, peers.rank, peers.size)
    training.require_any()
    agreed(peers, training.collect)

    def say(line: str) -> None:
        if peers.rank == 0:
            print(line, file=sys.stderr)

    def take(wanted: Wanted) -> Restored | None:
        store = open_store(str(folder), config.storage_options)
        told, verify = report or say, config.verify
        return restore(wanted, keeper=None, store=store, report=told, peers=peers, strict=False, verify=verify)

    restored = put_back(take, training, peers, report or say, strict=strict)
    leave(peers)
    step = 0 if restored is None else restored.step
    if optimizer is not None:  # else it takes over weights, and goes on from nothing
        say_restored(os.environ, step)
    return step


def _settings(config: CheckpointConfig | None, settings: Mapping[str, Any], folder: str | Path) -> CheckpointConfig:
    if config is not None and settings:
        named = ", ".join(settings)
        raise UserError(f"config and also {named} were given", cure="give the one or the other")
    if config is not None:
        return config
    return validate(CheckpointConfig, {"folder": str(folder), **settings})
