"""What the published tables leave open, and what is assumed instead: once, before the first comparison.

Each table has a `Setting`; `ALTERNATIVES` are what else each open choice could be, so that the spread over them can be
shown beside the error. Nothing here, and no number of the hardware descriptions, is fitted to a row that judges.

Two choices were made otherwise before the first comparison, and corrected after it, since the sources say otherwise.
Megatron-LM in MegaScale's tables was taken to have FlashAttention and to compute nothing again: that publication has
FlashAttention-2 among what it adds (section 3.3, table 3), so the baseline is now as Megatron-LM's own publication ran
it, with attention computed again. vTrain's runs on one host were taken to keep all activations on the last stage, as
its simulator does: its files of settings say ``use_checkpoint`` for every run. What was chosen first, or the nearest
to it, stands among the alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.optim.config import Kind as Optimizer
from phalanx.plan.software import MEGASCALE, MEGATRON_2021, MEGATRON_2022, MEGATRON_2023, MEGATRON_DEEPSPEED
from phalanx.plan.types import Overlap, Precision, Recompute, Software

VTRAIN = str(Path(__file__).parent / "vtrain.toml")


@dataclass(frozen=True)
class Setting:
    """How a table's rows were run, as far as its columns do not say.

    Attributes:
        table: name of the CSV file without its ending.
        cluster: name or file of a description of the hardware.
        micro_batch: where a row has none.
        recompute: where a row has none; ``selective`` of a row is attention alone (arXiv 2205.05198).
        zero: of the data-parallel ranks.
        window: keys that all layers see; 0: all.
        pad_vocab: rows of the vocabulary are padded to a multiple of this times the tensor-parallel ranks.
        model: fields of the model that a row has no column for.
        attention_ratio: how much longer than the device's curves say the program's attention takes, forward and
            backward: older kernels than those that the curves are of.
        clock_ratio: clock under lasting load over that of the described device, where power was limited otherwise.
        memory_ratio: rate of the memory over that of the described device.
        blocking_launches: the host waits for the end of each kernel before it launches the next one.
        slow_hosts: those that the cluster's file has were among the hosts; else they had been removed.
        publication: of tables that were left out: those with the same share program and machines.
        stragglers: ranks are unequal as the cluster's file says; else all are alike.
        assumed: which of these are assumed, and why as they are.
    """

    table: str
    title: str
    cluster: str
    software: Software
    precision: Precision
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    zero: int = 0
    block: str = "serial"
    window: int = 0
    optimizer: Optimizer = "adamw"
    tensor_overlap: Overlap = "none"
    tensor_chunks: int = 4
    bucket_bytes: int = 0
    pad_vocab: int = 0
    slow_hosts: bool = True
    model: Mapping[str, object] = field(default_factory=dict)
    attention_ratio: tuple[float, float] = (1.0, 1.0)
    clock_ratio: float = 1.0
    memory_ratio: float = 1.0
    blocking_launches: bool = False
    publication: str = ""
    stragglers: bool = True
    assumed: Mapping[str, str] = field(default_factory=dict)


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
)

KORTHIKANTI = Setting(
    table="korthikanti_table5",
    title="Korthikanti et al., table 5",
    cluster="selene",
    software=MEGATRON_2022,
    precision="fp16",
)

NARAYANAN = Setting(
    table="narayanan_table1",
    title="Narayanan et al. (SC21), table 1",
    cluster="selene",
    software=MEGATRON_2021,
    precision="fp16",
    sequence_parallel=False,
)

VTRAIN_MULTI = Setting(
    table="vtrain_multi_node",
    title="vTrain, several hosts",
    cluster=VTRAIN,
    software=MEGATRON_DEEPSPEED,
    precision="fp16",
    recompute="full",
    sequence_parallel=False,
    pad_vocab=128,
    assumed={
        "recompute": "full: use_checkpoint in config/validation of the same repository",
        "software": "as Megatron-LM in 2021, with dropout and without overlap",
    },
)

VTRAIN_SINGLE = replace(VTRAIN_MULTI, table="vtrain_single_node", title="vTrain, one host")

MEGATRON_530B = replace(MEGATRON, table="megascale_figure9_megatron", title="MegaScale, figure 9: Megatron-LM, 530B")
MEGASCALE_530B = replace(
    MEGASCALE_OWN, table="megascale_figure9_megascale", title="MegaScale, figure 9: MegaScale, 530B"
)

SETTINGS: tuple[Setting, ...] = (
    MEGATRON,
    MEGASCALE_OWN,
    MEGATRON_530B,
    MEGASCALE_530B,
    KORTHIKANTI,
    NARAYANAN,
    VTRAIN_MULTI,
    VTRAIN_SINGLE,
)

ALTERNATIVES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "megascale_table2_megatron": {
        "micro_batch": (2,),
        "recompute": ("full",),
        "sequence_parallel": (False,),
        "slow_hosts": (False,),
        "stragglers": (False,),
        "software": (replace(MEGATRON_2023, name="megatron-lm-2023 with FlashAttention", fused_attention=True),),
    },
    "megascale_table2_megascale": {
        "micro_batch": (2,),
        "window": (256, 1024),
        "tensor_chunks": (2, 8),
        "slow_hosts": (False,),
        "stragglers": (False,),
    },
    "vtrain_multi_node": {"sequence_parallel": (True,)},
    "vtrain_single_node": {"recompute": ("none",)},
}
"""What else the open choices could be, one at a time."""

AFTER_COMPARING: Mapping[str, tuple[str, ...]] = {
    "megascale_table2_megatron": ("software", "stragglers"),
    "megascale_table2_megascale": ("stragglers",),
}
"""Of these the ones that were decided after a first comparison: a table's error is never told without theirs."""
