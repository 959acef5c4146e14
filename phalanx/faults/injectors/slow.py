"""A rank whose own work takes longer, while its waiting for others does not. Torch-free."""

from __future__ import annotations

import time

from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings
from phalanx.faults.schedule import Begun, still_lasts
from phalanx.faults.torch_hooks import on_forward


def slow(order: Order, around: Surroundings) -> Act:
    """Every step's own time takes ``factor`` (1.5) times as long: at the next forward (without torch: after the step).

    Own time is the main thread's CPU time, which waiting in collectives does not add to; work that a device does alone
    is not counted. The rest is slept or, with ``burn`` = 1, burnt.
    """
    factor = float(order.settings.get("factor", 1.5))
    if factor <= 1:
        raise RefusedError(f"factor = {factor}: give more than 1")
    burn = bool(order.settings.get("burn", 0))
    begun = Begun(around.step(), time.monotonic())
    state = {"mark_s": time.thread_time(), "owed_s": 0.0}

    def step_ended() -> None:
        now_s = time.thread_time()
        if still_lasts(order, around.step(), begun, time.monotonic()):
            state["owed_s"] = (now_s - state["mark_s"]) * (factor - 1)
        state["mark_s"] = now_s

    def pay() -> None:
        owed_s, state["owed_s"] = state["owed_s"], 0.0
        if not owed_s:
            return
        if burn:
            end_s = time.thread_time() + owed_s
            while time.thread_time() < end_s:
                pass
            state["mark_s"] += owed_s
        else:
            time.sleep(owed_s)

    def act() -> None:
        state["mark_s"] = time.thread_time()
        around.each_step.append(step_ended)
        if not on_forward(pay):
            around.each_step.append(pay)

    return act
