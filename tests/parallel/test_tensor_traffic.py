"""What a layer of each kind sends: the parallel block gathers and scatters once where the serial block does twice."""

from __future__ import annotations

import pytest
import torch
from ranks import ThreadGroups, run_ranks

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart
from phalanx.model.forward_context import DropoutState
from phalanx.parallel.feasible import local_config
from phalanx.parallel.group import Group, Traffic
from phalanx.parallel.stage import local_context
from phalanx.parallel.tensor.parallel_linear import local_rows
from phalanx.parallel.tensor.tensor_parallel import spread_tensor

HIDDEN, LENGTH = 32, 16


def layer_traffic(groups: ThreadGroups, block: str, overlap: str) -> tuple[int, int]:
    """Bytes that one layer's forward and backward passes send, with fp32 activations."""
    sizes = {"vocab_size": 64, "layers": 1, "hidden": HIDDEN, "heads": 4, "max_sequence": LENGTH}
    config = ModelConfig.model_validate(sizes | {"block": block.removesuffix("_merged")})
    config = config.model_copy(update={"merged_projections": block.endswith("_merged")})
    group = groups.group("tensor")
    part = DecoderPart(local_config(config, group.size), first=False, last=False)
    for parameter in part.parameters():
        torch.nn.init.ones_(parameter)
    spread_tensor(part, group, config, overlap=overlap, chunks=2)  # type: ignore[arg-type]
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    x = torch.randn(LENGTH // group.size, HIDDEN, requires_grad=True)
    y = part.blocks(x, local_context(part.context(tokens), group))
    forward = sum(group.traffic.sent_bytes.values())
    group.traffic = Traffic()
    y.sum().backward()
    return forward, sum(group.traffic.sent_bytes.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overlap", ["none", "chunked"])
def test_the_parallel_block_sends_half_of_what_the_serial_one_does(size: int, overlap: str) -> None:
    # The rows of the whole stream but one's own: what one gather or one scatter sends.
    once = LENGTH * HIDDEN * 4 * (size - 1) // size
    for block, pairs in (("serial", 2), ("parallel", 1), ("parallel_merged", 1)):
        sent = run_ranks(Layout(tensor=size), lambda groups, block=block: layer_traffic(groups, block, overlap))
        # Backward mirrors each pair, and gathers the input once more for the weights.
        assert sent == [(2 * pairs * once, 3 * pairs * once)] * size, block


def test_rows_are_cut_and_queries_are_not() -> None:
    part = DecoderPart(ModelConfig(vocab_size=64, layers=1, hidden=32, heads=4, max_sequence=8), device="meta")
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    whole = part.context(tokens, dropout=DropoutState(0, 0, torch.tensor([4, 9])))
    assert whole.rows_T is not None
    cut = [local_context(whole, Group(range(3), index, None)) for index in range(3)]
    assert torch.equal(torch.cat([c.rows_T for c in cut if c.rows_T is not None]), whole.rows_T)
    for context in cut:
        assert context.attention_rows_BS is not None
        assert torch.equal(context.attention_rows_BS.flatten(), whole.rows_T)
    assert local_context(whole, Group.alone()) is whole


def test_tokens_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.tensor = 2: does not divide the 15 tokens.*a multiple of 2"):
        local_rows(15, Group(range(2), 1, None))


def test_a_group_of_one_leaves_the_part_as_it_is() -> None:
    config = ModelConfig(vocab_size=64, layers=1, hidden=32, heads=4, max_sequence=8)
    part = DecoderPart(config, device="meta")
    before = list(part.modules())
    spread_tensor(part, Group.alone(), config, overlap="chunked")
    assert list(part.modules()) == before
