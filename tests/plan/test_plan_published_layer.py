"""The time of one layer against the one publication that times layers: Korthikanti et al., arXiv 2205.05198, table 4.

22B: hidden 6144, 64 heads, 2,048 tokens, 4 sequences, 8 ranks, A100; milliseconds of forward and backward pass.
"""

from __future__ import annotations

import pytest

from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.software import MEGATRON_2022
from phalanx.plan.stages import layer_costs
from phalanx.plan.types import Job, Model, Recompute, Strategy

MODEL = Model(layers=48, hidden=6144, heads=64, vocab_rows=51200, max_sequence=2048)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "forward_ms", "backward_ms"),
    [
        ("none", False, 7.7, 11.9),
        ("none", True, 7.2, 11.8),
        ("full", False, 7.7, 19.5),
        ("attention", False, 7.7, 13.2),
        ("attention", True, 7.2, 13.1),
    ],
)
def test_layers_take_what_was_measured(
    recompute: Recompute, sequence_parallel: bool, forward_ms: float, backward_ms: float
) -> None:
    strategy = Strategy(tensor=8, micro_batch=4, recompute=recompute, sequence_parallel=sequence_parallel)
    job = Job(MODEL, 2048, 4, "fp16", software=MEGATRON_2022)
    total = layer_costs(job, strategy, load_cluster("selene", 8)).layers[0].total
    assert 1e3 * total.forward == pytest.approx(forward_ms, rel=0.05)
    assert 1e3 * total.backward == pytest.approx(backward_ms, rel=0.06)
