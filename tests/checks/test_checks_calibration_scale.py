"""Which cases are measured on a device: all operands come out of the pool, and all cases fit into memory."""

from dataclasses import replace

import pytest
import torch

from phalanx.checks.calibration import kernel_cases
from phalanx.checks.calibration.calibration_messages import _operands, choose_scale, fitting, needed_bytes
from phalanx.checks.calibration.stopwatch import Pool
from phalanx.core.errors import UserError

GIB = 1 << 30
GPU = choose_scale("cuda", quick=False)


class ShapesOnly(Pool):
    """Operands that have a shape and nothing in it."""

    def __init__(self, elements, dtype):
        self.device, self._next = torch.device("meta"), 0
        self._block = torch.empty(elements, dtype=dtype, device="meta")


def run_all(scale):
    """Every case of a GPU's kernels, as the worker makes them."""
    wide = ShapesOnly(scale.pool, torch.float32)
    pool = ShapesOnly(scale.pool, torch.bfloat16)
    found = kernel_cases.products_cases(scale.tokens, scale.widths, "bf16", pool)
    found += kernel_cases.attention_cases(scale.attended, scale.queries, scale.head_dims, "bf16", pool)
    found += kernel_cases.streams_cases(scale.shapes, "bf16", pool, wide)
    found += kernel_cases.ends_cases(scale.heads, "bf16", pool, wide)
    for case in found:
        case.run()
    return found


@pytest.mark.parametrize("gib", [79, 40, 16, 6])
def test_every_case_of_a_gpu_comes_out_of_the_pool(gib):
    scale = fitting(GPU, gib * GIB)
    assert {case.what for case in run_all(scale)} == {case.what for case in run_all(choose_scale("cuda", quick=True))}


@pytest.mark.parametrize("scale", [GPU, choose_scale("cpu", quick=False), choose_scale("cpu", quick=True)])
def test_pools_hold_the_largest_operand(scale):
    assert max(_operands(scale)) <= scale.pool


def test_an_empty_80_gb_card_measures_everything():
    assert fitting(GPU, 78 * GIB) == GPU


@pytest.mark.parametrize("gib", range(5, 80, 3))
def test_what_is_measured_fits_into_what_is_free(gib):
    scale = fitting(GPU, gib * GIB)
    assert needed_bytes(scale) <= gib * GIB
    assert max(_operands(scale)) <= scale.pool
    for name in ("tokens", "widths", "queries", "head_dims", "shapes", "heads", "updated", "messages"):
        assert set(getattr(scale, name)) <= set(getattr(GPU, name))
        assert getattr(scale, name)


def test_40_gb_keep_most_cases():
    scale = fitting(GPU, 39 * GIB)
    kept = [len(getattr(scale, name)) for name in ("tokens", "widths", "queries", "head_dims", "shapes", "updated")]
    assert sum(kept) >= 3 + 4 + 7 + 2 + 4 + 2 - 2


def test_too_little_memory_is_said_with_a_cure():
    with pytest.raises(UserError, match=r"of the device's memory and 0\.1 GB are free.*--quick"):
        fitting(GPU, 100 << 20)


def test_an_operand_larger_than_the_pool_is_no_shorter_one():
    with pytest.raises(AssertionError, match="out of a pool of 1000"):
        run_all(replace(choose_scale("cuda", quick=True), pool=1000, tokens=(2000,), widths=(1,)))
