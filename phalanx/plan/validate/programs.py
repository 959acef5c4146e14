"""Programs whose published steps are predicted, and that `--software` does not offer: what their sources say of them.

What a source does not say is assumed as it is here; nothing was changed to come nearer to a measured step.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.software import MEGASCALE
from phalanx.plan.types import Software

MEGATRON_CORE = replace(
    # NVIDIA NeMo 24.09 to 24.12 on Megatron Core (launcher_scripts/conf/training of NVIDIA/NeMo-Framework-Launcher):
    # cuDNN's fused attention, all fusions, cross_entropy_loss_fusion, gradients summed by the products; gradients are
    # reduced and weights gathered beside the passes (overlap_grad_sync, overlap_param_sync), messages between stages
    # too (overlap_p2p_comm).
    MEGASCALE,
    name="megatron-core-2024",
    fused_loss=True,
    first_gather_hidden=False,
)

MEGATRON_CORE_BF16 = replace(
    # As above with grad_sync_dtype bf16, which its buffer of summed gradients has too.
    MEGATRON_CORE,
    name="megatron-core-2024, gradients in bf16",
    gradient_bytes=2,
    reduce_bytes=2,
)

FSDP_COMPILED = Software(
    # PyTorch's fully sharded data parallelism: fp32 shards, weights gathered in bf16; after every micro-batch whole
    # bf16 gradients become fp32 and are divided before they are reduced onto the shard (_reduce_grad in
    # torch/distributed/fsdp/_runtime_utils.py), which moves as much as adding them to fp32 sums; torch.compile fuses
    # what is elementwise.
    name="pytorch-fsdp, compiled",
    fused_elementwise=True,
    merged_projections=False,
    residual_bytes=2,
    gather_bytes=2,
    sent_bytes=2,
    master_bytes=4,
    weight_bytes=2,
    pipeline_overlap=False,
)

FSDP = replace(
    # The same without torch.compile: each operation is a kernel.
    FSDP_COMPILED,
    name="pytorch-fsdp",
    fused_elementwise=False,
    fused_loss=False,
)

FOUNDRY = replace(
    # mosaicml/llm-foundry: eager, but for flash-attn's fused cross-entropy; attention is triton's.
    FSDP,
    name="llm-foundry",
    merged_projections=True,
    fused_loss=True,
)

INTERNEVO = Software(
    # InternLM's trainer: flash-attn's fused layers, rotation and loss; bf16 gradients summed and reduced in bf16 beside
    # the passes (configs/7B_sft.py: overlap_sync_grad, overlap_sync_param), fp32 masters.
    name="internevo",
    fused_elementwise=True,
    stops_early=False,
    residual_bytes=2,
    gradient_bytes=2,
    reduce_bytes=2,
    gather_bytes=2,
    sent_bytes=2,
    master_bytes=4,
    weight_bytes=2,
    tensor_backward_overlap=True,
)
