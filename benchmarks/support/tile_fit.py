"""Constants of the tile model of matrix products from isolated products: a search, then a table of what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.plan.hardware.device_model import Clock, LogGrid, TileGemm
from phalanx.plan.types import ARRAYS, Tile

SHAPES = (
    (256, 128, 0),
    (128, 256, 0),
    (128, 128, 1),
    (256, 64, 2),
    (64, 256, 2),
    (128, 64, 3),
    (64, 128, 3),
    (64, 64, 4),
)
"""Rows, columns, and which of the five shares of a core's peak they have."""
SPLITS = (2, 3, 4, 6)

# Of the search: five shares, columns to start a tile of 128 x 256, how they grow for smaller ones, launch, share of the
# memory's rate, softness, bytes for split sums, slowing of the clock. The logarithms of all but the exponent.
_START = (0.95, 0.84, 0.75, 0.7, 0.5, 200, 0.3, 1.5e-6, 0.75, 4, 1, 0.07)
_LEAST = (0.2, 0.2, 0.2, 0.2, 0.2, 16, 0, 3e-7, 0.4, 1.5, 0.01, 0.002)
_MOST = (1, 1, 1, 1, 1, 800, 1, 5e-6, 1, 8, 8, 0.25)
_EXPONENT = 6

WAVES = (-7, -5, -4, -3, -2.5, -2, -1.5, -1.25, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6)
"""Points of the correction, as powers of two."""
COLUMNS = (6, 8, 9.5, 11, 12.5, 14, 16)


@dataclass(frozen=True)
class Chip:
    """What the data sheet says."""

    name: str
    cores: int
    peak_flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Products:
    """Measured products: sizes and seconds."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: np.ndarray

    @property
    def gflop(self) -> np.ndarray:
        return 2e-9 * self.m * self.n * self.k

    @property
    def counted(self) -> np.ndarray:
        """Those that errors are stated for: 1 GFLOP and more, no side under 128."""
        return (self.gflop >= 1) & (np.minimum(np.minimum(self.m, self.n), self.k) >= 128)

    def where(self, chosen: np.ndarray) -> Products:
        return Products(self.m[chosen], self.n[chosen], self.k[chosen], self.seconds[chosen])


def model(chip: Chip, constants: Sequence[float]) -> TileGemm:
    """The tile model with these constants, without a correction."""
    shares, start, growth = constants[:5], constants[5], constants[_EXPONENT]
    launch_s, memory_ratio, softness, split_ratio, slower = constants[7:]

    def tile(rows: int, columns: int, which: int, splits: int) -> Tile:
        return Tile(rows, columns, splits, shares[which], start * (32768 / (rows * columns)) ** growth)

    tiles = [tile(*shape, 1) for shape in SHAPES] + [tile(128, 128, 1, splits) for splits in SPLITS]
    return TileGemm(
        peak_flops_per_s=chip.peak_flops_per_s,
        memory_bytes_per_s=chip.memory_bytes_per_s,
        element_bytes=2,
        cores=chip.cores,
        tiles=tuple(tiles),
        split_ratio=split_ratio,
        memory_ratio=memory_ratio,
        softness=softness,
        launch_s=launch_s,
        clock=Clock(slower),
        correction=None,
        weight_gradient_ratio=1.0,
        mark="derived",
        source="",
    )


def errors(gemm: TileGemm, products: Products) -> np.ndarray:
    """Logarithm of predicted over measured time."""
    predicted = gemm.seconds(products.m, products.n, products.k, alone=True)
    return np.log(predicted / products.seconds)


def fitted(chip: Chip, products: Products, rounds: int) -> TileGemm:
    """The model with the constants of least mean error, and with a correction."""
    few = products
    if len(products.m) > 6000:
        few = products.where(np.random.default_rng(1).permutation(len(products.m))[:6000])
    weights = np.where(few.counted, 1.0, 0.2)

    def loss(point: np.ndarray) -> float:
        return float(np.average(np.abs(errors(model(chip, _constants(point)), few)), weights=weights))

    gemm = model(chip, _constants(_searched(loss, _point(_START), rounds)))
    return corrected(gemm, products)


def corrected(gemm: TileGemm, products: Products) -> TileGemm:
    """The model with a table, smooth over waves and k, of measured over predicted time."""
    waves = np.log2(gemm.waves(ARRAYS, products.m, products.n, np.ones_like(products.m)))
    hats = _hats(waves, WAVES)[:, :, None] * _hats(np.log2(products.k), COLUMNS)[:, None, :]
    table = _least_deviation(hats.reshape(len(waves), -1), -errors(gemm, products))
    ratios = np.exp(table.reshape(len(WAVES), len(COLUMNS)))
    axes = [2.0**w for w in WAVES], [2.0**c for c in COLUMNS]
    grid = LogGrid(axes, [[round(r, 3) for r in row] for row in ratios.tolist()])
    return replace(gemm, correction=grid)


def _constants(point: np.ndarray) -> list[float]:
    values = np.exp(point)
    values[_EXPONENT] = point[_EXPONENT]
    return [float(value) for value in np.clip(values, _LEAST, _MOST)]


def _point(constants: Sequence[float]) -> np.ndarray:
    values = np.array(constants, dtype=float)
    point = np.log(np.maximum(values, 1e-12))
    point[_EXPONENT] = values[_EXPONENT]
    return point


def _searched(loss: Callable[[np.ndarray], float], point: np.ndarray, rounds: int) -> np.ndarray:
    """The point of least loss that steps along the axes find, each axis with a step of its own."""
    steps, best = np.full(len(point), 0.2), loss(point)
    for _ in range(rounds):
        for axis in range(len(point)):
            for step in (steps[axis], -steps[axis]):
                tried = point.copy()
                tried[axis] += step
                found = loss(tried)
                if found < best:
                    point, best, steps[axis] = tried, found, step * 1.5
                    break
            else:
                steps[axis] *= 0.5
    return point


def _hats(values: np.ndarray, points: Sequence[float]) -> np.ndarray:
    """Weights of the two points that each value is between."""
    at = np.array(points, dtype=float)
    clipped = np.clip(values, at[0], at[-1])
    left = np.clip(np.searchsorted(at, clipped, side="right") - 1, 0, len(at) - 2)
    part = (clipped - at[left]) / (at[left + 1] - at[left])
    weights = np.zeros((len(values), len(at)))
    weights[np.arange(len(values)), left] = 1 - part
    weights[np.arange(len(values)), left + 1] = part
    return weights


def _least_deviation(weights: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The table of least absolute deviation from `wanted`: squares reweighted six times, neighbours held together."""
    count = weights.shape[1]
    places = np.arange(count).reshape(len(WAVES), len(COLUMNS))
    pairs = np.concatenate(
        [
            np.stack([places[:-1].ravel(), places[1:].ravel()]),
            np.stack([places[:, :-1].ravel(), places[:, 1:].ravel()]),
        ],
        axis=1,
    )
    smooth = np.zeros((pairs.shape[1], count))
    smooth[np.arange(pairs.shape[1]), pairs[0]], smooth[np.arange(pairs.shape[1]), pairs[1]] = -0.5, 0.5
    held = np.vstack([smooth, np.eye(count) * 0.3])
    fixed = held.T @ held
    table, scale = np.zeros(count), np.ones(len(wanted))
    for _ in range(6):
        weighted = weights * (scale**2)[:, None]
        table = np.linalg.solve(weighted.T @ weights + fixed, weighted.T @ wanted)
        scale = 1 / np.sqrt(np.maximum(np.abs(wanted - weights @ table), 0.02))
        scale /= scale.mean()
    return table
