"""Memory of real training steps on this CPU, beside what is predicted."""

from __future__ import annotations

import pytest
from plan_memory import BAR, compared
from support.memory.layouts import LAYOUTS, Layout
from support.memory.runs import one_process, several_processes

# What is weighed at the end of passes; a peak also holds what gloo's threads have not let go of yet.
KINDS = ("parameters", "gradients", "optimizer", "activations")
PEAK_BAR = 0.1

ALONE = (
    "1 process",
    "1, GELU, biases, tied, learned positions",
    "1, windows, grouped heads",
    "1, recompute selective",
    "1, recompute mlp",
    "1, one small micro-batch",
)
PAIRS = ("shard 2, ZeRO-2", "tensor 2, parallel block", "context 2, ring", "pipeline 2, 1F1B", "pipeline 2, V")


def named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


def assert_close(layout: Layout, seen: list) -> None:
    found = compared(layout, seen)
    far = {kind: f"{found[kind].error:+.1%}" for kind in KINDS if abs(found[kind].error) > BAR}
    assert not far, f"{layout.name}: {far}"
    assert abs(found["peak"].error) < PEAK_BAR, f"{layout.name}: peak {found['peak'].error:+.1%}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_predicted(name: str) -> None:
    assert_close(named(name), one_process(named(name)))


@pytest.mark.campaign
@pytest.mark.slow
def test_pairs_of_processes_are_predicted() -> None:
    layouts = [named(name) for name in PAIRS]
    for layout, seen in zip(layouts, several_processes(layouts), strict=True):
        assert_close(layout, seen)
