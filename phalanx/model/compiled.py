"""Layers compiled one by one: what is made for one serves all of its kind, so deep models start as fast as flat ones.

What must not be traced (a mask whose key is another in every step, a wait for another rank) is left out of what is
compiled, which then falls into pieces: norms, rotary position, the activation and sums are fused all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` gives for `arguments`."""
    return function(*arguments)


def call_untraced() -> Callable[..., Any]:
    """`call` out of the compiler's sight; to be kept, since layers would be compiled anew for another."""
    opaque: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return opaque


def compile_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Compile each of `layers`, in place.

    Hooks stay outside of what is compiled: they may wait for weights. Where a whole layer is computed again, that is
    compiled too; a layer that keeps some of its results is compiled with the choice, which the compiler makes.

    Args:
        layers: blocks. Nothing is compiled before it is called, so what is recomputed may be settled later.
        options: of `torch.compile`.
    """
    for layer in layers:
        for name in ("layer", "choosing"):
            setattr(layer, name, torch.compile(getattr(layer, name), **options))


def leave_out(modules: Iterable[nn.Module]) -> None:
    """Run `modules` as they are written within what is compiled."""
    for module in modules:
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
