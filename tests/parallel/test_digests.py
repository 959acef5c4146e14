"""Digests: any flipped bit and any two elements that change places give another, and parts add up to the whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import Shard
from phalanx.parallel.digests import digests_of, together

MASK = (1 << 64) - 1
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64, torch.float64]


def digest(tensor: torch.Tensor, shard: Shard | None = None) -> list[int]:
    return [int(one) & MASK for one in digests_of([tensor], [shard] if shard else ())[0]]


def by_definition(tensor: torch.Tensor, first: int = 0) -> list[int]:
    """As the format of the file says, in numpy and Python's integers."""
    octets = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = [int(word) for word in np.frombuffer(octets + bytes(-len(octets) % 4), "<i4")]
    return [sum(words) & MASK, sum((2 * (first + i) + 1) * word for i, word in enumerate(words)) & MASK]


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    octets = np.random.default_rng(seed).integers(0, 256, 8 * count + 8, dtype=np.uint8)
    return torch.from_numpy(octets).view(dtype)[:count].clone()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 1023, 1024, 1025, 140_003])
def test_it_is_what_the_format_says(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype)
    assert digest(tensor) == by_definition(tensor)


def test_many_at_once_are_as_each_alone() -> None:
    counts = [5, 0, 20_000, 1, 700, 16_384, 3]
    tensors = [drawn(count, dtype, count) for count in counts for dtype in (torch.float32, torch.bfloat16)]
    shards = [Shard((900 + t.numel(),), (900,), (t.numel(),), ("shard",), True) for t in tensors]
    found = [[int(one) & MASK for one in row] for row in digests_of(tensors, shards)]
    assert found == [by_definition(t, 900 if t.element_size() == 4 else 0) for t in tensors]


@given(st.integers(1, 5000), st.sampled_from(TYPES), st.integers(0, 1 << 30))
def test_every_flipped_bit_gives_another(count: int, dtype: torch.dtype, seed: int) -> None:
    draw, tensor = random.Random(seed), drawn(count, dtype, seed)
    before = digest(tensor)
    octets = tensor.view(torch.uint8)
    place = draw.randrange(octets.numel())
    octets[place] ^= 1 << draw.randrange(8)
    after = digest(tensor)
    assert before[0] != after[0] and before[1] != after[1]


def test_each_bit_of_each_word_of_a_tensor() -> None:
    tensor = torch.randn(40)
    words, before = tensor.view(torch.int32), digest(tensor)
    for index in range(40):
        for bit in range(32):
            mask = (1 << bit) - (1 << 32 if bit == 31 else 0)
            words[index] ^= mask
            assert digest(tensor)[1] != before[1]
            words[index] ^= mask
    assert digest(tensor) == before


@given(st.integers(2, 4000), st.sampled_from(TYPES), st.integers(0, 1 << 30))
def test_two_that_change_places_give_another(count: int, dtype: torch.dtype, seed: int) -> None:
    draw, tensor = random.Random(seed), drawn(count, dtype, seed)
    one, other = draw.sample(range(count), 2)
    bits = tensor.view(count, -1).view(torch.uint8)
    if torch.equal(bits[one], bits[other]):
        return
    before = digest(tensor)
    bits[[one, other]] = bits[[other, one]]
    assert digest(tensor) != before


def test_halves_of_powers_of_two_that_change_places_give_another() -> None:
    """Values whose bits have many zeros at the end, at places whose distance has many, too."""
    for distance in (1, 1024, 1 << 15, 1 << 17):
        tensor = torch.ones(1 << 18)
        tensor[3] = 2.0
        before = digest(tensor)
        tensor[3], tensor[3 + distance] = 1.0, 2.0
        assert digest(tensor) != before


@pytest.mark.parametrize("shape", [(7, 5), (64, 48), (300, 1030)])
def test_parts_add_up_to_the_whole(shape: tuple[int, int]) -> None:
    whole = torch.randn(shape)
    rows = shape[0] // 3
    ranges = ((0, rows), (rows, rows), (rows, shape[0]))
    parts = [(whole[a:b], Shard(shape, (a, 0), (b - a, shape[1]))) for a, b in ranges]
    found = digests_of([tensor for tensor, _ in parts], [shard for _, shard in parts]).sum(0)
    assert [int(one) & MASK for one in found] == digest(whole)
    vector = torch.randn(9000)
    ends = digests_of([vector[:4097], vector[4097:]], [Shard((9000,), (0,), (4097,)), Shard((9000,), (4097,), (4903,))])
    assert [int(one) & MASK for one in ends.sum(0)] == digest(vector)


def test_a_scalar_and_nothing() -> None:
    assert digest(torch.tensor(1.0), Shard.whole(())) == by_definition(torch.tensor([1.0]))
    assert digests_of([]).shape == (0, 2)
    assert digest(torch.zeros(0, 8), Shard((4, 8), (4, 0), (0, 8))) == [0, 0]


def test_one_of_many_changes_with_each() -> None:
    many = digests_of([torch.randn(8) for _ in range(5)])
    before = together(many)
    for row in range(5):
        other = many.clone()
        other[row, row % 2] += 1
        assert not torch.equal(together(other), before)
