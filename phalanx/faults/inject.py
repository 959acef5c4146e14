"""Faults inside a worker: loaded by an environment variable that names an agenda, before the script begins.

    injection = install(os.environ, rank, attempt)     # None where nothing is asked for

With the clock ``optimizer`` the steps of torch's optimizers count, through a hook on all of them; with ``calls`` the
script says ``injection.advance()`` after every step, and ``injection.in_checkpoint()`` inside its checkpoints.

Nothing that a detector can read gives an injection away: not the variable's name, nor lines, exceptions or stacks,
whose frames look like the code around them (`phalanx.faults.torch_hooks`).
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.faults.fault_schedule import Agenda, Begun, Memory, Order, is_due, new_record, read_agenda
from phalanx.faults.torch_hooks import (
    BELOW_THE_SCRIPT,
    OPTIMIZERS,
    Alarms,
    Spot,
    disguised,
    on_steps,
    spot_of,
    training_step,
    wrap_checkpoints,
)
from phalanx.faults.worker_faults import INJECTORS, RefusedError, Surroundings

VARIABLE = "PHALANX_AGENDA"
"""Names the agenda's file."""

HOST = "PHALANX_HOST"
"""Names the (emulated) host of this process; without it, the machine's name does."""

Act = Callable[[], None]

_TAKES_OVER = 16  # more steps of other optimizers than this without one of the first: it is used no longer


WhenImported = Callable[[str, Callable[[Any], Any]], Any]


def import_now(name: str, act: Callable[[Any], Any]) -> None:
    """Import a module and call ``act(module)``."""
    act(importlib.import_module(name))


def install_from_environment(
    environ: MutableMapping[str, str] = os.environ, when_imported: WhenImported = import_now
) -> Injection | None:
    """`install` with the rank and the attempt that our launcher or torchrun have set; the variable is taken out.

    Args:
        when_imported: see `install`.

    Raises:
        UserError: there is an agenda that cannot be read, or no rank.
    """
    path = environ.get(VARIABLE)
    if not path:
        return None
    rank = _number(environ, "PHALANX_RANK", "RANK")
    restarts = _number(environ, "PHALANX_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", default="0")
    attempt = _number(environ, "PHALANX_RUN_ATTEMPT", default=str(restarts + 1))
    injection = install(environ, rank, attempt, when_imported)
    del environ[VARIABLE]
    return injection


def install(
    environ: Mapping[str, str], rank: int, attempt: int, when_imported: WhenImported = import_now
) -> Injection | None:
    """Prepare what the agenda that `environ` names has for this rank; None: nothing. To be called in the main thread.

    Args:
        attempt: counted from 1.
        when_imported: ``when_imported(name, act)`` calls ``act(module)`` once the script has imported that module, as
            `phalanx.launch.fresh_rank.when_imported` does; without it torch is imported now, if its steps are to
            count.

    Raises:
        UserError: the agenda cannot be read, or asks for what cannot be done here.
    """
    if not environ.get(VARIABLE):
        return None
    path = Path(environ[VARIABLE])
    agenda = read_agenda(path)
    for order in agenda.orders:
        if order.kind not in INJECTORS:
            raise UserError("is nothing a worker can do", cure="see docs/faults.md", field="kind", value=order.kind)
    orders = [order for order in agenda.orders if rank in order.ranks and attempt >= order.attempt]
    if not orders:
        return None
    host = environ.get(HOST) or socket.gethostname()
    injection = Injection(agenda, orders, Memory(path), rank, attempt, host)
    injection.begin(when_imported)
    return injection


class Injection:
    """What one process does to itself.

    Attributes:
        advance: to be called after every step where the clock is ``calls``; with the number of steps, if it is known.
        in_checkpoint: to be called inside a checkpoint that is not written by a function that is known here.
    """

    advance: Callable[..., None]
    in_checkpoint: Callable[[], None]

    def __init__(
        self, agenda: Agenda, orders: Iterable[Order], memory: Memory, rank: int, attempt: int, host: str
    ) -> None:
        self._orders = list(orders)
        self._memory, self._rank, self._attempt, self._host = memory, rank, attempt, host
        self._clock = agenda.clock
        self._alarms = Alarms()
        self._begun: dict[int, Begun] = {}
        self._acts: dict[int, Act | None] = {}
        self._own_steps = self._others_steps = 0
        self._step = 0
        self._around = Surroundings(rank=rank, seed=agenda.seed, step=lambda: self._step)

        def advance(step: int | None = None) -> None:
            for act in self._after_step(step, spot_of(sys._getframe(1))):
                act()

        def in_checkpoint() -> None:
            for act in self._in_checkpoint(spot_of(sys._getframe(1))):
                act()

        self.advance = disguised(advance, BELOW_THE_SCRIPT)
        self.in_checkpoint = disguised(in_checkpoint, BELOW_THE_SCRIPT)

    def begin(self, when_imported: WhenImported) -> None:
        """Hook the steps, and set the timers of what happens at the start."""
        if self._clock == "optimizer":
            when_imported(OPTIMIZERS, lambda module: on_steps(module, self._after_optimizer))
        for order in self._orders:
            if order.phase in ("start", "recovery"):
                self._alarms.add(order.delay_s, partial(self._acts_of, order, BELOW_THE_SCRIPT), BELOW_THE_SCRIPT)

    def _after_optimizer(self, optimizer: Any, spot: Spot) -> list[Act]:
        """What is due after a step of `optimizer`; the first one counts steps, until another makes many without it."""
        if self._around.optimizer is None and any(order.phase == "checkpoint" for order in self._orders):
            wrap_checkpoints(self._in_checkpoint)
        if self._around.optimizer is not optimizer:
            self._others_steps += 1
            if self._around.optimizer is not None and self._others_steps <= _TAKES_OVER:
                return []
            self._around.optimizer = optimizer
        self._others_steps = 0
        return self._after_step(training_step(optimizer), spot)

    def _after_step(self, step: int | None, spot: Spot) -> list[Act]:
        self._own_steps += 1
        self._step = self._own_steps if step is None else step
        now_s = time.monotonic()
        due = [order for order in self._orders if is_due(order, self._step, self._begun.get(order.number), now_s)]
        acts = self._ready(due, spot)
        return [*acts, *(disguised(act, spot) for act in self._around.each_step)]

    def _in_checkpoint(self, spot: Spot) -> list[Act]:
        waiting = [o for o in self._orders if o.phase == "checkpoint" and o.number not in self._begun]
        return self._ready([order for order in waiting if self._step >= order.step], spot)

    def _ready(self, orders: list[Order], spot: Spot) -> list[Act]:
        """What is to be called now for these; timers are set for what is to wait."""
        acts: list[Act] = []
        for order in orders:
            if order.delay_s and threading.current_thread() is threading.main_thread():
                if order.number not in self._begun:
                    self._begun[order.number] = Begun(self._step, time.monotonic())
                    self._alarms.add(order.delay_s, partial(self._acts_of, order, spot), spot)
            else:
                acts += self._acts_of(order, spot)
        return acts

    def _acts_of(self, order: Order, spot: Spot) -> list[Act]:
        """The act of an order, made and put on record the first time; none where it has had its turn or is refused."""
        if order.number not in self._acts:
            self._begun.setdefault(order.number, Begun(self._step, time.monotonic()))
            refused, act = "", None
            try:
                act = INJECTORS[order.kind](order, self._around)
            except RefusedError as error:
                refused = str(error)
            record = new_record(order, self._rank, self._attempt, self._step, self._host, refused)
            self._acts[order.number] = act if self._memory.claim(record, order.retrigger) else None
        act = self._acts[order.number]
        return [] if act is None else [disguised(act, spot)]


def _number(environ: Mapping[str, str], *names: str, default: str | None = None) -> int:
    text = next((environ[name] for name in names if name in environ), default)
    if text is None or not text.isdecimal():
        raise UserError(
            "tells no number of this process", cure="start it with phalanx or torchrun", field=names[-1], value=text
        )
    return int(text)
