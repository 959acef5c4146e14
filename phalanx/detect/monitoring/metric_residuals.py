"""Noise of real hosts, to be spliced into data that are made up.

    noise = read_residuals(Path("dcgm.parquet"), names=load_names())
    generate(scenario, real_noise=noise)

What a host's metric does around its own average of a minute is kept, as a share of that average; what the load does is
taken off. Any file that `read_table` reads will do, such as GWDG's public node metrics (doi 10.5281/zenodo.19052367).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.metric_alignment import fill_short_gaps
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_names import Names
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.table_files import read_table

_SMOOTH_S = 60.0
_LEAST_SAMPLES = 300
_LEAST_KNOWN = 0.9
_LEAST_LEVEL = 0.02
"""Of the metric's upper limit: shares of less are no noise of a host that works."""
_MOST = 0.5


def read_residuals(path: Path, *, names: Names | None = None) -> dict[str, NDArray[np.float32]]:
    """Noise of a file's hosts: by metric, [hosts, samples] as shares of the level.

    Args:
        names: rules for other names than the catalogue's.

    Raises:
        UserError: the file cannot be read, or no host has five minutes of any metric.
    """
    found = residuals(read_table(path, names=names))
    if not found:
        cure = f"give a file with {_LEAST_SAMPLES} samples or more of busy hosts, without long gaps"
        raise UserError("has no noise that could be used", cure=cure, value=str(path))
    return found


def residuals(table: MetricTable) -> dict[str, NDArray[np.float32]]:
    """The same of a table; hosts with long gaps, and hosts that idle, are left out."""
    found = {}
    filled = fill_short_gaps(table)
    for name in table.metrics:
        values = filled.of(name)
        if values.shape[1] < _LEAST_SAMPLES:
            continue
        level = _smooth(values, max(3, round(_SMOOTH_S / table.period_s)))
        is_busy = np.nanmedian(np.where(np.isnan(level), 0, level), axis=1) > _LEAST_LEVEL * CATALOGUE[name].upper
        kept = is_busy & (np.mean(~np.isnan(values), axis=1) > _LEAST_KNOWN)
        if kept.any():
            share = np.divide(values, level, out=np.ones_like(values), where=level > 0)[kept] - 1
            found[name] = np.clip(np.nan_to_num(share), -_MOST, _MOST).astype(np.float32)
    return found


def _smooth(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Means of what is known in a window around each sample, along the last axis; NaN where nothing is."""
    known = ~np.isnan(values)
    before, after = width // 2 + 1, width // 2
    padding = ((0, 0), (before, after))
    sums = np.cumsum(np.pad(np.where(known, values, 0), padding), axis=1, dtype=np.float64)
    counts = np.cumsum(np.pad(known, padding), axis=1)
    total, count = sums[:, before + after :] - sums[:, : -before - after], counts[:, before + after :]
    count = count - counts[:, : -before - after]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
