"""Where faults meet torch, which is reached through the modules that the script has loaded: no import of its own.

Every function that stays on the stack while the script runs is disguised as the code that calls it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.faults.disguise import BELOW_THE_SCRIPT, Spot, disguised

CHECKPOINTS = (
    "torch:save",
    "torch.distributed.checkpoint:save",
    "torch.distributed.checkpoint:async_save",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "safetensors.torch:save_file",
    "phalanx.checkpoint.session.session:Session._take",
    "phalanx.checkpoint.foreign.api:save_checkpoint",
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
