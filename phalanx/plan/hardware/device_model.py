"""One device: how long its kernels take, a roofline with what was measured in place of peaks.

Matrix products are tiles over a GPU's cores, corrected by what was measured (`TileGemm`), or interpolated between sizes
that were measured (`TableGemm`); fused attention follows measured rates; norms, additions, casts and optimizer steps
only move bytes (`Stream`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.plan.types import (
    ARRAYS,
    SCALARS,
    Format,
    Functions,
    Mark,
    Number,
    Precision,
    Tile,
    any_array,
    broadcast,
    functions,
)

_Model = TypeVar("_Model")


def format_of(precision: Precision) -> Format:
    """The format whose rates hold for `precision`."""
    return "fp32" if precision == "fp32" else "half"


def number_of(numbers: Mapping[str, Number], key: str, what: str) -> Number:
    """The number of that name."""
    if key not in numbers:
        raise UserError(f"is no number of {what}", cure=f"take one of {', '.join(sorted(numbers))}", value=key)
    return numbers[key]


@dataclass(frozen=True)
class Device:
    """A GPU, a die of one, or the processors of a host.

    All times are of the device alone: what the host needs to launch kernels comes beside it.
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
        """A plain number of its file."""
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
        if format_of(precision) not in models:
            raise UserError(
                f"{self.name} has no times of {precision}",
                cure=f"set train.precision to what it has: {', '.join(models)} (half: bf16)",
                field="train.precision",
                value=precision,
            )
        return models[format_of(precision)]


_LEAST = 1e-300  # nothing has no logarithm; a curve is flat long before


@dataclass(frozen=True)
class LogCurve:
    """A curve through points, straight between them where both axes are logarithmic.

    Below the first point it keeps the first value; above the last one it keeps the last slope where `grows`, else the
    last value.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    grows: bool = False
    _log_xs: list[float] = field(init=False, repr=False, compare=False)
    _log_ys: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        log_xs, log_ys = [math.log(x) for x in self.xs], [math.log(y) for y in self.ys]
        if self.grows:  # far enough that nothing lies beyond
            slope = (log_ys[-1] - log_ys[-2]) / (log_xs[-1] - log_xs[-2])
            log_xs.append(log_xs[-1] + 40)
            log_ys.append(log_ys[-1] + 40 * slope)
        object.__setattr__(self, "_log_xs", log_xs)
        object.__setattr__(self, "_log_ys", log_ys)

    def at(self, x: Any) -> Any:
        """The value at `x`, a number or an array."""
        # Two ways with the same result: numpy for sets of layouts, plain floats for one layout.
        if isinstance(x, np.ndarray):
            return np.exp(np.interp(np.log(np.maximum(x, _LEAST)), self._log_xs, self._log_ys))
        low, high, part = _place(self._log_xs, math.log(x))
        return math.exp(self._log_ys[low] + (self._log_ys[high] - self._log_ys[low]) * part)


@dataclass(frozen=True)
class LogGrid:
    """Values over two or more axes, straight between points where axes and values are logarithmic; flat outside."""

    axes: tuple[Sequence[float], ...]
    rows: Sequence[Sequence[float]]  # along the last axis, one for each place on the others, the first axis outermost
    _log_axes: list[list[float]] = field(init=False, repr=False, compare=False)
    _array: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _nested: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        logs = np.array([[math.log(value) for value in row] for row in self.rows])
        array = logs.reshape([len(axis) for axis in self.axes])
        object.__setattr__(self, "_log_axes", [[math.log(x) for x in axis] for axis in self.axes])
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_nested", array.tolist())  # a list is read in a tenth of the time of an array

    def at(self, *point: Any) -> Any:
        """The value at a point: a number for each axis, or arrays of one shape."""
        if not any_array(point):
            pairs = zip(self._log_axes, point, strict=True)
            return math.exp(_between(self._nested, [_place(axis, math.log(max(x, _LEAST))) for axis, x in pairs]))
        places = [_places(axis, np.asarray(x, float)) for axis, x in zip(self._log_axes, point, strict=True)]
        total: Any = 0.0
        for corner in itertools.product((0, 1), repeat=len(places)):  # all corners of the box, weighted
            weight: Any = 1.0
            for place, end in zip(places, corner, strict=True):
                weight = weight * (place[2] if end else 1.0 - place[2])
            chosen = tuple(place[end] for place, end in zip(places, corner, strict=True))
            total = total + weight * self._array[chosen]
        return np.exp(total)


def _place(points: Sequence[float], value: float) -> tuple[int, int, float]:
    """The points around `value`, by number, and how far it is from the first to the second, 0 to 1."""
    after = bisect_right(points, value)
    # Outside of what was measured the nearest value holds: an extrapolated rate could be far above the peak.
    if after == 0 or after == len(points):
        last = max(after - 1, 0)
        return last, last, 0.0
    return after - 1, after, (value - points[after - 1]) / (points[after] - points[after - 1])


def _between(table: Any, places: Sequence[tuple[int, int, float]]) -> float:
    """The value within the box whose corners `places` name, axis after axis."""
    (low, high, part), *rest = places
    first: float = _between(table[low], rest) if rest else table[low]
    # On a point of this axis the other half of the box has no weight.
    if not part:
        return first
    last: float = _between(table[high], rest) if rest else table[high]
    return first + (last - first) * part


def _places(points: Sequence[float], values: NDArray[np.float64]) -> tuple[Any, Any, Any]:
    at, logs = np.asarray(points), np.log(np.maximum(values, _LEAST))
    after = np.searchsorted(at, logs, side="right")
    low, high = np.maximum(after - 1, 0), np.minimum(after, len(at) - 1)
    low = np.minimum(low, high)
    width = np.where(high > low, at[high] - at[low], 1.0)
    return low, high, np.where((after > 0) & (high > low), (logs - at[low]) / width, 0.0)


_FEW = 4096
"""Arrays up to this size are computed for all tiles at once; longer ones tile by tile, which needs less memory."""

_UNIT = 128  # rows and columns of the tiles in which the correction counts waves (two of them for each core)


@dataclass(frozen=True)
class Clock:
    """How the clock falls at the limit of power."""

    slower_ratio: float = 0.0  # by how much computing takes longer under lasting load
    from_s: float = 5e-4  # kernels up to this length, measured alone, run at full clock
    to_s: float = 2e-3  # those from this length on run as under lasting load; between them straight over the logarithm

    def factor(self, f: Functions, seconds: Any) -> Any:
        """Over the time at full clock, for a kernel measured alone."""
        if not self.slower_ratio:
            return 1.0
        part = (f.log(seconds) - math.log(self.from_s)) / (math.log(self.to_s) - math.log(self.from_s))
        return 1 + self.slower_ratio * f.least(f.largest(part, 0.0), 1.0)


@dataclass(frozen=True)
class TileGemm:
    """A matrix product as waves of tiles over the device's cores.

    Each core computes one tile of the result at a time; a wave is as many tiles as there are cores, and the last one is
    as long as a full one. The best of several ways to cut counts. Moving the operands takes its time beside it; what is
    longer dominates, smoothly. What remains between this and the measurements is a table over waves and k.
    """

    peak_flops_per_s: float
    memory_bytes_per_s: float
    element_bytes: int
    cores: int  # streaming multiprocessors, or compute units
    tiles: tuple[Tile, ...]
    split_ratio: float  # bytes of partial sums moved for each one of them, over their size
    memory_ratio: float  # of the memory's peak rate that operands move at
    # Exponent of the norm that joins computing and moving; the larger, the more only the longer one counts.
    softness: float
    launch_s: float
    clock: Clock
    correction: LogGrid | None  # time over the model's, over waves and k; None: not measured
    weight_gradient_ratio: float  # time of a weight gradient over that of a forward product of the same size
    mark: Mark
    source: str
    _columns: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _cuts: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)
    _known: Callable[..., float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A layer has the same product forward and backward, and layouts share most of theirs.
        object.__setattr__(self, "_known", lru_cache(maxsize=8192)(self._scalar))
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
        # Products of a step follow each other for seconds, so the clock has fallen; a benchmark's short kernels run
        # before it does.
        slowed_s = compute_s * (self.clock.factor(f, compute_s) if alone else 1 + self.clock.slower_ratio)
        memory_s = moved / (self.memory_bytes_per_s * self.memory_ratio)
        # A norm joins both instead of a maximum: kernels near the ridge of the roofline take longer than either alone.
        seconds = (slowed_s**self.softness + memory_s**self.softness) ** (1 / self.softness) + self.launch_s
        if self.correction is not None:
            seconds = seconds * self.correction.at(self.waves(f, m, n, batch), k)
        # No correction may lead above the peaks.
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
    # Rounded up: a last wave of a single tile takes as long as a full one.
    waves = f.up(f.up(m / rows) * f.up(n / columns) * (batch * splits) / cores)
    return waves * column_s * (k / splits + start_columns) + split_s * (batch * m * n)


@dataclass(frozen=True)
class TableGemm:
    """Rates of products and of weight gradients over tokens, rows and columns.

    A product is (tokens, columns) x (columns, rows), a weight gradient (rows, tokens) x (tokens, columns). Beyond the
    measured sizes the rate stays what it was at the last one.
    """

    products: LogGrid  # flops per second over tokens, rows and columns; so are `weight_gradients`
    weight_gradients: LogGrid
    mark: Mark
    source: str

    def seconds(self, m: Any, n: Any, k: Any, batch: Any = 1, weight_gradient: bool = False) -> Any:
        """Time of `batch` products of m x k with k x n, numbers or arrays; in a weight gradient k counts tokens."""
        rate = self.weight_gradients.at(k, m, n) if weight_gradient else self.products.at(m, n, k)
        return 2.0 * m * n * k * batch / rate


@dataclass(frozen=True)
class FusedAttention:
    """Rates of fused attention kernels over the length of a sequence, for each measured head size."""

    # Measured head sizes, ascending; between them straight over logarithms, outside as the nearest.
    head_dims: tuple[int, ...]
    forward: tuple[LogCurve, ...]  # flops per second over queries, for each of `head_dims`
    backward: tuple[LogCurve, ...]
    launch_s: float  # from start to end of a kernel that does nothing
    mark: Mark
    source: str

    def seconds(self, flops: Any, queries: Any, head_dim: int, backward: bool = False) -> Any:
        """Time of `flops` of one pass over `queries` positions."""
        curves = self.backward if backward else self.forward
        lower, higher, part = _place([math.log(size) for size in self.head_dims], math.log(head_dim))
        rate = curves[lower].at(queries)
        if part:
            # Straight between logarithms, as along the other axis.
            rate = rate ** (1 - part) * curves[higher].at(queries) ** part
        return self.launch_s + flops / rate


@dataclass(frozen=True)
class Stream:
    """Bytes over the achieved bandwidth of memory, after a time that every kernel takes."""

    bytes_per_s: float  # achieved by large kernels
    launch_s: float
    mark: Mark
    source: str
    rates: LogCurve | None = None  # achieved over bytes, where that was measured: what fits into a cache is faster
    # By name of a kernel and its pass: how many times longer it takes than its bytes say, where measured; those of
    # 16-bit numbers end in ``_half``.
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
        # The nearest name that was measured: the compiled kernel in this precision, in fp32, then the kernel as it is
        # written.
        names = [kernel, kernel.replace("_compiled", "")]  # one that was not compiled for want of the other
        for name in names:
            for ending in ("_half", "") if precision != "fp32" else ("",):
                if f"{name}{ending}" in self.ratios:
                    return self.ratios[f"{name}{ending}"]
        return 1.0
