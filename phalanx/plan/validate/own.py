"""Steps of one's own, predicted: which efficiency they have.

A CSV file like those of `tables`, whose rows say more, as nobody has written down beforehand how they were run. Where
a column is not there or empty, what the command line says holds, or the default.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from phalanx.core.errors import UserError
from phalanx.optim.config import Kind as Optimizer
from phalanx.plan.predict import predict
from phalanx.plan.residual import residual_of
from phalanx.plan.software import software_named
from phalanx.plan.types import Overlap, Precision
from phalanx.plan.validate.assumptions import Setting
from phalanx.plan.validate.compare import Compared
from phalanx.plan.validate.jobs import cluster_of, job_of, strategy_of
from phalanx.plan.validate.later import LLAMA
from phalanx.plan.validate.rows import Row, read_table

MODELS: Mapping[str, Mapping[str, object]] = {"gpt": {}, "llama": LLAMA}
"""What a model is made of: GPT-2's kind (learned positions, LayerNorm, biases, GELU, dropout, tied embeddings), or
Llama's (rotary, RMSNorm, gate, none of the others)."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "tensor_overlap": get_args(Overlap),
    "zero": ("0", "1", "2", "3"),
    "model": tuple(MODELS),
}
COLUMNS = ("cluster", "software", *_CHOICES)
"""Columns that a file of one's own may have beside those of `rows`."""


@dataclass(frozen=True)
class Own:
    """Steps of one's own.

    Attributes:
        compared: each with its prediction at efficiency 1.
    """

    compared: tuple[Compared, ...]

    @property
    def efficiency(self) -> float:
        """Predicted over measured seconds: the median, as one slow run says little."""
        return float(np.median([one.error + 1 for one in self.compared]))

    @property
    def inside(self) -> float | None:
        """Share of steps that lie in their interval; None: their machines have none."""
        known = [between for one in self.compared if (between := is_inside(one)) is not None]
        return float(np.mean(known)) if known else None

    def left(self, one: Compared) -> float:
        """Error of a row once the efficiency is given."""
        return (one.error + 1) / self.efficiency - 1


def is_inside(one: Compared) -> bool | None:
    """Whether a step lies in the interval that is predicted for it; None: its machine has none."""
    if one.prediction.interval_s is None:
        return None
    low_s, high_s = one.prediction.interval_s
    return bool(low_s <= one.row.step_s <= high_s)


def compare_own(path: Path, cluster: str | None, software: str | None) -> Own:
    """Predict every row of a file.

    Args:
        cluster, software: of rows that name none.

    Raises:
        UserError: the file cannot be read, a row names no cluster, or cannot be run like that.
    """
    rows = read_table(path)
    if not rows:
        raise UserError("has no row", cure="give it a line for each measured step", field=str(path))
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return Own(tuple(_compared(path, row, line, cluster, software) for row, line in zip(rows, lines, strict=True)))


def _compared(path: Path, row: Row, line: dict[str, str], cluster: str | None, software: str | None) -> Compared:
    def said(column: str) -> str:
        return (line.get(column) or "").strip()

    where = f"{path}: row {row.row_id}"
    name = said("cluster") or cluster
    if name is None:
        raise UserError("no cluster", cure="add a column cluster, or give --cluster NAME|FILE", field=where)
    for column, known in _CHOICES.items():
        if said(column) and said(column) not in known:
            cure = f"take one of {', '.join(known)}"
            raise UserError("is not known", cure=cure, field=f"{where}: {column}", value=said(column))
    try:
        setting = Setting(
            table=path.stem,
            title=path.name,
            cluster=name,
            software=software_named(said("software") or software or "phalanx"),
            precision=cast(Precision, said("precision") or "bf16"),
            optimizer=cast(Optimizer, said("optimizer") or "adamw"),
            zero=int(said("zero") or 1),
            tensor_overlap=cast(Overlap, said("tensor_overlap") or "none"),
            model=MODELS[said("model") or "gpt"],
        )
        machine = cluster_of(row, setting)
        job = replace(job_of(row, setting), residual=replace(residual_of(machine), efficiency=1.0))
        return Compared(row, predict(job, strategy_of(row, setting), machine))
    except UserError as error:
        raise UserError(f"{error.field or ''} {error.problem}".strip(), cure=error.cure, field=where) from None
