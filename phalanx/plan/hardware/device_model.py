"""One device: how long its kernels take, a roofline with what was measured in place of peaks.

Matrix products are tiles over a GPU's cores, corrected by what was measured (`TileGemm`), or interpolated between sizes
that were measured (`TableGemm`); fused attention follows measured rates; norms, additions, casts and optimizer steps
only move bytes (`Stream`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.plan.hardware.formula import ARRAYS, SCALARS, Functions, LogCurve, LogGrid, broadcast, functions
from phalanx.plan.types import Mark, Number, Precision

_Model = TypeVar("_Model")

Format = Literal["half", "fp32"]
"""What the speed of arithmetic depends on: bf16 and fp16 are equally fast."""


def format_of(precision: Precision) -> Format:
    """The format whose rates hold for `precision`."""
    return "fp32" if precision == "fp32" else "half"


def number_of(numbers: Mapping[str, Number], key: str, what: str) -> Number:
    """The number of that name.

    Raises:
        UserError: `what` has none.
    """
    if key not in numbers:
        raise UserError(f"is no number of {what}", cure=f"take one of {', '.join(sorted(numbers))}", value=key)
    return numbers[key]


@dataclass(frozen=True)
class Device:
    """A GPU, a die of one, or the processors of a host.

    All times are of the device alone: what the host needs to launch kernels comes beside it.

    Attributes:
        numbers: plain numbers of its file, by key.
        gemms: models of matrix products.
        attentions: curves of fused attention.
        stream: kernels that only move bytes.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    numbers: Mapping[str, Number]
    gemms: Mapping[Format, TileGemm | TableGemm]
    attentions: Mapping[Format, FusedAttention]
    stream: Stream

    @property
    def memory_bytes(self) -> float:
        """Bytes of its memory."""
        return self.numbers["memory_bytes"].value

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak rate of its memory."""
        return self.numbers["memory_bytes_per_s"].value

    @property
    def kernel_gap_s(self) -> float:
        """Time between the end of a kernel and the start of the next one that waits for it."""
        return self.numbers["kernel_gap_s"].value

    @property
    def host_launch_s(self) -> float:
        """Time of the host for each kernel that it launches."""
        return self.numbers["host_launch_s"].value

    def launching_s(self, *, compiled: bool) -> float:
        """Time of the host for each kernel of a layer; of a compiled one too, where that was not measured apart."""
        key = "host_compiled_launch_s"
        return self.numbers[key].value if compiled and key in self.numbers else self.host_launch_s

    def peak_flops_per_s(self, precision: Precision = "bf16") -> float:
        """Peak rate of dense matrix products."""
        return self.numbers[f"peak_{format_of(precision)}_flops_per_s"].value

    def gemm_s(
        self, m: Any, n: Any, k: Any, precision: Precision = "bf16", batch: Any = 1, weight_gradient: bool = False
    ) -> Any:
        """Time of `batch` products of m x k with k x n, under lasting load; sizes are numbers or arrays."""
        gemm = self._of(self.gemms, precision)
        if isinstance(gemm, TableGemm):
            return gemm.seconds(m, n, k, batch, weight_gradient)
        seconds = gemm.seconds(m, n, k, batch)
        return seconds * gemm.weight_gradient_ratio if weight_gradient else seconds

    def has_times_of(self, precision: Precision) -> bool:
        """Whether `gemm_s` knows it; files of CPUs that are slow with bf16 have none."""
        return format_of(precision) in self.gemms

    def attention_s(
        self, flops: Any, queries: Any, head_dim: int, precision: Precision = "bf16", backward: bool = False
    ) -> Any:
        """Time of one pass of fused attention.

        Args:
            flops: of this pass, as counted: products with keys and with values, the masked half left out; a backward
                pass has 2.5 times those of its forward pass, the scores being computed again.
            queries: positions of one sequence.
        """
        return self._of(self.attentions, precision).seconds(flops, queries, head_dim, backward)

    def stream_s(self, num_bytes: Any) -> Any:
        """Time of a kernel that reads and writes `num_bytes` in all."""
        return self.stream.seconds(num_bytes)

    def stream_ratio(self, kernel: str, precision: Precision = "fp32") -> float:
        """How many times longer a kernel, such as ``rms_norm_forward``, takes than `stream_s` of its bytes; 1 where
        that was not measured."""
        return self.stream.ratio(kernel, precision)

    def number(self, key: str) -> Number:
        """A plain number of its file.

        Raises:
            UserError: there is none of that name.
        """
        return number_of(self.numbers, key, "a device")

    def mark_of(self, what: str, precision: Precision = "bf16") -> tuple[Mark, str]:
        """How far the times of ``gemm``, ``attention`` or ``stream``, or a plain number, can be trusted, and why."""
        if what == "gemm":
            gemm = self._of(self.gemms, precision)
            return gemm.mark, gemm.source
        if what == "attention":
            attention = self._of(self.attentions, precision)
            return attention.mark, attention.source
        if what == "stream":
            return self.stream.mark, self.stream.source
        return self.number(what).mark, self.number(what).source

    def _of(self, models: Mapping[Format, _Model], precision: Precision) -> _Model:
        """The model for `precision`.

        Raises:
            UserError: the device's file has none.
        """
        if format_of(precision) not in models:
            raise UserError(
                f"{self.name} has no times of {precision}",
                cure=f"set train.precision to what it has: {', '.join(models)} (half: bf16)",
                field="train.precision",
                value=precision,
            )
        return models[format_of(precision)]


_FEW = 4096
"""Arrays up to this size are computed for all tiles at once; longer ones tile by tile, which needs less memory."""

_UNIT = 128
"""Rows and columns of the tiles in which the correction counts waves (two of them for each core)."""


@dataclass(frozen=True)
class Tile:
    """One way to cut a product: tiles of the result, whose sums over k can be split between cores.

    Attributes:
        splits: parts of k that different cores sum up; more than one costs memory traffic to add them.
        share: of a core's peak that long tiles of this size reach.
        start_columns: what it costs to start and to end a tile, in columns of k.
    """

    rows: float
    columns: float
    splits: float
    share: float
    start_columns: float


@dataclass(frozen=True)
class Clock:
    """How the clock falls at the limit of power.

    Attributes:
        slower_ratio: by how much computing takes longer under lasting load.
        from_s: kernels up to this length, measured alone, run at full clock.
        to_s: those from this length on run as under lasting load; between them straight over the logarithm.
    """

    slower_ratio: float = 0.0
    from_s: float = 5e-4
    to_s: float = 2e-3

    def factor(self, f: Functions, seconds: Any) -> Any:
        """Over the time at full clock, for a kernel measured alone."""
        if not self.slower_ratio:
            return 1.0
        part = (f.log(seconds) - math.log(self.from_s)) / (math.log(self.to_s) - math.log(self.from_s))
        return 1 + self.slower_ratio * f.least(f.largest(part, 0.0), 1.0)


_REMEMBERED = 8192


@dataclass(frozen=True)
class TileGemm:
    """A matrix product as waves of tiles over the device's cores.

    Each core computes one tile of the result at a time; a wave is as many tiles as there are cores, and the last one is
    as long as a full one. The best of several ways to cut counts. Moving the operands takes its time beside it; what is
    longer dominates, smoothly. What remains between this and the measurements is a table over waves and k.

    Attributes:
        cores: streaming multiprocessors, or compute units.
        split_ratio: bytes of partial sums moved for each one of them, over their size.
        memory_ratio: of the memory's peak rate that operands move at.
        softness: exponent of the norm that joins computing and moving; the larger, the more only the longer one counts.
        launch_s: from start to end of a kernel, without its work.
        correction: time over the model's, over waves and k; None: not measured.
        weight_gradient_ratio: time of a weight gradient over that of a forward product of the same size.
    """

    peak_flops_per_s: float
    memory_bytes_per_s: float
    element_bytes: int
    cores: int
    tiles: tuple[Tile, ...]
    split_ratio: float
    memory_ratio: float
    softness: float
    launch_s: float
    clock: Clock
    correction: LogGrid | None
    weight_gradient_ratio: float
    mark: Mark
    source: str
    _columns: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _cuts: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)
    _known: Callable[..., float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A layer has the same product forward and backward, and layouts share most of theirs.
        object.__setattr__(self, "_known", lru_cache(maxsize=_REMEMBERED)(self._scalar))
        cuts = tuple(self._cut(tile) for tile in self.tiles)
        object.__setattr__(self, "_cuts", cuts)
        object.__setattr__(self, "_columns", tuple(np.array(column)[:, None] for column in zip(*cuts, strict=True)))

    def seconds(
        self, m: Any, n: Any, k: Any, batch: Any = 1, weight_gradient: bool = False, alone: bool = False
    ) -> Any:
        """Time of `batch` products of m x k with k x n.

        Args:
            weight_gradient: the sum over k is one over tokens, and of 32-bit numbers.
            alone: as a benchmark measures it, where short kernels run at full clock; else within lasting load.
        """
        (m, n, k, batch), shape = broadcast(m, n, k, batch)
        if shape is None:
            seconds = self._known(m, n, k, batch, alone)
        else:
            seconds = self._array(m, n, k, batch, alone).reshape(shape)
        return seconds * self.weight_gradient_ratio if weight_gradient else seconds

    def _scalar(self, m: float, n: float, k: float, batch: float, alone: bool) -> float:
        compute_s = min([_cut_s(SCALARS, cut, m, n, k, batch, self.cores) for cut in self._cuts])
        return float(self._whole(SCALARS, compute_s, m, n, k, batch, alone))

    def _array(self, m: Any, n: Any, k: Any, batch: Any, alone: bool) -> Any:
        if m.size <= _FEW:
            compute_s = _cut_s(ARRAYS, self._columns, m, n, k, batch, self.cores).min(axis=0)
        else:
            compute_s = _cut_s(ARRAYS, self._cuts[0], m, n, k, batch, self.cores)
            for cut in self._cuts[1:]:
                np.minimum(compute_s, _cut_s(ARRAYS, cut, m, n, k, batch, self.cores), out=compute_s)
        return self._whole(ARRAYS, compute_s, m, n, k, batch, alone)

    def _whole(self, f: Functions, compute_s: Any, m: Any, n: Any, k: Any, batch: Any, alone: bool) -> Any:
        moved = self.element_bytes * batch * (m * k + n * k + m * n)
        slowed_s = compute_s * (self.clock.factor(f, compute_s) if alone else 1 + self.clock.slower_ratio)
        memory_s = moved / (self.memory_bytes_per_s * self.memory_ratio)
        seconds = (slowed_s**self.softness + memory_s**self.softness) ** (1 / self.softness) + self.launch_s
        if self.correction is not None:
            seconds = seconds * self.correction.at(self.waves(f, m, n, batch), k)
        fastest_s = f.largest(2 * batch * m * n * k / self.peak_flops_per_s, moved / self.memory_bytes_per_s)
        return f.largest(seconds, fastest_s)

    def waves(self, f: Functions, m: Any, n: Any, batch: Any) -> Any:
        """Waves, in tiles of 128 x 256 as an average; the first axis of the correction."""
        return batch * f.up(m / _UNIT) * f.up(n / _UNIT) / (2 * self.cores)

    def _cut(self, tile: Tile) -> tuple[float, ...]:
        core_flops_per_s = self.peak_flops_per_s / self.cores * tile.share
        column_s = 2 * tile.rows * tile.columns / core_flops_per_s
        split_s = self.split_ratio * tile.splits * 4 / self.memory_bytes_per_s if tile.splits > 1 else 0.0
        return tile.rows, tile.columns, tile.splits, column_s, tile.start_columns, split_s


def _cut_s(f: Functions, cut: Sequence[Any], m: Any, n: Any, k: Any, batch: Any, cores: int) -> Any:
    """Time to compute, cut in one way; `cut` may be columns of arrays with a row for each way."""
    rows, columns, splits, column_s, start_columns, split_s = cut
    waves = f.up(f.up(m / rows) * f.up(n / columns) * (batch * splits) / cores)
    return waves * column_s * (k / splits + start_columns) + split_s * (batch * m * n)


_Logs = list[list[list[float]]]


@dataclass(frozen=True)
class TableGemm:
    """Rates of products and of weight gradients over tokens, rows and columns; between them straight in logarithms.

    A product is (tokens, columns) x (columns, rows), a weight gradient (rows, tokens) x (tokens, columns). Beyond the
    measured sizes the rate stays what it was at the last one.

    Attributes:
        tokens, widths: measured sizes; rows and columns are both out of `widths`.
        products: flops per second, a row of columns for each of tokens and of rows.
        weight_gradients: likewise.
    """

    tokens: Sequence[float]
    widths: Sequence[float]
    products: Sequence[Sequence[float]]
    weight_gradients: Sequence[Sequence[float]]
    mark: Mark
    source: str
    _log_products: _Logs = field(init=False, repr=False, compare=False)
    _log_gradients: _Logs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_log_products", self._logarithms(self.products))
        object.__setattr__(self, "_log_gradients", self._logarithms(self.weight_gradients))

    def seconds(self, m: Any, n: Any, k: Any, batch: Any = 1, weight_gradient: bool = False) -> Any:
        """Time of `batch` products of m x k with k x n, numbers or arrays; in a weight gradient k counts tokens."""
        sizes = (k, m, n) if weight_gradient else (m, n, k)
        table = self._log_gradients if weight_gradient else self._log_products
        axes = (self.tokens, self.widths, self.widths)
        if any(isinstance(size, np.ndarray) for size in sizes):
            places = [_places(axis, np.asarray(size, dtype=float)) for axis, size in zip(axes, sizes, strict=True)]
            return 2.0 * m * n * k * batch / np.exp(_between_arrays(np.array(table), places))
        place = [_place(axis, size) for axis, size in zip(axes, sizes, strict=True)]
        return 2.0 * m * n * k * batch / math.exp(_between(table, place))

    def _logarithms(self, rows: Sequence[Sequence[float]]) -> _Logs:
        logs = [[math.log(rate) for rate in row] for row in rows]
        width = len(self.widths)
        return [logs[start : start + width] for start in range(0, len(logs), width)]


def _place(sizes: Sequence[float], size: float) -> tuple[int, int, float]:
    """The measured sizes around `size`, by number, and how far it is from the first to the second, 0 to 1."""
    after = bisect_right(sizes, size)
    if after == 0 or after == len(sizes):
        last = max(after - 1, 0)
        return last, last, 0.0
    low, high = sizes[after - 1], sizes[after]
    return after - 1, after, math.log(size / low) / math.log(high / low)


def _between(table: _Logs, place: Sequence[tuple[int, int, float]]) -> float:
    """The value in the box whose corners `place` names."""
    (t0, t1, t), (r0, r1, r), (c0, c1, c) = place

    def along(rows: list[float]) -> float:
        return rows[c0] + (rows[c1] - rows[c0]) * c

    def across(plane: list[list[float]]) -> float:
        first = along(plane[r0])
        return first + (along(plane[r1]) - first) * r

    first = across(table[t0])
    return first + (across(table[t1]) - first) * t


_Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def _places(sizes: Sequence[float], size: NDArray[np.float64]) -> _Places:
    """As `_place`, for many."""
    logs, log_size = np.log(sizes), np.log(np.maximum(size, 1e-9))
    after = np.searchsorted(logs, log_size, side="right")
    low, high = np.maximum(after - 1, 0), np.minimum(after, len(logs) - 1)
    low = np.minimum(low, high)
    width = np.where(high > low, logs[high] - logs[low], 1.0)
    return low, high, np.where((after > 0) & (high > low), (log_size - logs[low]) / width, 0.0)


def _between_arrays(table: NDArray[np.float64], places: Sequence[_Places]) -> NDArray[np.float64]:
    """As `_between`, for many: the eight corners, weighted."""
    total = np.zeros(())
    for corner in range(8):
        chosen = [place[corner >> axis & 1] for axis, place in enumerate(places)]
        weights = [place[2] if corner >> axis & 1 else 1.0 - place[2] for axis, place in enumerate(places)]
        total = total + weights[0] * weights[1] * weights[2] * table[chosen[0], chosen[1], chosen[2]]
    return total


@dataclass(frozen=True)
class FusedAttention:
    """Rates of fused attention kernels over the length of a sequence, for each measured head size.

    Attributes:
        head_dims: measured head sizes, ascending; between them straight over logarithms, outside as the nearest.
        forward: flops per second over queries, for each of `head_dims`.
        backward: likewise.
        launch_s: from start to end of a kernel that does nothing.
    """

    head_dims: tuple[int, ...]
    forward: tuple[LogCurve, ...]
    backward: tuple[LogCurve, ...]
    launch_s: float
    mark: Mark
    source: str

    def seconds(self, flops: Any, queries: Any, head_dim: int, backward: bool = False) -> Any:
        """Time of `flops` of one pass over `queries` positions."""
        curves = self.backward if backward else self.forward
        lower, part = self._between(head_dim)
        rate = curves[lower].at(queries)
        if part:
            rate = rate ** (1 - part) * curves[lower + 1].at(queries) ** part
        return self.launch_s + flops / rate

    def _between(self, head_dim: int) -> tuple[int, float]:
        """The measured head size below, and how far towards the next one, over logarithms."""
        sizes = self.head_dims
        lower = max(0, bisect_right(sizes, head_dim) - 1)
        if head_dim <= sizes[0] or lower == len(sizes) - 1:
            return lower, 0.0
        return lower, math.log(head_dim / sizes[lower]) / math.log(sizes[lower + 1] / sizes[lower])


@dataclass(frozen=True)
class Stream:
    """Bytes over the achieved bandwidth of memory, after a time that every kernel takes.

    Attributes:
        bytes_per_s: achieved by large kernels.
        launch_s: from start to end of a kernel that moves nothing.
        rates: achieved over bytes, where that was measured: what fits into a cache is faster.
        ratios: by name of a kernel and its pass: how many times longer it takes than its bytes say, where measured;
            those of 16-bit numbers end in ``_half``.
    """

    bytes_per_s: float
    launch_s: float
    mark: Mark
    source: str
    rates: LogCurve | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, num_bytes: Any) -> Any:
        """Time to move `num_bytes`, read and written ones together."""
        if self.rates is None:
            return self.launch_s + num_bytes / self.bytes_per_s
        return self.launch_s + num_bytes / self.rates.at(functions(num_bytes).largest(num_bytes, 1.0))

    def ratio(self, kernel: str, precision: Precision = "fp32") -> float:
        """How many times longer `kernel` takes than its bytes say; 1 where that was not measured.

        Args:
            precision: of what it moves; where only that of fp32 is known, that.
        """
        names = [kernel, kernel.replace("_compiled", "")]  # one that was not compiled for want of the other
        for name in names:
            for ending in ("_half", "") if precision != "fp32" else ("",):
                if f"{name}{ending}" in self.ratios:
                    return self.ratios[f"{name}{ending}"]
        return 1.0
