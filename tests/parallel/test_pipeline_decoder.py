"""A real decoder, cut by cost and run by every schedule, gives the loss and gradients of the whole."""

from __future__ import annotations

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder, DecoderPart
from phalanx.model.logical_parameters import LogicalParameters, initialise
from phalanx.parallel.config import Schedule
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.pipeline.pipeline_executor import AutogradStage, PipelineExecutor
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.split import StageSpan, split_stages
from phalanx.parallel.tensor.tensor_parallel import spread_tensor

BATCH, LENGTH, COUNT = 2, 8, 4


def config(block: str) -> ModelConfig:
    sizes = {"vocab_size": 61, "vocab_multiple": 64, "max_sequence": 8, "layers": 5, "hidden": 16, "heads": 2}
    return ModelConfig.model_validate(sizes | {"tie_embeddings": True, "block": block, "norm": "layer", "bias": "all"})


def tokens(micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(micro_batch)
    return tuple(torch.randint(0, 61, (2, BATCH, LENGTH), generator=generator))  # type: ignore[return-value]


class PartStage(AutogradStage):
    """A part of the decoder, and the most weight gradients that were waiting at a time."""

    def __init__(self, settings: ModelConfig, span: StageSpan) -> None:
        self.part = DecoderPart(settings, layers=span.layers, first=span.first, last=span.last)
        initialise(self.part, 3)
        self.queue, self.most_waiting = WeightQueue(), 0
        spread_tensor(self.part, Group.alone(), settings, queue=self.queue)
        super().__init__(self._run, self.queue)

    def _run(self, x: Tensor | None, micro_batch: int) -> Tensor:
        inputs, targets = tokens(micro_batch)
        context = self.part.context(inputs)
        x = self.part.blocks(self.part.embed(inputs, context) if x is None else x, context)
        return x if self.part.norm is None else self.part.sums(self.part.norm(x), targets.flatten(), None)[0]

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        made = super().backward_input(micro_batch, gradient)
        self.most_waiting = max(self.most_waiting, self.queue.waiting)
        return made


def gradients(part: DecoderPart) -> dict[str, Tensor]:
    logical = LogicalParameters(part)
    logical.bind_gradients()
    return {name: p.grad for name, p in logical.items() if p.grad is not None}


def whole(settings: ModelConfig) -> tuple[dict[int, float], dict[str, Tensor]]:
    decoder = Decoder(settings)
    initialise(decoder, 3)
    losses = {}
    for m in range(COUNT):
        inputs, targets = tokens(m)
        loss = decoder.loss(decoder(inputs), targets)[0]
        loss.backward()
        losses[m] = float(loss.detach())
    return losses, gradients(decoder)


@pytest.mark.parametrize(
    ("schedule", "chunks", "block"),
    [
        ("1f1b", 1, "serial"),
        ("interleaved_1f1b", 2, "parallel"),
        ("interleaved_zero_bubble", 2, "serial"),
        ("zbv", 2, "parallel"),
    ],
)
def test_a_decoder_in_stages_is_the_whole_decoder(schedule: Schedule, chunks: int, block: str) -> None:
    settings, table = config(block), make_table(schedule, 2, chunks, COUNT)
    spans = split_stages(settings, LENGTH, table.placement.stages)

    def body(groups: ThreadGroups) -> tuple[dict[int, Tensor], list[PartStage]]:
        runners = {i: PartStage(settings, spans[i]) for i in table.placement.stages_of(groups.rank)}
        executor = PipelineExecutor(groups, table.placement, runners)
        return executor.run(table, [(BATCH * LENGTH, settings.hidden)] * COUNT), list(runners.values())

    outcomes = run_ranks(Layout(pipeline=2), body)
    losses, expected = whole(settings)
    found = {m: float(loss) for results, _ in outcomes for m, loss in results.items()}
    assert found == pytest.approx(losses, rel=1e-6)
    held = [gradients(runner.part) for _, runners in outcomes for runner in runners]
    for name, gradient in expected.items():
        total = torch.stack([own[name] for own in held if name in own]).sum(0)
        torch.testing.assert_close(total, gradient)
    split = all(runner.most_waiting > 0 for _, runners in outcomes for runner in runners)
    assert split == (schedule in ("interleaved_zero_bubble", "zbv"))
