"""Hooks on what a script imports: its steps are counted, and its process groups end well.

torch is reached by name, never imported from here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from phalanx.core.progress import ATTEMPT_VARIABLE, PROGRESS_VARIABLE, ProgressWriter, say_imported
from phalanx.launch.fresh_rank import when_imported

# An optimizer that has stepped so often since the one that counts did takes its place: that one is no longer used.
_TAKES_OVER = 16

_LET_GO_S = 0.1  # without the interpreter's lock, before and after process groups are destroyed


class StepCounter:
    """Calls `count` once per step of the run, however many optimizers there are.

    The first optimizer seen counts. Another takes over when that one is gone, or has not stepped during 16 steps of the
    other: a script may warm up with one and go on with the next, or have one for each parameter.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._leader: Callable[[], Any] = lambda: None
        self._since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()

    def __call__(self, optimizer: Any, arguments: Any = (), keywords: Any = None) -> None:
        """An optimizer has stepped; in a process that a rank has forked this counts for nothing."""
        if self._leader() is not optimizer and not self._takes_over(optimizer):
            return
        if self._since:
            self._since.clear()
        if os.getpid() == self._process:
            self._count()

    def _takes_over(self, optimizer: Any) -> bool:
        steps = self._since.get(optimizer, 0) + 1
        self._since[optimizer] = steps
        if self._leader() is not None and steps <= _TAKES_OVER:
            return False
        self._leader = weakref.ref(optimizer)
        return True


def report_steps(page: ProgressWriter | None, first: Callable[[], None]) -> None:
    """Have the steps of all optimizers of this process reported, unless the script claims the page for itself.

    `first` is called once, after the first step.
    """
    when_imported("torch.optim.optimizer", lambda module: count_steps(module, page, first))


def count_steps(module: Any, page: ProgressWriter | None, first: Callable[[], None] = lambda: None) -> None:
    """`report_steps`, in the module of the optimizers."""
    begun: list[bool] = []

    def count() -> None:
        if page is not None and not page.is_claimed:
            page.step()
        if not begun:
            begun.append(True)
            first()

    module.register_optimizer_step_post_hook(StepCounter(count))


def count_steps_on_page(module: Any, environ: Mapping[str, str]) -> None:
    """`count_steps` on the page that this process has begun."""
    path = environ.get(PROGRESS_VARIABLE)
    with contextlib.suppress(OSError):  # which was said when it was begun
        count_steps(module, ProgressWriter(path, int(environ.get(ATTEMPT_VARIABLE, "0"))) if path else None)


def note_imports(environ: Mapping[str, str], began_ns: int) -> None:
    """Write on the page how long torch took, which ranks that start warm find imported."""
    say_imported(environ, time.monotonic_ns() - began_ns)


def begin_page(environ: Mapping[str, str]) -> ProgressWriter | None:
    """The progress page of this process, as a script finds it; None: there is none, or it cannot be written."""
    path = environ.get(PROGRESS_VARIABLE)
    try:
        return ProgressWriter(path, int(environ.get(ATTEMPT_VARIABLE, "0"))) if path else None
    except OSError as error:
        os.write(2, f"steps are not reported: {path}: {error.strerror}\n".encode())
        return None


def end_groups_well(module: ModuleType) -> None:
    """Have every thread of a process group let go of what it holds before the script goes on after its groups' end.

    With torch 2.13 some scripts never end: a thread of gloo that has just done a step's last all-reduce holds a Python
    object (`torch.autograd.graph` leaves one with every backward), and needs the interpreter's lock to let it go. If
    the script drops its `DistributedDataParallel` first, as any does whose ``main`` returns after
    ``destroy_process_group``, the main thread joins that thread while it holds the lock. Under torchrun 5 of 12 such
    scripts hung (docs/LOG.md).

    Args:
        module: torch.distributed.
    """
    destroy = getattr(module, "destroy_process_group", None)
    if destroy is None:
        return

    @functools.wraps(destroy)
    def destroy_and_let_go(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(_LET_GO_S)
        try:
            return destroy(*arguments, **keywords)
        finally:
            time.sleep(_LET_GO_S)

    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        if getattr(known := sys.modules.get(name), "destroy_process_group", None) is destroy:
            setattr(known, "destroy_process_group", destroy_and_let_go)  # noqa: B010 - of a module
