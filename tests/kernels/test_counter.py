import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.kernels import counter

KEY = counter.make_key(1, "weights")


@st.composite
def slices(draw):
    full = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    offsets = [draw(st.integers(0, size - 1)) for size in full]
    shape = [draw(st.integers(1, size - o)) for size, o in zip(full, offsets, strict=True)]
    return full, offsets, shape


def test_keys_tell_parts_types_and_borders_apart():
    parts = [(), (0,), ("0",), (1,), ("ab", "c"), ("a", "bc"), ("abc",), (-1,), ("a", 1), ("a1",)]
    keys = [counter.make_key(0, *p) for p in parts] + [counter.make_key(1)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert counter.make_key(0, "a", 1) == counter.make_key(0, "a", 1)


def test_hash_is_splitmix64_with_a_second_key_word():
    """The tensor arithmetic equals Python's unbounded integers, so no operation lost or kept a sign bit."""
    word = (1 << 64) - 1
    indices = [0, 1, 2, 12345, (1 << 40) + 7, (1 << 62) + 3]
    expected = []
    for i in indices:
        x = (i * 0x9E3779B97F4A7C15 + KEY) & word
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 + counter._mix_word(KEY + 0x9E3779B97F4A7C15)) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        expected.append(x ^ (x >> 31))
    got = [value & word for value in counter._hash_(torch.tensor(indices), KEY).tolist()]
    assert got == expected


def test_mixer_is_the_published_splitmix64():
    """First outputs of SplitMix64 seeded with 1234567, from Rosetta Code's "Pseudo-random numbers/Splitmix64"."""
    state, outputs = 1234567, []
    for _ in range(3):
        state += 0x9E3779B97F4A7C15
        outputs.append(counter._mix_word(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=150, deadline=None)
@given(slices())
def test_slice_equals_slice_of_whole(case):
    full, offsets, shape = case
    whole = counter.normal(KEY, full)
    part = counter.normal(KEY, full, offsets=offsets, shape=shape)
    assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))])


def test_slice_across_chunks_equals_slice_of_whole():
    whole = counter.normal(KEY, (3, 100_003))
    assert torch.equal(
        counter.normal(KEY, (3, 100_003), offsets=(1, 33_333), shape=(2, 50_001)), whole[1:, 33_333:83_334]
    )


def test_tensor_of_more_than_2_to_the_32_elements():
    far = counter.normal(KEY, (1 << 20, 1 << 20), offsets=((1 << 20) - 1, 0), shape=(1, 1000))
    near = counter.normal(KEY, (1 << 20, 1 << 20), offsets=((1 << 12) - 1, 0), shape=(1, 1000))
    flat = counter.normal(KEY, (1 << 40,), offsets=((1 << 40) - (1 << 20),), shape=(1000,))
    assert torch.equal(far[0], flat)
    assert not torch.equal(far, near)


def test_thread_count_does_not_change_a_bit():
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(counter.normal(KEY, (300_001,)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_scalar_and_empty_shapes():
    assert counter.normal(KEY, ()).shape == ()
    assert counter.normal(KEY, (0, 4)).shape == (0, 4)
    assert counter.normal(KEY, (5, 4), offsets=(2, 4)).shape == (3, 0)


def test_inverse_distribution_function_agrees_with_ndtri():
    """Taken on the side of small probabilities, where the reference itself loses nothing."""
    powers = 0.5 - 2.0 ** -torch.arange(20.0, 50.0, dtype=torch.float64)
    q = torch.cat([torch.linspace(-0.4999999, 0.4999999, 4001, dtype=torch.float64), powers, -powers])
    expected = -q.sign() * torch.special.ndtri(0.5 - q.abs())
    in_tail = q.abs() > 0.425
    torch.testing.assert_close(counter._tail(q[in_tail]), expected[in_tail], rtol=1e-12, atol=0)
    centre = q[~in_tail]
    got = counter._rational(0.180625 - centre * centre, counter._CENTRE_TOP, counter._CENTRE_BOTTOM) * centre
    torch.testing.assert_close(got, expected[~in_tail], rtol=1e-12, atol=1e-15)


def test_logarithm_agrees_with_torch():
    p = torch.cat([torch.rand(1000, dtype=torch.float64), 2.0 ** -torch.arange(1.0, 54.0, dtype=torch.float64)])
    torch.testing.assert_close(counter._negative_log(p), -p.log(), rtol=1e-13, atol=1e-15)


def test_moments_and_distance_to_the_normal_distribution():
    n = 1_000_000
    x = counter.normal(KEY, (n,), dtype=torch.float64)
    moments = [(x**k).mean().item() for k in (1, 2, 3, 4)]
    variances = [1, 2, 15, 96]  # Of x, x^2, x^3 and x^4.
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), variances, strict=True):
        assert abs(moment - expected) < 5 * math.sqrt(variance / n)
    cdf = torch.special.ndtr(x.sort()[0])
    distance = (cdf - (torch.arange(n, dtype=torch.float64) + 0.5) / n).abs().max().item()
    assert distance * math.sqrt(n) < 1.95  # Kolmogorov-Smirnov: exceeded with probability 0.001.
    assert x.abs().max() > 4.5


def test_streams_of_different_keys_and_neighbours_are_uncorrelated():
    n = 200_000
    a, b = (counter.normal(counter.make_key(1, name), (n,), dtype=torch.float64) for name in ("a", "b"))
    limit = 5 / math.sqrt(n)
    assert abs((a * b).mean()) < limit
    for lag in (1, 2, 64, 1024):
        assert abs((a[lag:] * a[:-lag]).mean()) < limit


def test_std_and_dtype():
    x = counter.normal(KEY, (1000,), std=0.02)
    assert x.dtype == torch.float32 and abs(x.std().item() - 0.02) < 0.003
    wide = counter.normal(KEY, (1000,), std=0.02, dtype=torch.float64)
    assert torch.equal(wide.float(), x)
    assert torch.equal(counter.normal(KEY, (1000,), std=0.02, dtype=torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize(("offsets", "shape"), [((0, 3), (5, 2)), ((-1, 0), (1, 1)), ((0,), (5,))])
def test_slice_outside_is_refused(offsets, shape):
    with pytest.raises(UserError, match="is not inside"):
        counter.normal(KEY, (5, 4), offsets=offsets, shape=shape)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.003, 0.9])
def test_rate_is_exact_to_statistical_error(rate):
    keep = counter.keep_mask(KEY, torch.arange(1000), 999, rate)
    n = keep.numel()
    assert abs(keep.double().mean().item() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / n)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 70), data=st.data())
def test_mask_of_a_slice_equals_slice_of_the_mask(width, data):
    offset = data.draw(st.integers(0, width - 1))
    part = data.draw(st.integers(1, width - offset))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=5)))
    whole = counter.keep_mask(KEY, rows, width, 0.5)
    assert torch.equal(counter.keep_mask(KEY, rows, part, 0.5, offset=offset), whole[:, offset : offset + part])
    assert torch.equal(counter.keep_mask(KEY, rows[-1:], width, 0.5), whole[-1:])


def test_bits_of_rows_columns_and_keys_are_independent():
    width, count = 512, 2048
    keep = counter.keep_mask(KEY, torch.arange(count), width, 0.5)
    other = counter.keep_mask(counter.make_key(2, "weights"), torch.arange(count), width, 0.5)
    sign, other_sign = (m.double() * 2 - 1 for m in (keep, other))
    limit = 5.5 / math.sqrt(keep.numel() - count * 64)
    for a, b in [(sign[1:], sign[:-1]), (sign[64:], sign[:-64]), (sign, other_sign)]:
        assert abs((a * b).mean()) < limit
    for lag in (1, 2, 3, 64):
        assert abs((sign[:, lag:] * sign[:, :-lag]).mean()) < limit
    # Parity of the four corners of a rectangle: catches masks that are a row bit combined with a column bit.
    assert abs((sign[1:, 1:] * sign[:-1, 1:] * sign[1:, :-1] * sign[:-1, :-1]).mean()) < limit
    # Counts per row and per column spread as binomials do.
    for dim, n in ((1, width), (0, count)):
        assert abs(keep.double().sum(dim).var().item() / (n / 4) - 1) < 0.35


def test_uniform_numbers_are_uniform_alone_and_in_pairs_and_belong_to_row_and_column():
    rows, columns = counter.row_states(KEY, torch.arange(1000)), counter.column_states(KEY, torch.arange(256))
    u = counter.uniform(rows, columns)
    assert u.dtype == torch.float64 and u.shape == (1000, 256) and u.min() > 0 and u.max() < 1
    for cells in (u * 64, (u[1:] * 8).floor() * 8 + u[:-1] * 8, (u[:, 1:] * 8).floor() * 8 + u[:, :-1] * 8):
        counts = torch.bincount(cells.flatten().long(), minlength=64).double()
        wanted = cells.numel() / 64
        assert ((counts - wanted).square() / wanted).sum() < 63 + 6 * (2 * 63) ** 0.5
    order = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(i)) for i in range(1000)])
    assert torch.equal(counter.uniform(rows, columns[order]), u.gather(1, order))
    assert torch.equal(counter.uniform(rows[-3:], columns[5:9]), u[-3:, 5:9])


def test_dropout_scales_and_its_gradient_replays_the_mask():
    x = torch.randn(4, 16, 33, requires_grad=True)
    rows = torch.arange(64).view(4, 16)
    y = counter.dropout(x, 0.25, KEY, rows)
    keep = counter.keep_mask(KEY, rows, 33, 0.25)
    torch.testing.assert_close(y, torch.where(keep, x / 0.75, torch.zeros(())))
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(dx, torch.where(keep, grad / 0.75, torch.zeros(())))


def test_dropout_saves_no_mask_and_zero_rate_is_the_identity():
    x = torch.randn(8, 6, requires_grad=True)
    rows = torch.arange(8)
    assert counter.dropout(x, 0.0, KEY, rows) is x
    saved = counter.dropout(x, 0.5, KEY, rows).grad_fn.saved_tensors
    assert [t.shape for t in saved] == [rows.shape]


def test_dropout_keeps_bf16():
    y = counter.dropout(torch.ones(50, 50, dtype=torch.bfloat16), 0.5, KEY, torch.arange(50))
    assert y.dtype == torch.bfloat16 and set(y.unique().tolist()) == {0.0, 2.0}


def test_bad_dropout_is_refused():
    with pytest.raises(UserError, match=r"rate = 1\.0"):
        counter.keep_mask(KEY, torch.arange(3), 4, 1.0)
    with pytest.raises(UserError, match="do not name the rows"):
        counter.dropout(torch.ones(3, 4), 0.5, KEY, torch.arange(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits():
    shape = (300, 1001)
    assert torch.equal(counter.normal(KEY, shape, device="cuda").cpu(), counter.normal(KEY, shape))
    rows = torch.arange(300)
    assert torch.equal(counter.keep_mask(KEY, rows.cuda(), 1001, 0.1).cpu(), counter.keep_mask(KEY, rows, 1001, 0.1))
