"""Programs whose steps can be predicted, beside our own: what their kernels fuse, keep and overlap.

Facts of each come from its publication or source, named here; what neither says is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.plan.types import Software

PHALANX = Software()

MIXED_PRECISION = Software(
    # All that is kept and sent has 16 bits, but for the optimizer's fp32 masters.
    name="mixed precision",
    residual_bytes=2,
    gradient_bytes=2,
    reduce_bytes=2,
    gather_bytes=2,
    sent_bytes=2,
    master_bytes=4,
    weight_bytes=2,
)

MEGATRON_2021 = replace(
    # arXiv 2104.04473: fp16 with fp32 masters, fused softmax, bias-GELU and bias-dropout-add (section 4.2), sends split
    # over tensor-parallel ranks and gathered (4.1); gradients in fp16, added by kernels of their own; nothing overlaps.
    MIXED_PRECISION,
    name="megatron-lm-2021",
    fused_attention=False,
    fused_elementwise=True,
    stops_early=False,  # its own checkpoint runs the whole layer again
    fused_loss=False,
    data_overlap=False,
    pipeline_overlap=False,
    even_stages=True,
)

MEGATRON_2022 = replace(
    # arXiv 2205.05198: as before, with sequence parallelism; weight gradients are summed in fp32 by the product, which
    # runs beside the sum of gradients of inputs (section 4.2.2).
    MEGATRON_2021,
    name="megatron-lm-2022",
    fused_gradients=True,
    tensor_backward_overlap=True,
    gradient_bytes=4,
    reduce_bytes=4,
)

MEGATRON_2023 = replace(
    # Commit 285068c8 of July 2023, with the distributed optimizer: gradients are reduced and weights gathered after the
    # last backward pass. arXiv 2402.15627 has among what MegaScale adds: batches made during the step (section 3.4),
    # and FlashAttention-2 (section 3.3), so attention writes its scores here.
    MEGATRON_2022,
    name="megatron-lm-2023",
    loader_hidden=False,
)

MEGASCALE = replace(
    # arXiv 2402.15627, section 3: FlashAttention-2; everything overlaps, data parallelism by model chunks; the next
    # batch is made while gradients are reduced.
    MEGATRON_2023,
    name="megascale",
    fused_attention=True,
    loader_hidden=True,
    data_overlap=True,
    first_gather_hidden=True,
    pipeline_overlap=True,
)

MEGATRON_DEEPSPEED = replace(
    # As Megatron-LM in 2021. The host needs 51 us for each kernel, not 5 as for a bare launch: so say 23 measured steps
    # of one host (hidden 1024, one sequence, no tensor or pipeline parallelism) that wait for nothing else; they judge
    # nothing (phalanx/plan/validate/tables/vtrain_host_calibration.csv).
    MEGATRON_2021,
    name="megatron-deepspeed",
    host_factor=10.2,
)

MEGATRON_CORE = replace(
    # NVIDIA NeMo 24.09 to 24.12 on Megatron Core (launcher_scripts/conf/training of NVIDIA/NeMo-Framework-Launcher):
    # cuDNN's fused attention, all fusions, cross_entropy_loss_fusion, gradients summed by the products in fp32;
    # gradients are reduced and weights gathered beside the passes (overlap_grad_sync, overlap_param_sync), messages
    # between stages too (overlap_p2p_comm). Its own checkpoint runs a whole layer again.
    MEGASCALE,
    name="megatron-core",
    fused_loss=True,
    first_gather_hidden=False,
)

FSDP2_COMPILED = replace(
    # PyTorch's fully sharded data parallelism, as torchtitan runs it: fp32 shards, weights gathered in bf16; after
    # every micro-batch whole bf16 gradients become fp32 and are divided before they are reduced onto the shard
    # (_reduce_grad in torch/distributed/fsdp/_runtime_utils.py; foreach_reduce of FSDP2), which moves as much as adding
    # them to fp32 sums. torch.compile fuses what is elementwise. Every projection is a product of its own; torch's
    # checkpoint stops early (set_checkpoint_early_stop, on by default).
    MIXED_PRECISION,
    name="fsdp2-compiled",
    torch_loss=True,  # torchtitan compiles blocks alone
    fused_elementwise=True,
    merged_projections=False,
    gradient_bytes=4,
    reduce_bytes=4,
    pipeline_overlap=False,
)

FSDP2 = replace(
    # The same without torch.compile: each operation is a kernel.
    FSDP2_COMPILED,
    name="fsdp2",
    fused_elementwise=False,
    fused_loss=False,
)

DEEPSPEED = replace(
    # ZeRO 1 and 2 of DeepSpeed around a model of single operations, as Hugging Face transformers has it; attention is
    # torch's fused one. bf16 gradients, summed and reduced in that (communication_data_type follows the type of
    # training), beside no pass: overlap_comm is off by default below stage 3; updated weights are gathered after the
    # step (allgather_partitions) (deepspeed/runtime/zero/config.py @1b88ac3). Checkpoints of transformers re-enter
    # autograd, and run the whole layer again.
    FSDP2,
    name="deepspeed",
    stops_early=False,
    gradient_bytes=2,
    reduce_bytes=2,
    data_overlap=False,
)

DEEPSPEED_ZERO3 = replace(
    # Stage 3, where overlap_comm is on by default: weights are fetched, and gradients reduced, beside the passes.
    DEEPSPEED,
    name="deepspeed-zero3",
    data_overlap=True,
)

SOFTWARE: Mapping[str, Software] = {
    each.name: each
    for each in (
        PHALANX,
        MEGATRON_CORE,
        FSDP2,
        FSDP2_COMPILED,
        DEEPSPEED,
        DEEPSPEED_ZERO3,
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_2023,
        MEGASCALE,
        MEGATRON_DEEPSPEED,
    )
}


LAYOUTS: Mapping[str, Mapping[str, tuple[int | str, ...]]] = {
    # Megatron-LM's distributed optimizer is ZeRO 1; papers of 2021 and 2022 train without context parallelism.
    **{
        name: {
            "zero": (1,),
            "schedule": ("1f1b", "interleaved_1f1b"),
            "context": (1,),
            "tensor_overlap": ("none",),
        }
        for name in (MEGATRON_2021.name, MEGATRON_2022.name, MEGATRON_2023.name, MEGATRON_DEEPSPEED.name)
    },
    MEGASCALE.name: {"zero": (1, 2), "schedule": ("1f1b", "interleaved_1f1b"), "context": (1,)},
    MEGATRON_CORE.name: {"zero": (1,), "schedule": ("1f1b", "interleaved_1f1b")},
    # fully_shard gathers weights again for the backward pass (3), or keeps them (2: reshard_after_forward=False).
    FSDP2.name: {"zero": (2, 3)},
    FSDP2_COMPILED.name: {"zero": (2, 3)},
    DEEPSPEED.name: {"zero": (1, 2), "pipeline": (1,), "tensor": (1,), "context": (1,)},
    DEEPSPEED_ZERO3.name: {"zero": (3,), "pipeline": (1,), "tensor": (1,), "context": (1,)},
}
"""What a program's layouts are restricted to, by key of ``[parallel]``; a key that is not named may be anything."""


def software_named(name: str) -> Software:
    """The program of that name."""
    if name not in SOFTWARE:
        cure = f"take one of {', '.join(SOFTWARE)}"
        raise UserError("is no program that can be predicted", cure=cure, field="--software", value=name)
    return SOFTWARE[name]
