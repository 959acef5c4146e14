"""What the published tables leave open, and what is assumed instead: once, before the first comparison.

Each table has a `Setting`; its alternatives are what else each open choice could be, so that their spread can be shown
beside the error. Nothing here, and no number of the hardware descriptions, is fitted to a row that judges.

Two choices were made otherwise before the first comparison, and corrected after it, since the sources say otherwise.
Megatron-LM in MegaScale's tables was taken to have FlashAttention and to compute nothing again: that publication has
FlashAttention-2 among what it adds (section 3.3, table 3), so the baseline is now as Megatron-LM's own publication ran
it, with attention computed again. vTrain's runs on one host were taken to keep all activations on the last stage, as
its simulator does: its files of settings say ``use_checkpoint`` for every run. What was chosen first, or the nearest
to it, stands among the alternatives.

The tables of `LATER` were collected when the planner was done; what they leave open was written down before any of them
was predicted. No number of the plain model was chosen with them in view; what is learnt from them, and how that is
judged, is in `left_out`. What is known of each run comes from the source of its table; the rest is assumed here, as by
whoever would predict such a run before it is made. Choices that were corrected after the first comparison, since the
sources say otherwise; what was chosen first stands among the alternatives, where one field can say it:

- MPT's attention is Triton's (attn_impl of its files of settings) and InternLM's flash-attn 1: kernels of the first
  FlashAttention, where the device's curves are of the second (A100) or third (H100).
- torchtitan at the end of 2024 calls torch's attention, FlashAttention-2, on H100 too; those H100 have 500 W and
  2.4 TB/s; its selective op makes every second product again (first taken for what is elementwise).
- FSDP turns whole gradients into fp32 before it reduces them, but for LLM Foundry's benchmarks; torch's checkpoint
  stops before a layer's last product.
- BLOOM ran with CUDA_LAUNCH_BLOCKING=1, for it hung without (its source, and tr11-176B-ml.slurm beside it).

Programs that `--software` does not offer (`FOUNDRY`, `INTERNEVO` ...) are variants of those that it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.optim.config import Kind as Optimizer
from phalanx.plan.software import (
    FSDP2,
    FSDP2_COMPILED,
    MEGASCALE,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2023,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MIXED_PRECISION,
)
from phalanx.plan.types import Overlap, Precision, Recompute, Software

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """How a table's rows were run, as far as its columns do not say."""

    table: str
    title: str
    cluster: str
    software: Software
    precision: Precision
    micro_batch: int = 1  # where a row has none
    recompute: Recompute = "none"  # where a row has none; ``selective`` of a row is attention alone (arXiv 2205.05198)
    sequence_parallel: bool = True
    zero: int = 0  # of the data-parallel ranks
    block: str = "serial"
    window: int = 0  # keys that all layers see; 0: all
    optimizer: Optimizer = "adamw"
    tensor_overlap: Overlap = "none"
    tensor_chunks: int = 4
    bucket_bytes: int = 0
    pad_vocab: int = 0  # rows of the vocabulary are padded to a multiple of this times the tensor-parallel ranks
    slow_hosts: bool = True  # those that the cluster's file has were among the hosts; else they had been removed
    model: Mapping[str, object] = field(default_factory=dict)  # fields of the model that a row has no column for
    # How much longer than the device's curves say the program's attention takes, forward and backward: older kernels
    # than those that the curves are of.
    attention_ratio: tuple[float, float] = (1.0, 1.0)
    # Clock under lasting load over that of the described device, where power was limited otherwise.
    clock_ratio: float = 1.0
    memory_ratio: float = 1.0  # rate of the memory over that of the described device
    blocking_launches: bool = False  # the host waits for the end of each kernel before it launches the next one
    publication: str = ""  # of tables that were left out: those with the same share program and machines
    named: Software | None = None  # of the programs that a user can name the nearest one; None: `software`
    stragglers: bool = True  # ranks are unequal as the cluster's file says; else all are alike
    assumed: Mapping[str, str] = field(default_factory=dict)  # which of these are assumed, and why as they are
    # What else each open choice could be, one at a time.
    alternatives: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # Of these the ones that were decided after a first comparison: a table's error is never reported without theirs.
    after_comparing: tuple[str, ...] = ()

    def as_named(self) -> Setting:
        """As a user says it, who can name a program and a cluster, and knows of no older kernels nor lower clocks."""
        return replace(
            self,
            software=self.named or self.software,
            attention_ratio=(1.0, 1.0),
            clock_ratio=1.0,
            memory_ratio=1.0,
            blocking_launches=False,
        )


MEGATRON = Setting(
    table="megascale_table2_megatron",
    title="MegaScale, table 2: Megatron-LM",
    cluster="megascale",
    software=MEGATRON_2023,
    precision="bf16",
    recompute="attention",
    zero=1,
    assumed={
        "micro_batch": "1, as Megatron-LM's own 175B runs (arXiv 2205.05198, table 3)",
        "recompute": "attention, as in the same table; without, written scores do not fit",
        "attention": "written scores: taken after the first comparison, which had FlashAttention",
        "sequence_parallel": "yes, as in the same table",
        "software": "gradients summed and reduced in fp32, Megatron-LM's default with bf16",
        "dropout": "0.1, Megatron-LM's default",
        "slow_hosts": "the half per cent that is 10 % slower (section 5) had not been removed",
        "stragglers": "that ranks are unequal came after the first comparison, where everything was too fast",
    },
    alternatives={
        "micro_batch": (2,),
        "recompute": ("full",),
        "sequence_parallel": (False,),
        "slow_hosts": (False,),
        "stragglers": (False,),
        "software": (replace(MEGATRON_2023, name="megatron-lm-2023 with FlashAttention", fused_attention=True),),
    },
    after_comparing=("software", "stragglers"),
)

MEGASCALE_OWN = replace(
    MEGATRON,
    table="megascale_table2_megascale",
    title="MegaScale, table 2: MegaScale",
    software=MEGASCALE,
    recompute="none",
    block="parallel",
    window=768,
    optimizer="lamb",
    tensor_overlap="chunked",
    assumed={
        **{name: why for name, why in MEGATRON.assumed.items() if name != "attention"},
        "recompute": "none: with FlashAttention and sequence parallelism all activations fit into 80 GB",
        "window": "768: the published MFU counts 40 % fewer FLOPs of attention than 2,048 keys would have",
        "tensor_chunks": "4",
    },
    alternatives={
        "micro_batch": (2,),
        "window": (256, 1024),
        "tensor_chunks": (2, 8),
        "slow_hosts": (False,),
        "stragglers": (False,),
    },
    after_comparing=("stragglers",),
)

VTRAIN_MULTI = Setting(
    table="vtrain_multi_node",
    title="vTrain, several hosts",
    cluster=str(_FOLDER / "vtrain.toml"),
    software=MEGATRON_DEEPSPEED,
    precision="fp16",
    recompute="full",
    sequence_parallel=False,
    pad_vocab=128,
    assumed={
        "recompute": "full: use_checkpoint in config/validation of the same repository",
        "software": "as Megatron-LM in 2021, with dropout and without overlap",
    },
    alternatives={"sequence_parallel": (True,)},
)

SETTINGS: tuple[Setting, ...] = (
    MEGATRON,
    MEGASCALE_OWN,
    replace(
        MEGATRON,
        table="megascale_figure9_megatron",
        title="MegaScale, figure 9: Megatron-LM, 530B",
        alternatives={},
        after_comparing=(),
    ),
    replace(
        MEGASCALE_OWN,
        table="megascale_figure9_megascale",
        title="MegaScale, figure 9: MegaScale, 530B",
        alternatives={},
    ),
    Setting(
        table="korthikanti_table5",
        title="Korthikanti et al., table 5",
        cluster="selene",
        software=MEGATRON_2022,
        precision="fp16",
    ),
    Setting(
        table="narayanan_table1",
        title="Narayanan et al. (SC21), table 1",
        cluster="selene",
        software=MEGATRON_2021,
        precision="fp16",
        sequence_parallel=False,
    ),
    VTRAIN_MULTI,
    replace(
        VTRAIN_MULTI,
        table="vtrain_single_node",
        title="vTrain, one host",
        alternatives={"recompute": ("none",)},
    ),
)

MEGATRON_CORE_BF16 = replace(
    # NeMo's Megatron Core with grad_sync_dtype bf16, which its buffer of summed gradients has too.
    MEGATRON_CORE,
    name="megatron-core, gradients in bf16",
    gradient_bytes=2,
    reduce_bytes=2,
)

FOUNDRY = replace(
    # mosaicml/llm-foundry: eager, but for flash-attn's fused cross-entropy; attention is triton's; q, k and v are one
    # product. Its benchmarks run FSDP with mixed precision PURE (scripts/train/benchmarking/submit_benchmarks.py):
    # gradients are reduced in bf16.
    FSDP2,
    name="llm-foundry",
    merged_projections=True,
    fused_loss=True,
    torch_loss=False,
    fused_gradients=True,
    reduce_bytes=2,
)

INTERNEVO = replace(
    # InternLM's trainer: flash-attn's fused layers, rotation and loss; bf16 gradients summed and reduced in bf16 beside
    # the passes (configs/7B_sft.py: overlap_sync_grad, overlap_sync_param), fp32 masters.
    MIXED_PRECISION,
    name="internevo",
    fused_elementwise=True,
    stops_early=False,
    tensor_backward_overlap=True,
)

LLAMA = {
    "gated": True,
    "position": "rotary",
    "norm": "rms",
    "bias": "none",
    "dropout": False,
    "attention_dropout": False,
    "tie_embeddings": False,
}
_NEMOTRON = {**LLAMA, "gated": False, "norm": "layer"}

_FLASH_1 = (2.0, 2.0)  # flashAttention over FlashAttention-2, on A100 (arXiv 2307.08691, abstract)
_FLASH_2 = (642 / 355, 552 / 337)
"""FlashAttention-2 over the curve of H100 at 32,768, 355 TFLOP/s forward and 337 backward (Dao-AILab/flash-attention
issue 1051)."""
_TRITON = (1.4, 2.0)
"""FlashAttention in Triton over FlashAttention-2, on A100: 1.3 to 1.5 forward, about 2 backward (arXiv 2307.08691,
section 4.1)."""
_TRITON_ON_H100 = (_TRITON[0] * _FLASH_2[0], _TRITON[1] * _FLASH_2[1])
_FLASH_1_ON_H100 = (_FLASH_1[0] * _FLASH_2[0], _FLASH_1[1] * _FLASH_2[1])

_POWER_CLOCK = (500 / 700) ** (1 / 3)
"""Clock of an H100 at 500 W over one at 700: power goes with the clock, and with the square of a voltage that follows
it (assumed)."""

NEMO_GPT3 = Setting(
    table="nemo_gpt3_175b",
    publication="dgxc",
    title="NVIDIA DGX Cloud: GPT-3 175B on H100",
    cluster="h100_400g",
    software=replace(MEGATRON_CORE_BF16, fused_loss=False),
    named=MEGATRON_CORE,
    precision="bf16",
    zero=1,
    tensor_overlap="chunked",
    bucket_bytes=220_000_000,
    assumed={
        "cluster": "hosts as NVIDIA's DGX H100",
        "tensor_overlap": "ub_tp_comm_overlap of gpt3_175b_hydra.yaml, rings and pipelines of four",
    },
    alternatives={"tensor_overlap": ("none", "fused"), "slow_hosts": (False,)},
)

NEMO_LLAMA_8B = Setting(
    table="nemo_llama31_8b",
    publication="dgxc",
    title="NVIDIA DGX Cloud: Llama 3.1 8B on H100",
    cluster="h100_400g",
    software=MEGATRON_CORE,
    precision="bf16",
    zero=1,
    bucket_bytes=125_000_000,
    model=LLAMA,
    assumed={"cluster": "hosts as NVIDIA's DGX H100", "software": "gradients summed and reduced in fp32"},
)

NEMO_LLAMA = replace(
    NEMO_LLAMA_8B,
    table="nemo_llama31_large",
    title="NVIDIA DGX Cloud: Llama 3.1 70B and 405B on H100",
    tensor_overlap="chunked",
    assumed={**NEMO_LLAMA_8B.assumed, "tensor_overlap": "ub_tp_comm_overlap of llama3_1_70b.yaml, in four chunks"},
)

FOUNDRY_H100 = Setting(
    table="foundry_h100",
    publication="foundry",
    title="MosaicML LLM Foundry: MPT on H100",
    cluster="h100_400g",
    software=FOUNDRY,
    named=FSDP2,
    precision="bf16",
    sequence_parallel=False,
    zero=3,
    model={"dropout": False, "attention_dropout": False},
    attention_ratio=_TRITON_ON_H100,
    assumed={
        "cluster": "network of NVIDIA's DGX H100",
        "software": "loss fused, nothing else",
        "attention": "triton's: half as long again as FlashAttention-2 forward, twice as long backward",
    },
    alternatives={
        "attention_ratio": ((1.0, 1.0), _FLASH_1_ON_H100),
        "software": (replace(FOUNDRY, name="gradients made fp32", fused_gradients=False, reduce_bytes=4),),
    },
)

TITAN_A100 = Setting(
    table="torchtitan_a100",
    publication="torchtitan",
    title="torchtitan on A100",
    cluster="selene",
    software=FSDP2,
    precision="bf16",
    sequence_parallel=False,
    zero=3,
    model=LLAMA,
    assumed={
        "cluster": "network of NVIDIA's DGX A100",
        "software": "without torch.compile: not named in the table",
    },
    alternatives={"software": (replace(FSDP2, name="gradients not made fp32", fused_gradients=True),)},
)

TITAN_H100 = replace(
    TITAN_A100,
    table="torchtitan_h100",
    title="torchtitan on H100, compiled",
    cluster="h100_400g",
    software=FSDP2_COMPILED,
    attention_ratio=_FLASH_2,
    clock_ratio=_POWER_CLOCK,
    memory_ratio=2.4 / 3.35,
    assumed={
        "cluster": "network of NVIDIA's DGX H100",
        "clock_ratio": "500 W and 2.4 TB/s, not 700 and 3.35 (its source): clock by the cube root of power",
    },
    alternatives={
        "attention_ratio": ((1.0, 1.0),),
        "clock_ratio": (1.0,),
        "memory_ratio": (1.0,),
        "software": (replace(FSDP2_COMPILED, name="gradients not made fp32", fused_gradients=True),),
    },
)

BLOOM_FP16 = Setting(
    table="bloom_fp16",
    publication="bloom",
    title="BLOOM's trials, fp16",
    cluster=str(_FOLDER / "jeanzay.toml"),
    software=MEGATRON_DEEPSPEED,
    precision="fp16",
    recompute="full",
    sequence_parallel=False,
    zero=1,
    blocking_launches=True,
    model={"position": "none"},
    assumed={"software": "as Megatron-LM in 2021, with dropout and without overlap, as vTrain's"},
    alternatives={"blocking_launches": (False,)},
)

LATER: tuple[Setting, ...] = (
    NEMO_GPT3,
    NEMO_LLAMA_8B,
    NEMO_LLAMA,
    replace(
        NEMO_LLAMA,
        table="nemo_nemotron4_15b",
        title="NVIDIA DGX Cloud: Nemotron-4 15B on H100",
        bucket_bytes=100_000_000,
        model=_NEMOTRON,
        assumed={**NEMO_LLAMA_8B.assumed, "tensor_overlap": "ub_tp_comm_overlap of nemotron4-15b-synth.yaml"},
    ),
    replace(
        NEMO_LLAMA_8B,
        table="nemo_nemotron4_340b",
        title="NVIDIA DGX Cloud: Nemotron-4 340B on H100",
        software=replace(MEGATRON_CORE_BF16, pipeline_overlap=False),
        named=MEGATRON_CORE,
        recompute="attention",
        bucket_bytes=50_000_000,
        model=_NEMOTRON,
        assumed={"cluster": "hosts as NVIDIA's DGX H100"},
    ),
    Setting(
        table="llama3_405b",
        publication="llama3",
        title="Llama 3 405B",
        cluster="h100_400g",
        software=replace(MEGATRON_CORE, name="llama-3's trainer", even_stages=False),
        named=MEGATRON_CORE,
        precision="bf16",
        zero=2,
        model=LLAMA,
        assumed={
            "micro_batch": "1",
            "chunks": "4 of two layers, one layer fewer at both ends",
            "software": "as Megatron Core; gradients in fp32 (section 3.3.2)",
            "tensor_overlap": "none: not named among what was done",
            "flops": "attention over all pairs counts, as torchtitan counts it",
        },
        alternatives={"tensor_overlap": ("chunked",)},
    ),
    FOUNDRY_H100,
    replace(
        FOUNDRY_H100,
        table="foundry_a100",
        title="MosaicML LLM Foundry: MPT on A100",
        cluster="megascale",
        attention_ratio=_TRITON,
        assumed={**FOUNDRY_H100.assumed, "cluster": "1,600 Gb/s RoCE a host, as MegaScale's"},
        alternatives={**FOUNDRY_H100.alternatives, "attention_ratio": ((1.0, 1.0), _FLASH_1)},
    ),
    TITAN_A100,
    TITAN_H100,
    replace(
        TITAN_H100,
        table="torchtitan_h100_eager",
        title="torchtitan on H100, not compiled",
        software=FSDP2,
        alternatives={**TITAN_H100.alternatives, **TITAN_A100.alternatives},
    ),
    Setting(
        table="internlm_7b",
        publication="internlm",
        title="InternLM 7B on A100",
        cluster=str(_FOLDER / "internlm.toml"),
        software=INTERNEVO,
        precision="bf16",
        sequence_parallel=False,
        zero=1,
        bucket_bytes=512_000_000,
        model=LLAMA,
        attention_ratio=_FLASH_1,
        assumed={"attention": "flash-attn 1.0.5 (doc/en/install.md), half as fast as FlashAttention-2"},
        alternatives={"attention_ratio": ((1.0, 1.0),)},
    ),
    BLOOM_FP16,
    replace(
        BLOOM_FP16,
        table="bloom_bf16",
        title="BLOOM's trials, bf16",
        software=replace(MEGATRON_DEEPSPEED, gradient_bytes=4, reduce_bytes=4),
        named=MEGATRON_DEEPSPEED,
        precision="bf16",
        assumed={**BLOOM_FP16.assumed, "gradients": "summed and reduced in fp32"},
    ),
    Setting(
        table="zero_bubble_1f1b",
        publication="zero_bubble",
        title="Zero-bubble pipelines: their 1F1B baseline",
        cluster="selene",
        software=replace(MEGATRON_2022, even_stages=False),
        named=MEGATRON_2022,
        precision="fp16",
        sequence_parallel=False,
        assumed={
            "cluster": "network of NVIDIA's DGX A100",
            "vocabulary": "50,304: that of GPT-2, padded",
            "software": "Megatron-LM with written scores, kept: the published memory holds them",
        },
        alternatives={"software": (replace(MEGATRON_2022, name="as many layers on all stages"),)},
    ),
)
