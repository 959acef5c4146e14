"""Programs whose steps can be predicted, beside our own: what their kernels fuse, keep and overlap.

Facts of each come from its publication or source, named here; what neither says is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.plan.types import Software

PHALANX = Software()

MEGATRON_2021 = Software(
    # arXiv 2104.04473: fp16 with fp32 masters, fused softmax, bias-GELU and bias-dropout-add (section 4.2), sends split
    # over tensor-parallel ranks and gathered (4.1); gradients in fp16, added by kernels of their own; nothing overlaps.
    name="megatron-lm-2021",
    fused_attention=False,
    fused_elementwise=True,
    stops_early=False,  # its own checkpoint runs the whole layer again
    fused_loss=False,
    fused_gradients=False,
    residual_bytes=2,
    gradient_bytes=2,
    reduce_bytes=2,
    gather_bytes=2,
    sent_bytes=2,
    master_bytes=4,
    weight_bytes=2,
    data_overlap=False,
    pipeline_overlap=False,
    split_sends=True,
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

SOFTWARE: Mapping[str, Software] = {
    each.name: each for each in (PHALANX, MEGATRON_2021, MEGATRON_2022, MEGATRON_2023, MEGASCALE, MEGATRON_DEEPSPEED)
}


def software_named(name: str) -> Software:
    """The program of that name.

    Raises:
        UserError: there is none.
    """
    if name not in SOFTWARE:
        raise UserError(
            "is no program that can be predicted",
            cure=f"take one of {', '.join(SOFTWARE)}",
            field="--software",
            value=name,
        )
    return SOFTWARE[name]
