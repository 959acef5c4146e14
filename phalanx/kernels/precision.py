"""In which precision this machine multiplies matrices fast."""

from __future__ import annotations

import torch

from phalanx.core.cpu import cpu_line


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; without, torch takes hundreds of times as long as in fp32
    where it has no AVX-512 either."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    flags = cpu_line("flags").split()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16"))
