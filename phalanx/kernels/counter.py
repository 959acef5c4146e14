"""Random numbers as a pure function of (key, logical element index), for weights and dropout.

A slice of a tensor can be made alone, on any rank, with any number of threads, and equals the slice of the whole bit
for bit. So every later layout starts from the same weights and drops the same elements, and recomputation replays a
mask instead of storing it.

The hash is SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014;
constants of Stafford's variant 13) over 64-bit lanes, with a second key word folded in half-way so that the streams of
two keys are not shifted copies of one another. Normal variates are the inverse of the normal distribution function
(Wichura, algorithm AS 241, PPND16), evaluated only with operations that IEEE 754 rounds exactly (add, multiply, divide,
square root), each in a kernel of its own: a library's vectorised log or cosine may differ in the last bit between the
vector body and the scalar tail of a loop, and such a difference would depend on how a tensor is sliced.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 0xFFFFFFFFFFFFFFFF

# Elements worked on at once on a CPU: temporaries of 8 bytes each stay inside a level-2 cache.
_CHUNK = 1 << 15

# Wichura (1988), "Algorithm AS 241: the percentage points of the normal distribution", PPND16, highest power first.
_CENTRE_TOP = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
)  # fmt: skip
_CENTRE_BOTTOM = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
)  # fmt: skip
_TAIL_TOP = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
)  # fmt: skip
_TAIL_BOTTOM = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
)  # fmt: skip
_FAR_TOP = (
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
    2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
)  # fmt: skip
_FAR_BOTTOM = (
    2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
    1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
)  # fmt: skip


def make_key(seed: int, *parts: int | str) -> int:
    """The 64-bit key of a named stream, such as ``make_key(seed, step, "layers.3.mlp")``.

    Keys of different (seed, parts) are independent: the parts are hashed with BLAKE2b, with their types and lengths, so
    ``("ab", "c")`` and ``("a", "bc")`` differ, and so do ``1`` and ``"1"``.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        text = str(part).encode()
        kind = b"s" if isinstance(part, str) else b"i"
        digest.update(kind + len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def _signed(word: int) -> int:
    # Two's complement: what an int64 tensor calls a 64-bit word.
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_word(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _fold(x: Tensor, shift: int, scratch: Tensor) -> None:
    """``x ^= x >>> shift`` in place, with a logical shift (torch's shift of a signed integer copies the sign)."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)
    x.bitwise_xor_(scratch)


def _hash_(x: Tensor, key: int) -> Tensor:
    scratch = torch.empty_like(x)
    x.mul_(_signed(_GOLDEN)).add_(_signed(key))
    _fold(x, 30, scratch)
    x.mul_(_signed(_MIX_1)).add_(_signed(_mix_word(key + _GOLDEN)))
    _fold(x, 27, scratch)
    x.mul_(_signed(_MIX_2))
    _fold(x, 31, scratch)
    return x


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule, highest power first, a rounding after every multiplication and every addition."""
    out = torch.mul(x, coefficients[0])
    for coefficient in coefficients[1:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[-1])


def _rational(x: Tensor, top: Sequence[float], bottom: Sequence[float]) -> Tensor:
    return _polynomial(x, top).div_(_polynomial(x, bottom))


def _negative_log(p: Tensor) -> Tensor:
    """-log(p) of float64 p in (0, 1) to about 1e-14, with exactly rounded operations alone.

    p = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)) by its series.
    """
    bits = p.view(torch.int64)
    # Adding the distance from sqrt(1/2) to 1 to the bits moves the cut between exponents from 1 to sqrt(1/2).
    shifted = bits + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    exponent = (shifted >> 52) - 1023
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    series = _polynomial(s * s, tuple(-2.0 / n for n in range(17, 0, -2))).mul_(s)
    return series.sub_(exponent.to(torch.float64).mul_(math.log(2.0)))


def _tail(q: Tensor) -> Tensor:
    """AS 241 for |q| > 0.425, where q is the probability less one half."""
    r = _negative_log(torch.sub(0.5, q.abs())).sqrt_()
    near, far = _rational(r - 1.6, _TAIL_TOP, _TAIL_BOTTOM), _rational(r - 5.0, _FAR_TOP, _FAR_BOTTOM)
    return torch.where(r <= 5.0, near, far).copysign_(q)


def _runs(full: Sequence[int], offsets: Sequence[int], shape: Sequence[int], device: Any) -> tuple[Tensor, int]:
    """The slice as contiguous runs: the logical index of each run's first element, and the length of a run."""
    run, stride, dim = 1, 1, len(full)
    while dim > 0:  # Take in trailing dimensions for as long as everything inside them is whole.
        dim -= 1
        run *= shape[dim]
        stride *= full[dim]
        if shape[dim] != full[dim]:
            break
    first = offsets[dim] * (stride // max(full[dim], 1)) if full else 0
    starts = torch.full((1,), first, dtype=torch.int64, device=device)
    for size, offset, count in reversed(list(zip(full[:dim], offsets[:dim], shape[:dim], strict=True))):
        steps = (torch.arange(count, dtype=torch.int64, device=device) + offset) * stride
        starts = (steps[:, None] + starts[None, :]).flatten()
        stride *= size
    return starts, run


def normal(
    key: int,  # 64 bits, from :func:`make_key`
    full_shape: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,  # first index of the slice in every dimension (default: zeros)
    # shape of the slice (default: what is left of ``full_shape`` after the offsets)
    shape: Sequence[int] | None = None,
    std: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal variates of mean 0: the slice ``[offsets, offsets + shape)`` of a tensor of ``full_shape``.

    Element i of the flattened full tensor is a function of (key, i) alone, rounded once from float64 to ``dtype``; the
    same bits come for any slicing, thread count and device with IEEE arithmetic. Full shapes may exceed 2^32 elements.

    Raises:
        UserError: the slice is not inside the full shape.
    """
    full = tuple(full_shape)
    offsets = (0,) * len(full) if offsets is None else tuple(offsets)
    shape = tuple(f - o for f, o in zip(full, offsets, strict=False)) if shape is None else tuple(shape)
    fits = len(full) == len(offsets) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= f for f, o, n in zip(full, offsets, shape, strict=True)
    )
    if not fits:
        raise UserError(
            f"slice of shape {shape} at {offsets} is not inside a tensor of shape {full}",
            cure="give offsets and shape with one entry per dimension, inside the full shape",
        )
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    starts, run = _runs(full, offsets, shape, out.device)
    flat = out.view(len(starts), run)
    # A GPU wants large kernels, a CPU temporaries that stay in cache.
    chunk = _CHUNK * torch.get_num_threads() if out.device.type == "cpu" else 1 << 24
    height, width = max(1, chunk // max(run, 1)), min(run, chunk)
    for row in range(0, len(starts), height):
        for column in range(0, run, width):
            rows, columns = slice(row, min(row + height, len(starts))), slice(column, min(column + width, run))
            inside = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=out.device)
            index = starts[rows, None] + inside
            bits = _hash_(index.view(-1), key).bitwise_right_shift_(11)
            # 53 signed bits and a half: symmetric about zero, exact, never 0 or 1 as a probability.
            q = bits.to(torch.float64).add_(0.5).mul_(2.0**-53)
            variates = _rational(torch.mul(q, q).neg_().add_(0.180625), _CENTRE_TOP, _CENTRE_BOTTOM).mul_(q)
            in_tail = (q.abs() > 0.425).nonzero().squeeze(1)
            variates.index_copy_(0, in_tail, _tail(q.index_select(0, in_tail)))
            flat[rows, columns] = variates.mul_(std).view(index.shape)
    return out


def _threshold(rate: float) -> int:
    """The signed 32-bit word below which an element is dropped."""
    if not 0.0 <= rate < 1.0:
        raise UserError(
            "the dropout rate must be in [0, 1)", cure="choose a rate such as 0.1", field="rate", value=rate
        )
    return round(rate * 2.0**32) - (1 << 31)


def row_states(key: int, rows: Tensor) -> Tensor:
    """The 64-bit hash of each row identity: what :func:`keep_mask` derives a row's bits from (int64, same shape)."""
    return _hash_(rows.to(torch.int64, copy=True), key)


def keep_mask(key: int, rows: Tensor, width: int, rate: float, *, offset: int = 0) -> Tensor:
    """Which elements dropout keeps, bool (..., width): a function of (key, row identity, column) alone.

    The row (int64, such as ``sample * sequence_length + position``) is hashed once with the full mixer; its columns
    cost one multiply-fold-multiply per two elements. `offset` is the logical index of the first column of a slice.
    """
    threshold = _threshold(rate)
    first = offset // 2
    pairs = torch.arange(first, (offset + width + 1) // 2, dtype=torch.int64, device=rows.device)
    bits = _crossed(row_states(key, rows), column_states(key, pairs))
    start = offset - 2 * first
    return bits.view(torch.int32)[..., start : start + width] >= threshold


def column_states(key: int, columns: Tensor) -> Tensor:
    """64 uniform bits for each column (int64, same shape), to be crossed with the rows'."""
    return _hash_(columns.to(torch.int64, copy=True), _mix_word(key))


def _crossed(of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """Bits of every row with each of its columns: (...) and (..., C) or (C,) to (..., C), the upper ones the best."""
    bits = of_rows[..., None] ^ of_columns
    bits.mul_(_signed(_MIX_1))
    _fold(bits, 32, torch.empty_like(bits))
    return bits.mul_(_signed(_MIX_2))


def uniform(of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """Float64 uniform in (0, 1), never 0 or 1: `row_states` (...) and `column_states` (C,) or (..., C) to (..., C)."""
    # 52 signed bits and a half, about one half: with 53, the largest would be rounded to 1.
    bits = _crossed(of_rows, of_columns).bitwise_right_shift_(12)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52).add_(0.5)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int, rows: Tensor, offset: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.rate, ctx.key, ctx.offset = rate, key, offset
        keep = keep_mask(key, rows, x.shape[-1], rate, offset=offset)
        return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        return dropout(grad, ctx.rate, ctx.key, rows, offset=ctx.offset), None, None, None, None


def dropout(x: Tensor, rate: float, key: int, rows: Tensor, *, offset: int = 0) -> Tensor:
    """Zero elements of ``x`` (..., width) with probability ``rate`` and scale the rest by ``1 / (1 - rate)``.

    Args:
        rate: in [0, 1); 0 returns ``x`` itself.
        key: 64 bits, from :func:`make_key`, best of (seed, step, name).
        rows: (...) int64 identity of each row of ``x``.
        offset: logical index of the first column, when ``x`` is a slice along its last dimension.

    Raises:
        UserError: the rate is outside [0, 1), or ``rows`` does not have one entry per row of ``x``.
    """
    _threshold(rate)
    if rows.shape != x.shape[:-1]:
        raise UserError(
            f"rows of shape {tuple(rows.shape)} do not name the rows of a tensor of shape {tuple(x.shape)}",
            cure=f"pass row identities of shape {tuple(x.shape[:-1])}",
            field="rows",
        )
    if rate == 0.0:
        return x
    out: Tensor = _Dropout.apply(x, rate, key, rows, offset)  # type: ignore[no-untyped-call]
    return out
