"""What a script that knows nothing of us is given: a hook that torch calls after every optimizer step, and a good end.

torch is reached by name when the script imports it, never imported from here.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from phalanx.core.progress import ProgressWriter

_OPTIMIZERS = "torch.optim.optimizer"

# An optimizer that has stepped so often since the one that counts did takes its place: that one is no longer used.
_TAKES_OVER = 16

_LET_GO_S = 0.1
"""Without the interpreter's lock, before and after process groups are destroyed."""


class StepCounter:
    """Calls `count` once per step of the run, however many optimizers there are.

    The first optimizer seen counts. Another takes over when that one is gone, or has not stepped during 16 steps of the
    other: a script may warm up with one and go on with the next, or have one for each parameter.

    Args:
        count: a step has ended.
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
    """Have the steps of all optimizers of this process reported, as soon as torch is there.

    Args:
        page: where to; None: nowhere. Once the script has claimed it, it is left to the script.
        first: called once, after the first step.
    """
    begun: list[bool] = []

    def count() -> None:
        if page is not None and not page.is_claimed:
            page.step()
        if not begun:
            begun.append(True)
            first()

    counter = StepCounter(count)
    when_imported(_OPTIMIZERS, lambda module: module.register_optimizer_step_post_hook(counter))


def end_groups_well() -> None:
    """Have every thread of a process group let go of what it holds before the script goes on after its groups' end.

    With torch 2.13 some scripts never end: a thread of gloo that has just done a step's last all-reduce holds a Python
    object (`torch.autograd.graph` leaves one with every backward), and needs the interpreter's lock to let it go. If
    the script drops its `DistributedDataParallel` first, as any does whose ``main`` returns after
    ``destroy_process_group``, the main thread joins that thread while it holds the lock. Under torchrun 5 of 12 such
    scripts hung (docs/LOG.md).
    """

    def act(module: ModuleType) -> None:
        destroy = module.destroy_process_group

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

    when_imported("torch.distributed", lambda module: act(module) if hasattr(module, "destroy_process_group") else None)


def when_imported(name: str, act: Callable[[Any], Any]) -> None:
    """Call ``act(module)`` once the module `name` has been imported: now, or at the end of its first import."""
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        act(module)
    else:
        sys.meta_path.insert(0, _Watch(name, act))


def is_being_imported(module: Any) -> bool:
    """Whether the code of a module has not come to its end yet."""
    return bool(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
    )  # as Python's own import looks it up


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as all others would, and acts after its code has run."""

    def __init__(self, name: str, act: Callable[[Any], Any]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The spec of the module that is watched for; None for any other."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._act(module)

        loader.exec_module = run_and_act
