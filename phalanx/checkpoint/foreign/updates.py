"""What happens to parameters between two calls of a foreign loop, heard from the optimizers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer


class Updates:
    """Calls `before` before each update of any of `optimizers`, and remembers whether one could change something.

    Args:
        optimizers: those of the loop.
        before: called before every update.
    """

    def __init__(self, optimizers: Iterable[Optimizer], before: Callable[[], None]) -> None:
        self._before = before
        self._stepped = False
        self._hooks: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Listen to these instead of those before."""
        self.close()
        self._hooks = [optimizer.register_step_pre_hook(self._on_step) for optimizer in optimizers]

    def stepped(self) -> bool:
        """Whether, since the last call, an optimizer has stepped with a learning rate above zero."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def close(self) -> None:
        """Let the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before()
        self._stepped = self._stepped or any(float(group.get("lr", 0.0)) > 0 for group in optimizer.param_groups)
