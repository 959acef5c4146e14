"""Published steps: the rows of the tables in this folder, and what `predict` takes for each: job, strategy, cluster."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, load_cluster
from phalanx.plan.hardware.device_model import Device, FusedAttention, TableGemm, TileGemm
from phalanx.plan.types import Job, Model, Recompute, Residual, Strategy
from phalanx.plan.validate.assumptions import Setting

TABLES = Path(__file__).parent / "tables"

COLUMNS = (
    *("row_id", "layers", "hidden", "heads", "vocab", "seq", "global_batch", "micro_batch"),
    *("n_gpus", "tp", "pp", "vpp", "dp", "recompute", "seq_parallel", "iter_time_s"),
)
"""Those that a table must have."""
MORE_COLUMNS = ("kv_heads", "ffn", "cp", "shard")  # those that it may have
RECOMPUTE: Mapping[str, Recompute] = {
    "full": "full",
    "selective": "attention",
    "elementwise": "elementwise",
    "alternate": "alternate",
    "none": "none",
}
"""What the column ``recompute`` may say, in the words of the cost model."""
_MOST = 10**9
_MOST_S = 1e6


@dataclass(frozen=True)
class Row:
    """One measured step."""

    row_id: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    global_batch: int
    micro_batch: int  # 0 where it is not published
    devices: int
    tensor: int
    pipeline: int
    chunks: int
    data: int
    recompute: str  # as in `RECOMPUTE`, or empty where it is not published
    sequence_parallel: bool | None  # None where it is not published
    step_s: float
    # 0 where they follow from heads and hidden width.
    kv_heads: int = 0
    mlp_width: int = 0
    context: int = 1
    shard: int = 0  # data-parallel ranks that split state; 0: all


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV table; lines that start with # say where it comes from."""
    return [_row(path, line) for line in read_lines(path)]


def read_lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV table, by column."""
    if not path.is_file():
        raise UserError("there is no such table", cure="give a folder of CSV tables", field="--tables", value=str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        cure = "save it as CSV in UTF-8"
        raise UserError(f"is no text in UTF-8 (byte {error.start})", cure=cure, field=str(path)) from None
    reader = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise UserError(
            f"the table has no column {', '.join(missing)}",
            cure=f"give it the columns {', '.join(COLUMNS)}",
            field=str(path),
        )
    lines = list(reader)
    for line in lines:
        if more := line.get(None):
            cure = "correct its commas; a time is written with a point"
            where = f"{path}: row {line['row_id']}"
            raise UserError("has more cells than there are columns", cure=cure, field=where, value=",".join(more))
    return lines


def _row(path: Path, line: Mapping[str, str | None]) -> Row:
    where = f"{path}: row {line['row_id']}"

    def whole(column: str, default: int | None = None) -> int:
        text = (line.get(column) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not 0 < value <= _MOST:
            cure = f"write a whole number from 1 to {_MOST:,}" + ("" if default is None else ", or nothing")
            raise UserError("is no such number", cure=cure, field=f"{where}: {column}", value=text)
        return value

    row = Row(
        row_id=line["row_id"] or "",
        layers=whole("layers"),
        hidden=whole("hidden"),
        heads=whole("heads"),
        vocab=whole("vocab"),
        sequence=whole("seq"),
        global_batch=whole("global_batch"),
        micro_batch=whole("micro_batch", 0),
        devices=whole("n_gpus"),
        tensor=whole("tp"),
        pipeline=whole("pp"),
        chunks=whole("vpp"),
        data=whole("dp"),
        recompute=line["recompute"] or "",
        sequence_parallel=_yes_or_no(where, line["seq_parallel"] or ""),
        step_s=_seconds(where, line["iter_time_s"] or ""),
        kv_heads=whole("kv_heads", 0),
        mlp_width=whole("ffn", 0),
        context=whole("cp", 1),
        shard=whole("shard", 0),
    )
    if row.recompute and row.recompute not in RECOMPUTE:
        cure = f"write one of {', '.join(RECOMPUTE)}, or nothing where it is not known"
        raise UserError("is not known", cure=cure, field=f"{where}: recompute", value=row.recompute)
    ranks = row.tensor * row.context * row.pipeline * row.data
    if ranks != row.devices:
        cure = "correct n_gpus, or an axis"
        raise UserError(f"tp x cp x pp x dp are {ranks} ranks", cure=cure, field=f"{where}: n_gpus", value=row.devices)
    return row


def _yes_or_no(where: str, text: str) -> bool | None:
    if text not in ("yes", "no", ""):
        cure = "write yes or no, or nothing where it is not known"
        raise UserError("is not known", cure=cure, field=f"{where}: seq_parallel", value=text)
    return {"yes": True, "no": False}.get(text)


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_S:
        cure = f"write seconds of a step, above 0 and up to {_MOST_S:,.0f}"
        raise UserError("is no time", cure=cure, field=f"{where}: iter_time_s", value=text)
    return seconds


def job_of(row: Row, setting: Setting) -> Job:
    """What the row's step computes; predicted by the model alone."""
    further: dict[str, Any] = dict(setting.model)
    model = Model(
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        vocab_rows=_padded(row.vocab, setting.pad_vocab * row.tensor),
        max_sequence=row.sequence,
        kv_heads=row.kv_heads,
        mlp_width=row.mlp_width,
        block=cast(Literal["serial", "parallel"], setting.block),
        windows=(setting.window,),
        **further,
    )
    sizes = row.sequence, row.global_batch
    return Job(model, *sizes, setting.precision, setting.optimizer, setting.software, residual=Residual())


def published_flops(job: Job) -> float:
    """FLOPs of a step as the publications count them: attention over all pairs, no recompute.

    For GPT-3's shape that is ``72 B s L h^2 (1 + s/6h + V/12hL)`` (arXiv 2104.04473).
    """
    model = job.model
    width, rows = model.hidden, model.heads * model.head_dim
    projections = width * (2 * rows + 2 * model.kv_heads * model.head_dim)
    mlp = (3 if model.gated else 2) * width * model.mlp_width
    each = 6.0 * (projections + mlp) + 12.0 * job.sequence * rows
    return job.tokens * (model.layers * each + 6.0 * model.vocab_rows * width)


def strategy_of(row: Row, setting: Setting) -> Strategy:
    """How the row's step was spread."""
    sequence_parallel = setting.sequence_parallel if row.sequence_parallel is None else row.sequence_parallel
    shard = (row.shard or row.data) if setting.zero else 1
    return Strategy(
        pipeline=row.pipeline,
        replicate=row.data // shard,
        shard=shard,
        context=row.context,
        tensor=row.tensor,
        micro_batch=row.micro_batch or setting.micro_batch,
        chunks=row.chunks,
        schedule="interleaved_1f1b" if row.chunks > 1 else "1f1b",
        zero=cast(Literal[0, 1, 2, 3], setting.zero),
        recompute=RECOMPUTE.get(row.recompute, setting.recompute),
        sequence_parallel=sequence_parallel,
        tensor_overlap=setting.tensor_overlap,
        tensor_chunks=setting.tensor_chunks,
        bucket_bytes=setting.bucket_bytes,
    )


def cluster_of(row: Row, setting: Setting) -> Cluster:
    """Where the row was measured."""
    cluster = replace(_cluster(setting.cluster), devices=row.devices)
    if not setting.slow_hosts:
        cluster = _with_zeros(cluster, "stragglers.slow_host_share_ratio")
    if not setting.stragglers:
        cluster = _with_zeros(cluster, "stragglers.slow_host_share_ratio", "stragglers.rank_sigma_ratio")
    if (setting.attention_ratio, setting.clock_ratio, setting.memory_ratio) != ((1.0, 1.0), 1.0, 1.0) or (
        setting.blocking_launches
    ):
        cluster = replace(cluster, device=_device(setting))
    return cluster


def _with_zeros(cluster: Cluster, *keys: str) -> Cluster:
    """With those numbers 0: without the hosts that are slow for the whole run, or with ranks that are all alike."""
    zeros = {key: replace(cluster.number(key), value=0.0) for key in keys}
    return replace(cluster, numbers={**cluster.numbers, **zeros})


@dataclass(frozen=True)
class _OlderAttention(FusedAttention):
    """Kernels that take longer than those that were measured: `ratio` times, forward and backward."""

    ratio: tuple[float, float] = (1.0, 1.0)

    def seconds(self, flops: Any, queries: Any, head_dim: int, backward: bool = False) -> Any:
        return super().seconds(flops * self.ratio[backward], queries, head_dim, backward)


def _device(setting: Setting) -> Device:
    device = _cluster(setting.cluster).device
    if setting.blocking_launches:
        gap = replace(device.number("kernel_gap_s"), value=device.host_launch_s * setting.software.host_factor)
        device = replace(device, numbers={**device.numbers, "kernel_gap_s": gap})
    forward, backward = (ratio / setting.clock_ratio for ratio in setting.attention_ratio)
    older = {
        form: _OlderAttention(
            **{each.name: getattr(curves, each.name) for each in fields(curves)}, ratio=(forward, backward)
        )
        for form, curves in device.attentions.items()
    }
    gemms = {form: _slower(gemm, setting.clock_ratio) for form, gemm in device.gemms.items()}
    stream = replace(device.stream, bytes_per_s=device.stream.bytes_per_s * setting.memory_ratio)
    return replace(device, attentions=older, gemms=gemms, stream=stream)


def _slower(gemm: TileGemm | TableGemm, clock_ratio: float) -> TileGemm | TableGemm:
    if isinstance(gemm, TableGemm) or clock_ratio == 1:
        return gemm
    return replace(gemm, tiles=tuple(replace(tile, share=tile.share * clock_ratio) for tile in gemm.tiles))


@lru_cache(maxsize=32)
def _cluster(name_or_path: str) -> Cluster:
    return load_cluster(name_or_path)


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple if multiple else rows
