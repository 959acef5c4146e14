"""From a published row to what `predict` takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, cast

from phalanx.plan.hardware.attention import FusedAttention
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device import Device
from phalanx.plan.hardware.gemm import TileGemm
from phalanx.plan.hardware.load import load_cluster
from phalanx.plan.hardware.table_gemm import TableGemm
from phalanx.plan.types import Job, Model, Residual, Strategy
from phalanx.plan.validate.assumptions import Setting
from phalanx.plan.validate.rows import RECOMPUTE, Row


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
        """Time of `flops` of one pass over `queries` positions."""
        return super().seconds(flops * self.ratio[backward], queries, head_dim, backward)


def _device(setting: Setting) -> Device:
    """The cluster's device as the table's program used it."""
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
    """The same products at another clock; what was measured size by size stays as it is."""
    if isinstance(gemm, TableGemm) or clock_ratio == 1:
        return gemm
    return replace(gemm, tiles=tuple(replace(tile, share=tile.share * clock_ratio) for tile in gemm.tiles))


@lru_cache(maxsize=32)
def _cluster(name_or_path: str) -> Cluster:
    return load_cluster(name_or_path)


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple if multiple else rows
