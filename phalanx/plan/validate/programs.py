"""Variants of programs whose published steps are predicted, and that `--software` does not offer.

What a source does not say is assumed as it is here; nothing was changed to come nearer to a measured step.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.software import FSDP2, MEGATRON_CORE
from phalanx.plan.types import Software

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
    fused_gradients=True,
    reduce_bytes=2,
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
