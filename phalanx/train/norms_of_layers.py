"""Norms of each layer's weights, gradients and activations every few steps, whatever ranks hold of them.

What ranks hold of a weight is summed by its owners alone, as the gradient norm for clipping is, so that every layout
says what one process would say. Of activations it is the root mean square of an element of what a layer adds up to (the
residual stream behind it): where ranks hold the same activations, sum and count grow alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.decoder import Block
from phalanx.model.shapes import parameter_table
from phalanx.telemetry.layer_norms import append_norms
from phalanx.train.trainer import Trainer


class NormsOfLayers:
    """Writes norms of due steps into a run folder; all ranks call it alike.

    Args:
        run: the run folder; None on all ranks but the first.
        every: steps; 0: never.
    """

    def __init__(self, trainer: Trainer, run: Path | None, every: int) -> None:
        self._trainer, self._run, self._every = trainer, run, every
        if every:
            names = parameter_table(trainer.model_config)
            self._layers = list(dict.fromkeys(map(_layer_of, names)))
            self._place = {name: self._layers.index(_layer_of(name)) for name in names}
            self._squares: Tensor | None = None

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Look at the activations of the passes of a step, where it is due."""
        if not self._is_due(step):
            yield
            return
        blocks = self._trainer.blocks
        device = next(iter(self._trainer.parameters.values())).device
        # Of each layer, sum of squares and number of elements.
        self._squares = torch.zeros(self._trainer.model_config.layers, 2, dtype=torch.float64, device=device)
        hooks = [block.register_forward_hook(self._note) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def write(self, step: int) -> None:
        """Write the norms of a step, where it is due: after its gradients are whole and before its update."""
        if not self._is_due(step):
            return
        assert self._squares is not None, "the passes of the step were watched"
        weights, gradients = self._sums_of_squares()
        found = self._trainer.add_over_ranks(torch.cat([weights, gradients, self._squares.reshape(-1)]))
        self._squares = None
        if self._run is None:
            return
        count = len(self._layers)
        squares, counts = found[2 * count :].view(-1, 2).unbind(1)
        norms = {
            "weight": dict(zip(self._layers, found[:count].sqrt().tolist(), strict=True)),
            "gradient": dict(zip(self._layers, found[count : 2 * count].sqrt().tolist(), strict=True)),
            "activation": {f"layers.{n}": x for n, x in enumerate((squares / counts).sqrt().tolist())},
        }
        with suppress(OSError):  # a full disk ends a run where it cannot save, not where it cannot draw
            append_norms(self._run, step, norms)

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def _note(self, block: nn.Module, _: Any, output: Tensor) -> None:
        assert self._squares is not None and isinstance(block, Block)
        square = torch.linalg.vector_norm(output.detach(), dtype=torch.float32).double().square()
        self._squares[block.number] += torch.stack([square, torch.full_like(square, output.numel())])

    @torch.no_grad()
    def _sums_of_squares(self) -> tuple[Tensor, Tensor]:
        """(layers,) of the weights and of the gradients that this rank owns, float64."""
        trainer = self._trainer
        owned = [n for n, p in trainer.parameters.items() if trainer.shards[n].owner and p.numel()]
        device = next(iter(trainer.parameters.values())).device
        sums = [torch.zeros(len(self._layers), dtype=torch.float64, device=device) for _ in range(2)]
        for total, tensors in (
            (sums[0], {name: trainer.parameters[name].detach() for name in owned}),
            (sums[1], {n: g for n in owned if (g := trainer.parameters[n].grad) is not None and g.numel()}),
        ):
            if tensors:
                squares = torch.stack(torch._foreach_norm(list(tensors.values()), 2, dtype=torch.float32)).double()
                places = torch.tensor([self._place[name] for name in tensors], device=device)
                total.index_add_(0, places, squares.square())
        return sums[0], sums[1]


def _layer_of(name: str) -> str:
    """``layers.3.attention.q`` is of ``layers.3``; what is outside of the layers is of its own."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
