"""Checkpoints for any torch training loop, started by python, torchrun or srun: the public API.

The ranks are those of torch.distributed where it is initialised, else this process alone.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.all_ranks import agreed
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.distributed_peers import find_peers, leave
from phalanx.checkpoint.foreign.restore_objects import UndrawnParameters, look, put_back
from phalanx.checkpoint.foreign.training_state import Collected, Table, TrainingState
from phalanx.checkpoint.foreign.wrapped_optimizers import watched
from phalanx.checkpoint.restoring.restore import Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.open_session import open_session
from phalanx.checkpoint.stopping import Stopping
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.progress import say_restored

_TENSORS = 16
_ELEMENTS = 4096
_LOOKS = 8


class Updates:
    """Calls `before` before each update of any of `optimizers`, and remembers whether one changed something.

    That an optimizer has stepped is not evidence: where training has converged, or all gradients are zero, a healthy
    step changes nothing. Whether it does shows in some elements of some parameters, copied before the step and compared
    after it: in the first steps after each call of `stepped`, then ever more rarely.
    """

    def __init__(self, optimizers: Iterable[Optimizer], before: Callable[[], None]) -> None:
        self._before = before
        self._steps: dict[Optimizer, int] = {}
        self._copies: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._moved: list[Tensor] = []
        self._hooks: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Listen to these instead of those before."""
        self.close()
        for optimizer in (each for given in optimizers for each in watched(given)):
            self._hooks.append(optimizer.register_step_pre_hook(self._on_step))
            self._hooks.append(optimizer.register_step_post_hook(self._on_stepped))

    def stepped(self) -> bool:
        """Whether, since the last call, a step of an optimizer was seen to change a parameter; waits for the device."""
        moved, self._moved = self._moved, []
        self._steps = {}
        return any(bool(each) for each in moved)

    def close(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before()
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step <= _LOOKS or step.bit_count() == 1:
            self._copies[optimizer] = [(some, some.clone()) for some in _some_elements(optimizer)]

    def _on_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        copies = self._copies.pop(optimizer, [])
        self._moved += [(some != before).any() for some, before in copies]


def _some_elements(optimizer: Optimizer) -> list[Tensor]:
    """Views of parameters that a step may change; of those with gradients, unless a closure is yet to make these."""
    parameters = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or float(rate) != 0.0:  # None: the optimizer finds one for itself
            parameters += [p for p in group["params"] if p.numel()]
    parameters = [p for p in parameters if p.grad is not None] or parameters
    return [_thinned(p.detach()) for p in parameters[:: -(-len(parameters) // _TENSORS) or 1]]


def _thinned(tensor: Tensor) -> Tensor:
    """Elements at equal distances, at most `_ELEMENTS` in all."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kept = int(_ELEMENTS ** (1 / max(1, local.dim())))
    return local[tuple(slice(None, None, max(1, -(-size // kept))) for size in local.shape)]


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
            SIGXCPU), so that `step` can take the last checkpoint and end the loop.
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
        layout = f"{self.peers.size} ranks" if self.peers.size > 1 else "1"
        run_config, report_line = about or {}, self._say
        self._session = open_session(
            str(folder), self.config, peers=self.peers, layout=layout, run_config=run_config, report=report_line
        )
        self._stopping = Stopping(self.config, self.peers, os.environ, time.time(), catch=stop_signals)
        self._updates = Updates(self._training.given.values(), self.before_update)
        self._table: Table = {}  # of the tensors that the ranks agreed on
        self._found: Collected | None = None  # of the step that ends, by `_take`
        self._is_watched = False
        self._is_fenced = False
        self._step = 0
        self._ended = True
        self._is_blank = False
        self._is_closed = False

    @property
    def extra(self) -> dict[str, Any]:
        """The dict of extras, in which `restore` replaces plain values."""
        return self._training.extra

    def add(self, *, model: Any = None, optimizer: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Add what was not there yet when this was made; before `restore` and the first `step`."""
        self._training.add(model, optimizer, extra or {})
        agreed(self.peers, self._training.collect)
        self._updates.watch(self._training.given.values())

    def look(self) -> dict[str, Any]:
        """The JSON of the state that `restore` would put back now; empty where there is none.

        All of the state is read and checked for this, so that `restore` does not find it damaged afterwards.
        """
        return dict(look(self._restore) or {})

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
        restored = put_back(self._restore, self._training, self.peers, self._say, strict=strict)
        self._step = 0 if restored is None else restored.step
        say_restored(os.environ, self._step)
        if self._is_blank and not self._step:
            problem = "the state that was there when the model was made is gone or damaged, and its weights are blank"
            raise UserError(problem, cure="start again: without a state the model is made as ever")
        self._is_blank = False
        # What lies in the memory of hosts only, `close` has to make durable if no step follows.
        self._ended = restored is None or not restored.only_in_memory
        return self._step

    def before_update(self) -> None:
        """Call it before parameters or optimizer state change, once a step.

        Where all updates are made by ``step()`` of the optimizers given, they call it themselves.
        """
        self._is_fenced = True
        self._session.fence()

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
        stop = self._stopping.agreed(self._session.expected_durable_s)
        last = ending or bool(stop)
        self._take(step, metrics or {}, ending=last)
        self._step, self._ended = step, last
        if stop:
            self._say(f"{stop}: stopping after step {step}, whose checkpoint is durable")
        return bool(stop)

    @property
    def status(self) -> str:
        """What is durable, what is being written, and what storage can keep up with, in one line for people; this
        rank's knowledge."""
        return self._session.status

    def changed(self) -> None:
        """Let the ranks agree on the tensors anew; not needed: each snapshot sees what has come, gone or grown."""
        self._is_watched = False

    def close(self, *, failed: bool = False, last: bool = True) -> None:
        """End: the last step's checkpoint is durable when this returns.

        Args:
            failed: training has not ended well: take no checkpoint, keep what is in memory for the next start.
            last: False where the state is no longer that of the last step, so that it must not be saved as such.
        """
        if last and not failed and not self._ended:
            self._take(self._step, {}, ending=True)
            self._ended = True
        self._is_closed = True
        self._updates.close()
        self._stopping.close()
        self._session.finish(clean=not failed)
        if not failed:
            leave(self.peers)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _restore(self, wanted: Wanted) -> Restored | None:
        return self._session.restore(wanted, strict=False)

    def _take(self, step: int, metrics: Mapping[str, float], *, ending: bool) -> None:
        """Take a snapshot if one is due; with `ending`, its checkpoint is durable when this returns."""
        if not self._is_watched:
            self._watch()
        elif (ending or self._session.will_take(step)) and self.peers.ask_highest(int(self._differs()))():
            self._watch()  # on all ranks, also where the tensors of this one are the same

        def state() -> dict[str, Any]:
            return self._training.plain(self._found or self._training.collect(), step)

        try:
            self._session.after_step(step, state, stepped=self._updates.stepped, metrics=metrics, ending=ending)
        finally:
            self._found = None
        if not ending:
            self._session.ask(step + 1)

    def _differs(self) -> bool:
        """Whether tensors have come, gone or changed their shapes on this rank: a parameter was updated for the first
        time, a history has grown."""
        try:
            self._found = self._training.collect()
            return self._found.table != self._table
        except Exception:
            return True  # and `_watch` raises it on all ranks

    def _watch(self) -> None:
        """Let the ranks agree on the tensors: only after a step has the optimizer all of its state."""
        agreed(self.peers, lambda: self._training.require_seen(self._training.collect()))
        self._training.reserve(lambda room: self.peers.ask_highest(room)())
        found = self._found = self._training.collect()
        self._table = found.table
        # Beside a loop that does not call `before_update`, nothing is copied: it may change tensors at any time.
        overlap = None if self._is_fenced else False
        self._session.watch(self._present, found.shards, found.roles, overlap=overlap)
        self._is_watched = True

    def _present(self) -> dict[str, Tensor]:
        """The tensors of this moment; UserError: they are not those that the ranks agreed on."""
        found = self._found or self._training.collect()
        if found.table != self._table:
            names = sorted({name for name, _ in set(found.table.items()) ^ set(self._table.items())})
            problem = f"{len(names)} tensors have come, gone or changed their shapes while a snapshot was taken"
            raise UserError(problem, cure="change nothing on another thread during step()", field=names[0])
        return found.tensors

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

    def print_line(line: str) -> None:
        if peers.rank == 0:
            print(line, file=sys.stderr)

    report = report or print_line

    def take(wanted: Wanted) -> Restored | None:
        store = open_store(str(folder), config.storage_options)
        options: dict[str, Any] = {"strict": False, "verify": config.verify}
        return restore(wanted, keeper=None, store=store, report=report, peers=peers, **options)

    restored = put_back(take, training, peers, report, strict=strict)
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
