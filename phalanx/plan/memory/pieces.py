"""What the pieces of a model weigh on a rank: computed once for a strategy, whatever stage they are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.plan.hardware.either import largest
from phalanx.plan.memory import megatron, phalanx_layer
from phalanx.plan.memory.ends import Head, embedding_mask, head
from phalanx.plan.memory.kept import Kept
from phalanx.plan.memory.weights import Held, of_embedding, of_head, of_layer
from phalanx.plan.step.stages import Stages, stages_of
from phalanx.plan.types import Floats, Ints, Job, Model, Strategy, layer_kinds
from phalanx.plan.work.local import Local, local_of

# As in phalanx.model.offload: layers whose copies may be under way.
LAYERS_ON_THE_WAY = 2

Kind = tuple[int, bool]
"""Keys that layers see (0: all of the past), and whether they are mixtures."""


@dataclass(frozen=True)
class Pieces:
    """Bytes and parameters of a model's pieces.

    Attributes:
        kinds: of layers.
        kept: for each kind.
        weights: for each kind.
        mask: kept by the dropout behind the embedding, of a micro-batch.
        closing: what a stage keeps of its own result, of a micro-batch; nothing on the last.
    """

    job: Job
    strategy: Strategy
    local: Local
    kinds: tuple[Kind, ...]
    kept: tuple[Kept, ...]
    weights: tuple[Held, ...]
    head: Head
    mask: Floats
    closing: Floats

    def activations(self, layers: Sequence[Ints], last: bool) -> Floats:
        """What a chunk with so many layers of each kind keeps of one micro-batch."""
        each = [kept.chosen for kept in self.kept]
        total = sum(count * size for count, size in zip(layers, each, strict=True)) - self._on_host(layers)
        end = self.head.stream if last else self.closing
        return total + end + self._masks(layers)

    def waiting(self, layers: Sequence[Ints]) -> Floats:
        """What a chunk keeps for weight gradients that are put off, of one micro-batch.

        In Phalanx, what waits knows how it came about, and so keeps the stage's input, its gradient, and masks.
        """
        total = sum(count * kept.waiting for count, kept in zip(layers, self.kept, strict=True))
        return total + 2 * self.head.stream * self.job.software.is_phalanx + self._masks(layers)

    def held(self, layers: Sequence[Ints], first: bool, last: bool) -> Held:
        """Parameters of a rank with so many layers of each kind, in all its chunks."""
        pieces = [weights * count for count, weights in zip(layers, self.weights, strict=True)]
        if first:
            pieces.append(of_embedding(self.job.model, self.strategy.tensor))
        if last:
            pieces.append(of_head(self.job.model, self.strategy.tensor, first))
        total: Held = sum(pieces[1:], pieces[0])
        return total

    def widest(self) -> Floats:
        """What the backward pass of the layer that needs most needs besides what is kept."""
        needs = [kept.passing + kept.again for kept in self.kept]
        return needs[0] if len(needs) == 1 else largest(*needs)

    def _on_host(self, layers: Sequence[Ints]) -> Floats:
        """What of a chunk's layers has left the device when most is kept: all of its share but the last two."""
        share = self.strategy.offload
        if not share:
            return 0.0
        count = largest(sum(layers), 1)
        gone = largest(-(-share * count // 1) - LAYERS_ON_THE_WAY, 0)
        return gone * sum(number * kept.leaving for number, kept in zip(layers, self.kept, strict=True)) / count

    def _masks(self, layers: Sequence[Ints]) -> Floats:
        total: Floats = 0.0
        if not self.job.software.is_phalanx:
            return total
        for window in dict.fromkeys(window for window, _ in self.kinds):
            of_window = [n for n, kind in enumerate(self.kinds) if kind[0] == window]
            some = sum(layers[n] for n in of_window) > 0
            total = total + some * self.kept[of_window[0]].masks
        return total


def kinds_of(model: Model) -> tuple[Kind, ...]:
    """The kinds of layers that a model has."""
    return layer_kinds(model)


def stages_held(job: Job, strategy: Strategy, kinds: Sequence[Kind]) -> Stages:
    """The stages of a strategy with plain numbers; one where there is no pipeline, whatever its schedule says.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    if strategy.pipeline == 1:
        strategy = replace(strategy, schedule="1f1b", chunks=1)
    return stages_of(job, strategy, kinds)


def pieces_of(job: Job, strategy: Strategy) -> Pieces:
    """The pieces of `job` on a rank of `strategy`."""
    local, kinds = local_of(job, strategy), kinds_of(job.model)
    return Pieces(
        job=job,
        strategy=strategy,
        local=local,
        kinds=kinds,
        kept=tuple(_layer(job, strategy, local, *kind) for kind in kinds),
        weights=tuple(of_layer(local, is_mixture) for _, is_mixture in kinds),
        head=head(job, strategy, local),
        mask=embedding_mask(job, local),
        closing=_closing(job, strategy, local),
    )


def _layer(job: Job, strategy: Strategy, local: Local, window: int, is_mixture: bool) -> Kept:
    if job.software.is_phalanx:
        return phalanx_layer.layer(local, strategy, window, is_mixture)
    return megatron.layer(local, strategy, is_mixture)


def _closing(job: Job, strategy: Strategy, local: Local) -> Floats:
    """Where matrix products are kept that are the stream themselves, the last of a stage is nobody's input there."""
    if not job.software.is_phalanx or strategy.recompute not in ("elementwise", "mlp"):
        return 0.0
    return phalanx_layer.adds_residual(local, strategy) * local.kept_tokens * job.model.hidden * local.residual_bytes
