"""Small runs whose memory is predicted and measured: what is trained, and over which layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.plan.jobs import make_job, make_strategy, software_of
from phalanx.plan.types import Job, Strategy
from phalanx.train.config import RunConfig
from phalanx.train.derived.memory_fit import first_level
from phalanx.train.derived.run_numbers import complete_model

VOCABULARY = 500
_MODEL = {"layers": 4, "hidden": 128, "heads": 4, "vocab_multiple": 64}
_TRAIN = {"steps": 2, "global_batch": 8, "micro_batch": 2, "device": "cpu", "precision": "fp32", "threads": 1}


@dataclass(frozen=True)
class Layout:
    """One run.

    Attributes:
        name: in the table.
        documents: attention stops at their borders.
        quick: one of the few that are run where time is short.
    """

    name: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 256
    documents: bool = True
    quick: bool = False

    @property
    def config(self) -> RunConfig:
        """The run's config, as `phalanx train` would read it."""
        return RunConfig.model_validate(
            {
                "data": {"sequence_length": self.sequence, "document_mask": self.documents},
                "model": _MODEL | dict(self.model),
                "optim": {"name": "adamw", "muon": {}} | dict(self.optim),
                "train": _TRAIN | dict(self.train),
                "parallel": dict(self.parallel),
            }
        )

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.config.parallel.layout.world_size

    def planned(self) -> tuple[Job, Strategy]:
        """What the cost model is asked about."""
        config = self.config
        model = complete_model(config, VOCABULARY)
        precision = "bf16" if config.train.precision == "bf16" else "fp32"
        software = software_of(
            model, config.parallel, precision, compiled=False, on_cpu=True, documents=config.data.document_mask
        )
        job = make_job(
            model,
            sequence=self.sequence,
            global_batch=config.train.global_batch,
            precision=precision,
            optimizer=config.optim.name,
            software=software,
        )
        micro_batch = config.train.micro_batch
        return job, make_strategy(config.parallel, micro_batch=micro_batch, recompute=first_level(config))


GELU = {"activation": "gelu", "norm": "layer", "bias": "all", "position": "learned", "tie_embeddings": True}
PARALLEL = {"block": "parallel"}
WINDOWS = {"attention": ("window", "full"), "window": 64}

LAYOUTS = (
    Layout("1 process", quick=True),
    Layout("1, attention across documents", documents=False),
    Layout("1, GELU, biases, tied, learned positions", model=GELU, quick=True),
    Layout("1, dropout", model=GELU | {"dropout": 0.1}),
    Layout("1, attention dropout", model=GELU | {"attention_dropout": 0.1, "attention_backend": "math"}),
    Layout("1, parallel block", model=PARALLEL),
    Layout("1, merged projections", model=PARALLEL | {"merged_projections": True}),
    Layout("1, windows, grouped heads", model=WINDOWS | {"kv_heads": 2}),
    Layout("1, norms of q and k", model={"qk_norm": True}),
    Layout("1, one long sequence", sequence=1536, train={"global_batch": 2, "micro_batch": 1}),
    Layout("1, windows across documents", model=WINDOWS, documents=False),
    Layout("1, recompute selective", train={"recompute": "selective"}, quick=True),
    Layout("1, recompute mlp", train={"recompute": "mlp"}, quick=True),
    Layout(
        "1, recompute mlp, merged projections",
        model=PARALLEL | {"merged_projections": True},
        train={"recompute": "mlp"},
    ),
    Layout("1, recompute full", train={"recompute": "full"}),
    Layout("1, one micro-batch", train={"micro_batch": 8}),
    Layout("1, one small micro-batch", train={"micro_batch": 1, "global_batch": 1, "recompute": "full"}),
    Layout("1, LAMB", optim={"name": "lamb"}),
    Layout("1, CAME", optim={"name": "came"}),
    Layout("1, Muon", optim={"name": "muon"}),
    Layout("1, bf16", train={"precision": "bf16", "global_batch": 4, "micro_batch": 1}),
    Layout("replicate 2", {"replicate": 2}),
    Layout("shard 2, ZeRO-1", {"shard": 2}),
    Layout("shard 2, ZeRO-2", {"shard": 2, "zero": 2}, quick=True),
    Layout("shard 2, ZeRO-3", {"shard": 2, "zero": 3}),
    Layout("shard 2, ZeRO-1, bf16", {"shard": 2}, train={"precision": "bf16", "global_batch": 4, "micro_batch": 1}),
    Layout("shard 2, ZeRO-3, CAME", {"shard": 2, "zero": 3}, optim={"name": "came"}),
    Layout("tensor 2", {"tensor": 2}, quick=True),
    Layout("tensor 2, parallel block", {"tensor": 2}, model=PARALLEL),
    Layout("tensor 2, GELU, biases", {"tensor": 2}, model=GELU),
    Layout("tensor 2, recompute selective", {"tensor": 2}, train={"recompute": "selective"}),
    Layout("tensor 2, recompute mlp", {"tensor": 2}, train={"recompute": "mlp"}),
    Layout("tensor 2, parallel block, recompute mlp", {"tensor": 2}, model=PARALLEL, train={"recompute": "mlp"}),
    Layout("context 2, ring", {"context": 2}),
    Layout("context 2, ring, windows", {"context": 2}, model={"attention": ("window",), "window": 64}),
    Layout("context 2, ring, across documents", {"context": 2}, documents=False),
    Layout("context 2, all to all", {"context": 2, "context_method": "all_to_all"}),
    Layout("pipeline 2, 1F1B", {"pipeline": 2}, quick=True),
    Layout("pipeline 2, 1F1B, recompute full", {"pipeline": 2}, train={"recompute": "full"}),
    Layout("pipeline 2, 1F1B, recompute selective", {"pipeline": 2}, train={"recompute": "selective"}),
    Layout("pipeline 2, interleaved", {"pipeline": 2, "schedule": "interleaved_1f1b"}),
    Layout("pipeline 2, zero bubble", {"pipeline": 2, "schedule": "interleaved_zero_bubble"}),
    Layout("pipeline 2, V", {"pipeline": 2, "schedule": "zbv"}),
    Layout("pipeline 2 x shard 2, ZeRO-2", {"pipeline": 2, "shard": 2, "zero": 2}, train={"micro_batch": 1}),
    Layout("pipeline 2 x tensor 2, V", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}),
    Layout("pipeline 4, 1F1B, tied", {"pipeline": 4}, model={"tie_embeddings": True, "layers": 8}),
    Layout("tensor 2 x shard 2, ZeRO-3, LAMB", {"tensor": 2, "shard": 2, "zero": 3}, optim={"name": "lamb"}),
    Layout("tensor 2 x context 2, parallel block", {"tensor": 2, "context": 2}, model=PARALLEL),
)
