"""The layouts of the parity table: every axis alone, pairs, three at once, over 1, 2, 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from support.parity.task import Case

PARALLEL = {"block": "parallel"}
WINDOW = {"attention": ("window", "window", "full"), "window": 5, "kv_heads": 2}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2, "attention_backend": "math"}
TIED = {"tie_embeddings": True}
GPT = {"bias": "all", "norm": "layer", "activation": "gelu", "position": "learned"}
EIGHT = {"layers": 8}

CASES: dict[str, Case] = {
    # 1 rank
    "one rank": Case({}, DROPOUT, micro_batch=2, recompute="full"),
    # 2 ranks
    "dp2": Case({"replicate": 2}),
    "fs2 zero 1": Case({"shard": 2}, GPT),
    "fs2 zero 2": Case({"shard": 2, "zero": 2}, PARALLEL | DROPOUT),
    "fs2 zero 3": Case({"shard": 2, "zero": 3}, TIED),
    "tp2": Case({"tensor": 2}, WINDOW, micro_batch=2),
    "tp2 chunked, serial": Case({"tensor": 2, "tensor_overlap": "chunked"}, DROPOUT, micro_batch=2),
    "tp2 chunked, parallel": Case({"tensor": 2, "tensor_overlap": "chunked"}, PARALLEL | TIED, micro_batch=2),
    "cp2 ring": Case({"context": 2}, WINDOW),
    "cp2 all-to-all": Case({"context": 2, "context_method": "all_to_all"}, DROPOUT),
    "pp2 1f1b": Case({"pipeline": 2}, DROPOUT),
    "pp2 interleaved": Case({"pipeline": 2, "schedule": "interleaved_1f1b"}, TIED),
    "pp2 interleaved, 4 chunks": Case({"pipeline": 2, "schedule": "interleaved_1f1b", "chunks": 4}, EIGHT | PARALLEL),
    "pp2 zero bubble": Case({"pipeline": 2, "schedule": "interleaved_zero_bubble"}, PARALLEL),
    "pp2 zbv": Case({"pipeline": 2, "schedule": "zbv"}, TIED | DROPOUT),
    # 4 ranks
    "dp2 fs2 zero 1": Case({"replicate": 2, "shard": 2}, WINDOW),
    "dp2 fs2 zero 2": Case({"replicate": 2, "shard": 2, "zero": 2}, TIED),
    "dp2 fs2 zero 3": Case({"replicate": 2, "shard": 2, "zero": 3}, DROPOUT, recompute="full"),
    "fs4 zero 2": Case({"shard": 4, "zero": 2}, masked=False),
    "tp4": Case({"tensor": 4}, PARALLEL | DROPOUT, micro_batch=4),
    "cp4 ring": Case({"context": 4}, DROPOUT | {"kv_heads": 2}),
    "cp4 all-to-all": Case({"context": 4, "context_method": "all_to_all"}, {"attention": ("window",), "window": 5}),
    "pp4 1f1b": Case({"pipeline": 4}, TIED | DROPOUT),
    "pp4 zero bubble": Case({"pipeline": 4, "schedule": "interleaved_zero_bubble"}, EIGHT),
    "pp2 dp2": Case({"pipeline": 2, "replicate": 2}, GPT),
    "pp2 fs2 zbv, zero 3": Case({"pipeline": 2, "shard": 2, "zero": 3, "schedule": "zbv"}, TIED),
    "pp2 cp2": Case({"pipeline": 2, "context": 2}, WINDOW | DROPOUT),
    "pp2 tp2 interleaved": Case({"pipeline": 2, "tensor": 2, "schedule": "interleaved_1f1b"}, PARALLEL),
    "pp2 tp2 zbv": Case({"pipeline": 2, "tensor": 2, "schedule": "zbv"}, TIED, recompute="full"),
    "dp2 tp2": Case({"replicate": 2, "tensor": 2}, GPT | DROPOUT, micro_batch=2),
    "fs2 tp2 zero 2": Case({"shard": 2, "tensor": 2, "zero": 2}, PARALLEL | WINDOW, micro_batch=2),
    "dp2 cp2": Case({"replicate": 2, "context": 2}, TIED),
    "fs2 cp2 zero 1": Case({"shard": 2, "context": 2}, DROPOUT),
    "cp2 tp2": Case({"context": 2, "tensor": 2}, PARALLEL | WINDOW, micro_batch=4),
    # 8 ranks
    "fs8 zero 3": Case({"shard": 8, "zero": 3}, PARALLEL),
    "pp2 fs2 tp2": Case({"pipeline": 2, "shard": 2, "tensor": 2}, PARALLEL | WINDOW),
    "pp2 dp2 cp2": Case({"pipeline": 2, "replicate": 2, "context": 2}, TIED),
    "fs2 cp2 tp2 zero 3": Case({"shard": 2, "context": 2, "tensor": 2, "zero": 3}, DROPOUT, micro_batch=2),
    "pp2 cp2 tp2 zbv": Case({"pipeline": 2, "context": 2, "tensor": 2, "schedule": "zbv"}, TIED | DROPOUT),
    "pp2 fs2 tp2 zero bubble": Case(
        {"pipeline": 2, "shard": 2, "tensor": 2, "schedule": "interleaved_zero_bubble"}, GPT
    ),
    "dp2 fs2 tp2 zero 2, chunked": Case(
        {"replicate": 2, "shard": 2, "tensor": 2, "zero": 2, "tensor_overlap": "chunked"}, DROPOUT
    ),
}

REAL = ("fs2 zero 2", "pp2 zbv", "cp2 tp2", "pp2 fs2 zbv, zero 3", "pp2 fs2 tp2")
"""Those that run as real processes too."""

QUICK = ("dp2", "tp2", "pp2 zbv")

_ADAPTIVE = (("adamw", 1e-3), ("lamb", 1e-3), ("came", 1e-4))


def ways(case: Case, number: int, steps: int) -> Iterator[Case]:
    """What layout `number` is run with: SGD, and one of the others in turn; one of the two clipped, in turn.

    The norm of these gradients is above the limit of clipping in every step. Learning rate 1e-3, but for CAME 1e-4:
    at 1e-3 it multiplies rounding by ten or so in each step on so small a model (one process that takes a batch in
    micro-batches of one, against the same process that takes it whole, is 2000 % apart in the norm after 20 steps, and
    3e-7 at 1e-4).
    """
    limits = (0.5, 0.0) if number % 2 else (0.0, 0.5)
    for (name, lr), clip_norm in zip((("sgd", 1e-3), _ADAPTIVE[number % 3]), limits, strict=True):
        yield replace(case, optim={"name": name, "lr": lr, "clip_norm": clip_norm}, steps=steps)
