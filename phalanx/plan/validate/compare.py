"""Predicted against published step times: errors by row, what the open choices change, and a null model beside.

The null model is ``step = a ideal (1 + (p - 1) / (v m)) + b``: time at peak, the bubble, and a constant. It is fitted
to the very rows that it is judged by, but for one at a time; a model that knows nothing of them has to stand beside it.

`ablation` is MegaScale's table 3, what each of its changes to Megatron-LM gains, one after another: 175B on 256 GPUs
with a batch of 256, at the end of 768; the published column is model FLOPs utilisation, in points. `compare_own` reads
a CSV file like those of `tables` with a user's own steps, whose rows say more, as nobody has written down beforehand
how they were run; where a column is missing or empty, the command line decides, or the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.core.layout import divisors
from phalanx.optim.config import Kind as Optimizer
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.jobs import phalanx_software
from phalanx.plan.overheads import residual_of
from phalanx.plan.predict import predict
from phalanx.plan.software import PHALANX, software_named
from phalanx.plan.types import Job, Overlap, Precision, Prediction, Software, Strategy
from phalanx.plan.validate.assumptions import (
    LATER,
    LLAMA,
    MEGASCALE_OWN,
    MEGATRON,
    SETTINGS,
    Setting,
)
from phalanx.plan.validate.published import COLUMNS as TABLE_COLUMNS
from phalanx.plan.validate.published import (
    MORE_COLUMNS,
    TABLES,
    Row,
    cluster_of,
    job_of,
    published_flops,
    read_lines,
    read_table,
    strategy_of,
)


@dataclass(frozen=True)
class Compared:
    """A row and its prediction."""

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.prediction.step_s / self.row.step_s - 1


@dataclass(frozen=True, eq=False)
class TableResult:
    """A table's comparison."""

    setting: Setting
    compared: tuple[Compared, ...]
    null_errors: NDArray[np.float64]  # of the null model, each row left out in turn; empty where there are too few rows
    spread: Mapping[str, float]  # mean absolute error with each open choice made otherwise, by what was changed

    @property
    def errors(self) -> NDArray[np.float64]:
        """Signed errors by row."""
        return np.array([one.error for one in self.compared])

    @property
    def mean_error(self) -> float:
        """Mean of absolute errors."""
        return float(np.abs(self.errors).mean())


def compare(setting: Setting, folder: Path = TABLES, with_spread: bool = True) -> TableResult:
    """Predict all rows of a table."""
    rows = read_table(folder / f"{setting.table}.csv")
    compared = tuple(_compared(row, setting) for row in rows)
    peak = load_cluster(setting.cluster, 1).device.peak_flops_per_s(setting.precision)
    ideal = [ideal_s(one.prediction.job, one.prediction.strategy, peak) for one in compared]
    null = leave_one_out(ideal, [row.step_s for row in rows])
    return TableResult(setting, compared, null, _spread(setting, rows) if with_spread else {})


def compare_all(folder: Path = TABLES, with_spread: bool = True) -> list[TableResult]:
    """All tables of `folder` that have a setting."""
    found = [setting for setting in (*SETTINGS, *LATER) if (folder / f"{setting.table}.csv").is_file()]
    return [compare(setting, folder, with_spread) for setting in found]


def _compared(row: Row, setting: Setting) -> Compared:
    return Compared(row, predict(job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)))


def _spread(setting: Setting, rows: list[Row]) -> dict[str, float]:
    found = {}
    for name, values in setting.alternatives.items():
        for value in values:
            otherwise: dict[str, Any] = {name: value}
            changed = replace(setting, **otherwise)
            errors = [abs(_compared(row, changed).error) for row in rows]
            found[f"{name} = {getattr(value, 'name', value)}"] = float(np.mean(errors))
    return found


_LEAST = 4  # rows below which two numbers explain nothing


def ideal_s(job: Job, strategy: Strategy, peak_flops_per_s: float) -> float:
    """Seconds of a step at the peak rate, with the bubble."""
    flops = published_flops(job)
    micro_batches = strategy.micro_batches(job.global_batch)
    bubble = 1 + (strategy.pipeline - 1) / (strategy.chunks * micro_batches)
    return float(flops / (strategy.world_size * peak_flops_per_s) * bubble)


def leave_one_out(ideal: Sequence[float], measured: Sequence[float]) -> NDArray[np.float64]:
    """Errors of the null model, each row predicted by numbers fitted to all others; empty for fewer than four rows.

    Fitted by least squares of relative errors, as it is judged.
    """
    if len(ideal) < _LEAST:
        return np.zeros(0)
    x, y = np.asarray(ideal), np.asarray(measured)
    columns = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    errors = []
    for left in range(len(y)):
        others = np.arange(len(y)) != left
        fitted, *_ = np.linalg.lstsq(columns[others], np.ones(len(y) - 1), rcond=None)
        errors.append(columns[left] @ fitted - 1)
    return np.array(errors)


PUBLISHED = (47.7, 52.3, 53.3, 55.5, 58.0, 59.5, 61.2, 62.3, 65.3)
"""Points of MFU after each change (arXiv 2402.15627, table 3)."""

_ROW = Row("ms-t3", 96, 12288, 128, 64000, 2048, 256, 0, 256, 8, 8, 6, 4, "", None, 0.0)


@dataclass(frozen=True)
class Change:
    """One line of the table: points of MFU after it, and what it gained, predicted and published."""

    name: str
    predicted: float
    gain: float
    published: float
    published_gain: float


def steps() -> list[tuple[str, Setting, int]]:
    """The settings after each change, and the batch: each keeps all changes before it."""
    base = MEGATRON
    block = replace(base, block=MEGASCALE_OWN.block)
    window = replace(block, window=MEGASCALE_OWN.window)
    tensor = replace(window, tensor_overlap=MEGASCALE_OWN.tensor_overlap, tensor_chunks=MEGASCALE_OWN.tensor_chunks)
    pipeline = replace(tensor, software=replace(base.software, pipeline_overlap=True))
    overlapped = replace(pipeline.software, data_overlap=True, first_gather_hidden=True)
    data = replace(pipeline, software=overlapped)
    fused = replace(MEGASCALE_OWN.software, loader_hidden=base.software.loader_hidden)
    operators = replace(data, software=fused, recompute=MEGASCALE_OWN.recompute)
    other = replace(operators, software=MEGASCALE_OWN.software)
    lamb = replace(other, optimizer="lamb")
    return [
        ("Megatron-LM", base, 256),
        ("parallel block", block, 256),
        ("sliding window", window, 256),
        ("tensor overlap", tensor, 256),
        ("pipeline overlap", pipeline, 256),
        ("data overlap", data, 256),
        ("efficient operators", operators, 256),
        ("data pipeline and other code", other, 256),
        ("LAMB, batch of 768", lamb, 768),
    ]


def ablation() -> list[Change]:
    """All lines of the table."""
    found: list[Change] = []
    for (name, setting, batch), published in zip(steps(), PUBLISHED, strict=True):
        # Utilisation as the table counts it: FLOPs of full attention over all pairs, over the peak.
        row = replace(_ROW, global_batch=batch)
        job, strategy, cluster = job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)
        peak = strategy.world_size * cluster.device.peak_flops_per_s(setting.precision)
        predicted = 100 * published_flops(job) / float(peak * predict(job, strategy, cluster).step_s)
        before = found[-1] if found else None
        gain = predicted - before.predicted if before else 0.0
        published_gain = published - before.published if before else 0.0
        found.append(Change(name, predicted, gain, published, published_gain))
    return found


MODELS: Mapping[str, Mapping[str, object]] = {"gpt": {}, "llama": LLAMA}
"""What a model is made of: GPT-2's kind (learned positions, LayerNorm, biases, GELU, dropout, tied embeddings), or
Llama's (rotary, RMSNorm, gate, none of the others)."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "tensor_overlap": get_args(Overlap),
    "zero": ("0", "1", "2", "3"),
    "model": tuple(MODELS),
    "residual": ("float32", "compute"),
    "compile": ("yes", "no"),
}
_AS_GIVEN = ParallelConfig()
_COLUMN_OF: Mapping[str, str] = {
    "Model.kv_heads": "kv_heads",
    "Model.layers": "layers",
    "Model.hidden": "hidden",
    "Model.heads": "heads",
    "Model.mlp_width": "ffn",
    "Model.vocab_rows": "vocab",
    "Job.sequence": "seq",
    "Job.global_batch": "global_batch",
    "Strategy.micro_batch": "micro_batch",
    "train.micro_batch": "micro_batch",
    "parallel.tensor": "tp",
    "parallel.pipeline": "pp",
    "parallel.context": "cp",
    "parallel.chunks": "vpp",
    "--devices": "n_gpus",
    "--software": "software",
    "--cluster": "cluster",
}
"""What the planner's fields are called in a table."""
COLUMNS = ("cluster", "software", *_CHOICES)  # columns that a file of one's own may have beside those of `rows`


@dataclass(frozen=True)
class Own:
    """Steps of one's own."""

    compared: tuple[Compared, ...]  # each with its prediction at efficiency 1
    too_large: tuple[str, ...] = ()  # rows that are predicted to take more memory than a device has

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
    """Predict every row of a file. `cluster`, `software`: of rows that name none."""
    rows, lines = read_table(path), read_lines(path)
    if not rows:
        raise UserError("has no row", cure="give it a line for each measured step", field=str(path))
    # A column that nothing reads may be one of ours, misspelt.
    known = (*TABLE_COLUMNS, *MORE_COLUMNS, *COLUMNS)
    for column in lines[0]:
        if column not in known and not column.startswith("note"):
            near = difflib.get_close_matches(column, known, 3, 0.5)
            cure = f"name it {' or '.join(near)}" if near else f"take it out, or one of {', '.join(known)}"
            problem = "is no column; what begins with 'note' is passed over"
            raise UserError(problem, cure=cure, field=f"{path}: column", value=column)
    found = [_compared_own(path, row, line, cluster, software) for row, line in zip(rows, lines, strict=True)]
    return Own(
        tuple(compared for compared, _ in found), tuple(one.row.row_id for one, is_too_large in found if is_too_large)
    )


def _compared_own(
    path: Path, row: Row, line: dict[str, str], cluster: str | None, software: str | None
) -> tuple[Compared, bool]:
    def cell(column: str) -> str:
        return (line.get(column) or "").strip()

    where = f"{path}: row {row.row_id}"
    name = cell("cluster") or cluster
    if name is None:
        raise UserError("no cluster", cure="add a column cluster, or give --cluster NAME|FILE", field=where)
    for column, known in _CHOICES.items():
        if cell(column) and cell(column) not in known:
            cure = f"take one of {', '.join(known)}"
            raise UserError("is not known", cure=cure, field=f"{where}: {column}", value=cell(column))
    try:
        setting = Setting(
            table=path.stem,
            title=path.name,
            cluster=name,
            software=_software(cell, name, cell("software") or software),
            precision=_precision(cell),
            optimizer=cast(Optimizer, cell("optimizer") or "adamw"),
            zero=int(cell("zero") or 1),
            tensor_overlap=cast(Overlap, cell("tensor_overlap") or "none"),
            model=MODELS[cell("model") or "gpt"],
            bucket_bytes=_AS_GIVEN.bucket_bytes,
            tensor_chunks=_AS_GIVEN.tensor_chunks,
        )
        machine = cluster_of(row, setting)
        _check_batch(row, setting)
        job = job_of(row, setting)
        job = replace(job, residual=replace(residual_of(job, machine), efficiency=1.0))
        predicted = predict(job, strategy_of(row, setting), machine)
        fullest = max(rank.total for rank in predicted.memory)
        return Compared(row, predicted), fullest > machine.device.memory_bytes
    except UserError as error:
        column = _COLUMN_OF.get(error.field or "", error.field or "")
        cure = error.cure
        if column != error.field and cure is not None:
            cure = cure.replace(str(error.field), column)
        raise UserError(f"{column} {error.problem}".strip(), cure=cure, field=where) from None


def _precision(cell: Callable[[str], str]) -> Precision:
    return cast(Precision, cell("precision") or "bf16")


def _software(cell: Callable[[str], str], cluster: str, name: str | None) -> Software:
    if name not in (None, PHALANX.name):
        return software_named(str(name))
    on_cpu = load_cluster(cluster).device.kind == "cpu"
    residual = cast(Literal["float32", "compute"], cell("residual") or "float32")
    compiled = not on_cpu if not cell("compile") else cell("compile") == "yes"
    return phalanx_software(_precision(cell), residual=residual, compiled=compiled, on_cpu=on_cpu)


def _check_batch(row: Row, setting: Setting) -> None:
    if row.global_batch % row.data:
        near = max(row.global_batch // row.data, 1) * row.data
        cure = f"correct it, or dp; a multiple of dp is {near:,}"
        problem = f"{row.global_batch} sequences of a step do not divide by {row.data} data-parallel ranks"
        raise UserError(problem, cure=cure, field="global_batch")
    share, micro_batch = row.global_batch // row.data, row.micro_batch or setting.micro_batch
    if share % micro_batch:
        cure = f"write one of {', '.join(map(str, divisors(share)))}"
        problem = f"= {micro_batch}: {share} sequences of each data-parallel rank do not divide by it"
        raise UserError(problem, cure=cure, field="micro_batch")
