"""Parts of a decoder, run one after the other, are the whole decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder, DecoderPart
from phalanx.model.logical_parameters import LogicalParameters, initialise


def config(**changes: object) -> ModelConfig:
    sizes = {"vocab_size": 61, "vocab_multiple": 64, "max_sequence": 12, "layers": 3, "hidden": 32, "heads": 4}
    return ModelConfig.model_validate(sizes | changes)


def run_parts(parts: list[DecoderPart], tokens: Tensor, targets: Tensor) -> Tensor:
    context = parts[0].context(tokens)
    x = parts[0].embed(tokens, context)
    for part in parts:
        x = part.blocks(x, context)
    assert parts[-1].norm is not None
    return parts[-1].sums(parts[-1].norm(x), targets.flatten(), None)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_parts_in_a_row_give_the_loss_and_gradients_of_the_whole(tied: bool) -> None:
    settings = config(tie_embeddings=tied, block="parallel")
    whole = Decoder(settings)
    initialise(whole, 3)
    parts = [
        DecoderPart(settings, layers=range(1), last=False),
        DecoderPart(settings, layers=range(1, 1), first=False, last=False),
        DecoderPart(settings, layers=range(1, 3), first=False),
    ]
    for part in parts:
        initialise(part, 3)
    tokens, targets = torch.randint(0, 61, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    loss = whole.loss(whole(tokens), targets)[0]
    split = run_parts(parts, tokens, targets)
    assert torch.equal(loss, split)
    loss.backward()
    split.backward()
    held = [_gradients(part) for part in parts]
    for name, expected in _gradients(whole).items():
        total = torch.stack([own[name] for own in held if name in own]).sum(0)
        torch.testing.assert_close(total, expected)


def _gradients(part: DecoderPart) -> dict[str, Tensor]:
    logical = LogicalParameters(part)
    logical.bind_gradients()
    return {name: p.grad for name, p in logical.items() if p.grad is not None}


def test_a_part_in_the_middle_has_only_its_layers() -> None:
    part = DecoderPart(config(), layers=range(1, 2), first=False, last=False)
    assert {name.split(".")[1] for name in LogicalParameters(part)} == {"1"}
    assert part.embedding is None and part.norm is None and part.head is None
    with pytest.raises(AssertionError, match="ends before the head"):
        part.sums(torch.zeros(2, 32), torch.zeros(2, dtype=torch.int64), None)
