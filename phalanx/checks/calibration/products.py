"""Matrix products in the sizes and the orders of transformer layers.

A product of (tokens, columns) with (columns, rows) is made as a layer makes it: projections that widen are stored as
their transpose, those that narrow are not, and with backward passes it is the other way round, so that the sizes alone
say how the weight lies in memory; a square one is made both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from phalanx.checks.calibration.contract import Precision
from phalanx.checks.calibration.stopwatch import Case, Pool
from phalanx.kernels.linear import linear, project

_SMALL = 128
_DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(tokens: tuple[int, ...], widths: tuple[int, ...], precision: Precision, pool: Pool) -> list[Case]:
    """Products and weight gradients for all `tokens`, rows and columns out of `widths`."""
    found = []
    for count in tokens:
        for rows in widths:
            for columns in widths:
                sizes = {"tokens": count, "rows": rows, "columns": columns}
                product, calls = _product(count, rows, columns, pool)
                found.append(Case("product", sizes, precision, product, calls))
                found.append(Case("weight_gradient", sizes, precision, _weight_gradient(count, rows, columns, pool)))
    return found


def slow_rates(precisions: Sequence[Precision], device: torch.device) -> dict[str, float]:
    """``<precision>_flops_per_s`` of one small product in each precision that is not among `precisions`."""
    return {
        f"{each}_flops_per_s": _small_rate(dtype, device) for each, dtype in _DTYPES.items() if each not in precisions
    }


def _small_rate(dtype: torch.dtype, device: torch.device) -> float:
    x = torch.ones(_SMALL, _SMALL, dtype=dtype, device=device)
    torch.mm(x, x)
    began_s = time.perf_counter()
    float(torch.mm(x, x)[0, 0])  # waits for a GPU
    return 2 * _SMALL**3 / (time.perf_counter() - began_s)


def _product(tokens: int, rows: int, columns: int, pool: Pool) -> tuple[Callable[[], object], int]:
    def widening() -> torch.Tensor:
        return linear(pool.take(tokens, columns), pool.take(rows, columns))

    def narrowing() -> torch.Tensor:
        return project(pool.take(tokens, columns), pool.take(columns, rows))

    if rows != columns:
        return torch.no_grad()(widening if rows > columns else narrowing), 1
    return torch.no_grad()(lambda: (widening(), narrowing())), 2


def _weight_gradient(tokens: int, rows: int, columns: int, pool: Pool) -> Callable[[], object]:
    return torch.no_grad()(lambda: torch.mm(pool.take(tokens, rows).t(), pool.take(tokens, columns)))
