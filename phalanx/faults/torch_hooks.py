"""Hooks on torch for injected faults, disguised as the code that calls them, and calls that wait.

A detector that reads stacks must find what a real fault leaves, not where it was injected: every function that stays on
the stack while the script runs is shown as the code that calls it. Torch is reached through the modules that the script
has loaded: no import of its own. Calls that wait come in the main thread, wherever the program then is, by SIGALRM.
"""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# One entry of a location table (Objects/locations.md of CPython): no columns, then a signed distance of lines, here 0.
_NO_COLUMNS = 0x80 | 13 << 3
_UNITS_PER_ENTRY = 8


@dataclass(frozen=True)
class Spot:
    """A place in the source that a frame is shown to be at."""

    filename: str
    name: str
    line: int


BELOW_THE_SCRIPT = Spot("<frozen runpy>", "_run_code", 88)
"""What stands below any script that is run by a launcher; no source text is ever shown for it."""


def spot_of(frame: types.FrameType) -> Spot:
    """Where a frame stands now."""
    return Spot(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or frame.f_code.co_firstlineno)


def disguised(function: F, spot: Spot) -> F:
    """A copy of a Python function, and of those defined in it, that is shown at `spot` wherever it stands."""
    plain = cast(types.FunctionType, function)
    copy = types.FunctionType(
        _moved(plain.__code__, spot), plain.__globals__, spot.name, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return cast(F, copy)


def _moved(code: types.CodeType, spot: Spot) -> types.CodeType:
    consts = tuple(_moved(c, spot) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    units = len(code.co_code) // 2
    lengths = [min(_UNITS_PER_ENTRY, units - start) for start in range(0, units, _UNITS_PER_ENTRY)]
    return code.replace(
        co_filename=spot.filename,
        co_name=spot.name,
        co_qualname=spot.name,
        co_firstlineno=spot.line,
        co_linetable=b"".join(bytes([_NO_COLUMNS | length - 1, 0]) for length in lengths),
        co_consts=consts,
    )


CHECKPOINTS = (
    "torch:save",
    "torch.distributed.checkpoint:save",
    "torch.distributed.checkpoint:async_save",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "safetensors.torch:save_file",
    "phalanx.checkpoint.session.background_session:Session._take",
    "phalanx.checkpoint.foreign.checkpointer:save_checkpoint",
)
"""Functions inside which a checkpoint is written, as ``module:attribute``."""

Acts = list[Callable[[], None]]


OPTIMIZERS = "torch.optim.optimizer"


def on_steps(optim: Any, due: Callable[[Any, Spot], Acts]) -> None:
    """Call what ``due(optimizer, spot)`` returns after every step of any optimizer; `optim` is the module of theirs."""
    spot = _calling_spot(str(optim.__file__), "post_hook(self")

    def step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        for act in due(optimizer, spot):
            act()

    optim.register_optimizer_step_post_hook(disguised(step_ended, spot))


def on_forward(before: Callable[[], None]) -> bool:
    """Call `before` ahead of every forward of any module of torch; False: torch is not loaded."""
    modules = sys.modules.get("torch.nn.modules.module")
    if modules is None:
        return False
    spot = _calling_spot(str(modules.__file__), "hook(self, args)")
    shown = disguised(before, spot)

    def forward_begins(module: Any, args: Any) -> None:
        shown()

    modules.register_module_forward_pre_hook(disguised(forward_begins, spot))
    return True


def training_step(optimizer: Any) -> int | None:
    """Steps that this optimizer's state has seen, in earlier attempts too; None where it keeps no count."""
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            return int(state["step"])
    return None


def wrap_checkpoints(due: Callable[[Spot], Acts]) -> None:
    """Call what `due` returns at the beginning of every function of `CHECKPOINTS` whose module is loaded."""
    for target in CHECKPOINTS:
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner: Any = sys.modules.get(module)
        for parent in parents:
            owner = getattr(owner, parent, None)
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, _wrapped(original, due))


def first_tensor(optimizer: Any) -> Any:
    """The part of the first parameter that is not empty which lies on this rank; None: all are empty."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = getattr(parameter, "_local_tensor", parameter).detach()
            if local.numel():
                return local
    return None


def _wrapped(original: Callable[..., Any], due: Callable[[Spot], Acts]) -> Callable[..., Any]:
    plain = getattr(original, "__wrapped__", original)
    code = getattr(plain, "__code__", None)
    spot = BELOW_THE_SCRIPT
    if code is not None:
        last = [line for _, _, line in code.co_lines() if line][-1]
        spot = Spot(code.co_filename, code.co_name, last)

    def save(*args: Any, **kwargs: Any) -> Any:
        for act in due(spot):
            act()
        return original(*args, **kwargs)

    return functools.wraps(original)(disguised(save, spot))


def _calling_spot(filename: str, call: str) -> Spot:
    """The line of a file in which hooks are called; its first line where that cannot be found."""
    lines = Path(filename).read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if call in text), 1)
    return Spot(filename, "wrapper" if "optim" in Path(filename).name else "_call_impl", line)


Due = Callable[[], list[Callable[[], None]]]

_SOONEST_S = 1e-4  # a timer of 0 is none
_AGAIN_S = 0.001
_HERE = str(Path(__file__).parent)


class Alarms:
    """Calls that wait. For the main thread only; SIGALRM is its own while one waits."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Due]] = []
        self._numbers = itertools.count()
        self._previous: Any = None

    def add(self, delay_s: float, due: Due, spot: Spot) -> None:
        """After `delay_s`, ask `due` for functions and call them; the frame that does it looks like `spot`."""
        if not self._waiting:
            self._previous = signal.getsignal(signal.SIGALRM)
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # else SIGALRM would kill Python as it ends
        heapq.heappush(self._waiting, (time.monotonic() + delay_s, next(self._numbers), due))

        def rung(number: int, frame: FrameType | None) -> None:
            for act in self._ripe(frame):
                act()

        signal.signal(signal.SIGALRM, disguised(rung, spot))
        self._arm()

    def _ripe(self, frame: FrameType | None) -> Iterator[Callable[[], None]]:
        """All functions whose time has come, none while our own code runs; the timer is set for the others first."""
        while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        if frame is not None:  # a function of this package that shows its own name is on the stack
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return iter(())
        now_s, acts = time.monotonic(), []
        while self._waiting and self._waiting[0][0] <= now_s:
            acts += heapq.heappop(self._waiting)[2]()
        if self._waiting:
            self._arm()
        else:
            signal.signal(signal.SIGALRM, self._previous or signal.SIG_DFL)
        return iter(acts)

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(self._waiting[0][0] - time.monotonic(), _SOONEST_S))
