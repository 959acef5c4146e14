"""AdamW with moments of 8 and 16 bits: how they are rounded, and that layouts, resuming and skipping change no bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.optim import adamw, quantise
from phalanx.optim.adamw import AdamW
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.optim.groups import bits_of, moment_bytes, state_shards
from phalanx.optim.quantise import dequantise, round_stochastically, zero_code
from phalanx.optim.quantise import quantise as quantised

from .helpers import assert_same, give_gradients, run, snapshot

SHAPES = {"layers.0.mlp.up": (96, 300), "layers.0.mlp.down": (40, 512), "small": (63, 65), "norm": (300,)}
BITS = (8, 16)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator) * 0.05) for n, s in SHAPES.items()}


def built(bits: int, named: dict[str, torch.nn.Parameter], **settings: Any) -> OptimizerSet:
    return build_optimizer(OptimConfig.model_validate({"state_bits": bits, "lr": 1e-2} | settings), named)


def spread(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values over nine decades, some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (-9 * torch.rand(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, x)


def test_the_code_books_are_those_of_dynamic_tree_quantisation() -> None:
    """Counted by hand from arXiv 2110.02861, figure 2: as many fractions as exponent bits leave, and both ends."""
    for signed in (True, False):
        book = quantise.code_book(signed)
        assert len(set(book)) == 256 and max(book) == 1.0 and 0.0 in book
        assert min(x for x in book if x > 0) == pytest.approx(5.5e-7 if signed else 3.25e-7)
        top = [x for x in book if 0.1 < x < 1.0]
        assert len(top) == (64 if signed else 128)
        assert top[1] - top[0] == pytest.approx(0.9 / len(top))
    assert min(quantise.code_book(True)) == -max(x for x in quantise.code_book(True) if x < 1)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_to_8_bits_is_to_the_nearest_value(signed: bool) -> None:
    x = spread((20, 700)) if signed else spread((20, 700)).abs()
    codes, scales = quantised(x, signed=signed)
    assert codes.dtype == torch.uint8 and scales.shape == (20, 3)
    back = dequantise(codes, scales, signed=signed)
    of_block = scales.repeat_interleave(256, 1)[:, :700]
    unit = (x / of_block).double()
    book = torch.tensor(quantise.code_book(signed), dtype=torch.float64)
    if not signed:
        book = book[1:]  # nothing but zero becomes zero, see below
    least = (unit[..., None] - book).abs().amin(-1)
    apart = ((back / of_block).double() - unit).abs()
    assert torch.where(x == 0, 0.0, apart - least).max() < 1e-7
    assert (back[x == 0] == 0).all()
    again = quantised(back, signed=signed)
    assert torch.equal(again[0], codes) or signed  # a block whose largest value is negative has another scale then


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    x = torch.tensor([[1.0, 1e-12, 1e-30, 0.0]])
    back = dequantise(*quantised(x, signed=False), signed=False)
    assert (back[0, :3] > 0).all() and back[0, 3] == 0


def test_rows_are_rounded_alone() -> None:
    x = spread((12, 300))
    codes, scales = quantised(x, signed=True)
    for start, stop in ((0, 5), (5, 6), (6, 12), (3, 3)):
        part = quantised(x[start:stop], signed=True)
        assert torch.equal(part[0], codes[start:stop]) and torch.equal(part[1], scales[start:stop])


def test_what_is_all_zero_stays_zero() -> None:
    for signed in (True, False):
        codes, scales = quantised(torch.zeros(2, 300), signed=signed)
        assert (codes == zero_code(signed)).all() and (scales == 0).all()
        assert (dequantise(codes, scales, signed=signed) == 0).all()


def test_stochastic_rounding_is_right_on_average_and_keeps_what_fits() -> None:
    x = torch.tensor([1.0 + 1 / 1024, -3.0 - 1 / 512, 1e-30, 0.75, 0.0, -0.0, torch.inf])
    many = x.expand(1 << 14, -1).contiguous()
    # Weights with the same upper half have the same bits: normal ones have a few thousand of those, too few for a mean.
    weights = torch.randint(-(1 << 31), 1 << 31, many.shape).to(torch.int32).view(torch.float32)
    rounded = round_stochastically(many, quantise.hashed(weights, torch.tensor(7))).double()
    assert torch.equal(rounded[0, 3:], x[3:].double()) and (rounded[:, 3:] == x[3:]).all()
    for column in range(3):
        found = rounded[:, column].unique()
        assert len(found) <= 2 and found.min() <= x[column] <= found.max()
        error = (rounded[:, column].mean() - x[column].double()).abs() / (found.max() - found.min())
        assert error < 4 * 0.5 / math.sqrt(1 << 14)


def test_the_random_bits_are_uniform_and_of_column_weight_and_step() -> None:
    """But not of the weight's last bits, which depend on the order of sums."""
    weight, step = torch.randn(1 << 8, 1 << 8), torch.tensor(1)
    bits = quantise.hashed(weight, step)
    assert bits.min() >= 0 and bits.max() < 1 << 32
    for shift in (0, 16):
        counts = torch.bincount((bits.flatten() >> shift & 0xFFFF) >> 10, minlength=64)
        assert (counts - 1024).abs().max() < 6 * 32
    for other in (quantise.hashed(weight + 1, step), quantise.hashed(weight, step + 1), bits.roll(1, 1)):
        assert (other == bits).float().mean() < 0.01
    assert (quantise.hashed(weight * (1 + 1e-6), step) == bits).float().mean() > 0.999


def test_a_slow_second_moment_moves_in_16_bits() -> None:
    """Rounded to the nearest bfloat16 it would stand still at 1: each step moves it by less than half a distance."""
    p = torch.nn.Parameter(torch.randn(128, 64))
    optimizer = AdamW([p], lr=1e-6, betas=(0.9, 0.999), state_bits=16)
    optimizer.create_state()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        p.grad = torch.full_like(p, math.sqrt(2.0))
        optimizer.step()
    expected = 2 - 0.999**100
    mean = optimizer.state[p]["exp_avg_sq"].float().mean()
    assert mean.item() == pytest.approx(expected, rel=5e-3)


def test_32_bits_are_torchs() -> None:
    mine, theirs = parameters(), parameters()
    ours = AdamW(mine.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, state_bits=32)
    torchs = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        ours.step()
        torchs.step()
    for name, p in mine.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_steps_are_close_to_those_of_32_bits(bits: int) -> None:
    mine, theirs = parameters(), parameters()
    ours, wide = built(bits, mine), built(32, theirs)
    run(ours, mine, range(10))
    run(wide, theirs, range(10))
    for name, p in mine.items():
        moved = (theirs[name] - parameters()[name]).norm()
        assert (p - theirs[name]).norm() < 0.05 * moved
        assert name.startswith("layers") != torch.allclose(p, theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_rows_on_many_ranks_are_the_whole_matrix_bit_for_bit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also pieces of rows, as plain torch takes them, and parts of fewer elements than are worth rounding."""
    whole = parameters()
    together = built(bits, whole)
    run(together, whole, range(4))
    monkeypatch.setattr(adamw, "_PIECE", 1000)
    kept = together.state_tensors()
    for start, stop in ((0, 7), (7, 40), (40, 40)):
        named = {n: torch.nn.Parameter(p.detach()[start:stop].clone()) for n, p in parameters().items()}
        config = OptimConfig(state_bits=bits, lr=1e-2)  # type: ignore[arg-type]
        part = build_optimizer(config, named, whole_shapes=SHAPES)
        for step in range(4):
            give_gradients(everything := parameters(), step)
            for name, p in named.items():
                gradient = everything[name].grad
                assert gradient is not None
                p.grad = gradient[start:stop].clone()
            part.step()
        for name, p in named.items():
            assert torch.equal(p, whole[name][start:stop])
        shards = {n: Shard(SHAPES[n], (start, *[0] * (p.dim() - 1)), tuple(p.shape)) for n, p in named.items()}
        for name, shard in state_shards(kept, shards).items():
            mine = part.state_tensors()[name]
            block = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
            assert tuple(mine.shape) == shard.sizes and torch.equal(mine, kept[name][block]), name


@pytest.mark.parametrize("bits", BITS)
def test_a_resumed_run_goes_on_bit_for_bit(bits: int) -> None:
    unbroken, named = built(bits, here := parameters()), here
    run(unbroken, named, range(3))
    saved = snapshot(unbroken, named)
    run(unbroken, named, range(3, 6))
    resumed = built(bits, again := parameters())
    for name, parameter in again.items():
        parameter.data.copy_(saved[name])
    resumed.load_state_tensors({name: saved[name] for name in resumed.state_tensors()})
    run(resumed, again, range(3, 6))
    assert_same(snapshot(resumed, again), snapshot(unbroken, named))


@pytest.mark.parametrize("bits", BITS)
def test_torchs_own_state_dict_goes_round(bits: int) -> None:
    first, named = built(bits, here := parameters()), here
    run(first, named, range(2))
    second = built(bits, again := parameters())
    for name, parameter in again.items():
        parameter.data.copy_(named[name].data)
    for key, optimizer in second._optimizers.items():
        optimizer.load_state_dict(copy.deepcopy(first._optimizers[key].state_dict()))
    run(first, named, range(2, 4))
    run(second, again, range(2, 4))
    assert_same(snapshot(second, again), snapshot(first, named))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_a_skipped_step_changes_no_bit(bits: int, masked: bool) -> None:
    for warm in (0, 2):
        optimizer = built(bits, named := parameters())
        for each in optimizer._optimizers.values():
            each.as_on_device = masked  # type: ignore[attr-defined]
        run(optimizer, named, range(warm))
        before = snapshot(optimizer, named)
        give_gradients(named, 7, scale=math.nan)
        optimizer.step(found_inf=torch.ones(()), grad_scale=torch.tensor(math.nan))
        assert_same(snapshot(optimizer, named), before)


def test_small_and_flat_parameters_keep_fp32() -> None:
    state = built(8, parameters()).state_tensors()
    kinds = {name: state[f"{name}.exp_avg"].dtype for name in SHAPES}
    assert kinds == {
        "layers.0.mlp.up": torch.uint8,
        "layers.0.mlp.down": torch.uint8,
        "small": torch.float32,
        "norm": torch.float32,
    }
    assert bits_of((64, 64), 8) == 8 and bits_of((63, 65), 8) == 32 and bits_of((5000,), 16) == 32
    held = sum(t.nbytes for n, t in state.items() if not n.endswith("step"))
    assert held == sum(2 * moment_bytes(shape, 8) for shape in SHAPES.values())
    halved = {
        name: t.nbytes for name, t in built(16, parameters()).state_tensors().items() if not name.endswith("step")
    }
    assert sum(halved.values()) == sum(2 * moment_bytes(shape, 16) for shape in SHAPES.values())


def test_the_config_refuses_what_does_not_go_together() -> None:
    for changes in ({"name": "lamb"}, {"name": "muon"}, {"groups": [{"pattern": "*", "optimizer": "came"}]}):
        with pytest.raises(ValueError, match=r"is made for AdamW, and .* updates some.* set state_bits = 32"):
            OptimConfig.model_validate({"state_bits": 8} | changes)
    with pytest.raises(ValueError, match="state_bits"):
        OptimConfig.model_validate({"state_bits": 4})


def test_states_of_other_bits_are_refused_with_names() -> None:
    wide, named = built(32, here := parameters()), here
    run(wide, named, range(1))
    with pytest.raises(UserError, match="exp_avg_scale"):
        built(8, parameters()).load_state_tensors(wide.state_tensors())
    mine = built(16, parameters())
    theirs = mine.state_tensors() | {n: t for n, t in wide.state_tensors().items() if not n.endswith("step")}
    with pytest.raises(UserError, match=r"exp_avg is float32\[96, 300\].*bfloat16\[96, 300\]"):
        mine.load_state_tensors(theirs)


def test_wrong_settings_are_refused() -> None:
    matrix, vector = torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="state_bits = 4 is unknown: use 8, 16 or 32"):
        AdamW([matrix], state_bits=4)
    with pytest.raises(ValueError, match="for matrices, not shape"):
        AdamW([matrix, vector], state_bits=16)
    with pytest.raises(ValueError, match="betas"):
        AdamW([matrix], betas=(0.9, 1.0))
