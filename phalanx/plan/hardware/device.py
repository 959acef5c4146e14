"""One device: how long its kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from phalanx.core.errors import UserError
from phalanx.plan.hardware.attention import FusedAttention
from phalanx.plan.hardware.gemm import TileGemm
from phalanx.plan.hardware.stream import Stream
from phalanx.plan.hardware.table_gemm import TableGemm
from phalanx.plan.types import Mark, Number, Precision

_Model = TypeVar("_Model")

Format = Literal["half", "fp32"]
"""What the speed of arithmetic depends on: bf16 and fp16 are equally fast."""


def format_of(precision: Precision) -> Format:
    """The format whose rates hold for `precision`."""
    return "fp32" if precision == "fp32" else "half"


def number_of(numbers: Mapping[str, Number], key: str, what: str) -> Number:
    """The number of that name.

    Raises:
        UserError: `what` has none.
    """
    if key not in numbers:
        raise UserError(f"is no number of {what}", cure=f"take one of {', '.join(sorted(numbers))}", value=key)
    return numbers[key]


@dataclass(frozen=True)
class Device:
    """A GPU, a die of one, or the processors of a host.

    All times are of the device alone: what the host needs to launch kernels comes beside it.

    Attributes:
        numbers: plain numbers of its file, by key.
        gemms: models of matrix products.
        attentions: curves of fused attention.
        stream: kernels that only move bytes.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    numbers: Mapping[str, Number]
    gemms: Mapping[Format, TileGemm | TableGemm]
    attentions: Mapping[Format, FusedAttention]
    stream: Stream

    @property
    def memory_bytes(self) -> float:
        """Bytes of its memory."""
        return self.numbers["memory_bytes"].value

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak rate of its memory."""
        return self.numbers["memory_bytes_per_s"].value

    @property
    def kernel_gap_s(self) -> float:
        """Time between the end of a kernel and the start of the next one that waits for it."""
        return self.numbers["kernel_gap_s"].value

    @property
    def host_launch_s(self) -> float:
        """Time of the host for each kernel that it launches."""
        return self.numbers["host_launch_s"].value

    def launching_s(self, *, compiled: bool) -> float:
        """Time of the host for each kernel of a layer; of a compiled one too, where that was not measured apart."""
        key = "host_compiled_launch_s"
        return self.numbers[key].value if compiled and key in self.numbers else self.host_launch_s

    def peak_flops_per_s(self, precision: Precision = "bf16") -> float:
        """Peak rate of dense matrix products."""
        return self.numbers[f"peak_{format_of(precision)}_flops_per_s"].value

    def gemm_s(
        self, m: Any, n: Any, k: Any, precision: Precision = "bf16", batch: Any = 1, weight_gradient: bool = False
    ) -> Any:
        """Time of `batch` products of m x k with k x n, under lasting load; sizes are numbers or arrays."""
        gemm = self._of(self.gemms, precision)
        if isinstance(gemm, TableGemm):
            return gemm.seconds(m, n, k, batch, weight_gradient)
        seconds = gemm.seconds(m, n, k, batch)
        return seconds * gemm.weight_gradient_ratio if weight_gradient else seconds

    def has_times_of(self, precision: Precision) -> bool:
        """Whether `gemm_s` knows it; files of CPUs that are slow with bf16 have none."""
        return format_of(precision) in self.gemms

    def attention_s(
        self, flops: Any, queries: Any, head_dim: int, precision: Precision = "bf16", backward: bool = False
    ) -> Any:
        """Time of one pass of fused attention.

        Args:
            flops: of this pass, as counted: products with keys and with values, the masked half left out; a backward
                pass has 2.5 times those of its forward pass, the scores being computed again.
            queries: positions of one sequence.
        """
        return self._of(self.attentions, precision).seconds(flops, queries, head_dim, backward)

    def stream_s(self, num_bytes: Any) -> Any:
        """Time of a kernel that reads and writes `num_bytes` in all."""
        return self.stream.seconds(num_bytes)

    def stream_ratio(self, kernel: str, precision: Precision = "fp32") -> float:
        """How many times longer a kernel, such as ``rms_norm_forward``, takes than `stream_s` of its bytes; 1 where
        that was not measured."""
        return self.stream.ratio(kernel, precision)

    def number(self, key: str) -> Number:
        """A plain number of its file.

        Raises:
            UserError: there is none of that name.
        """
        return number_of(self.numbers, key, "a device")

    def mark_of(self, what: str, precision: Precision = "bf16") -> tuple[Mark, str]:
        """How far the times of ``gemm``, ``attention`` or ``stream``, or a plain number, can be trusted, and why."""
        if what == "gemm":
            gemm = self._of(self.gemms, precision)
            return gemm.mark, gemm.source
        if what == "attention":
            attention = self._of(self.attentions, precision)
            return attention.mark, attention.source
        if what == "stream":
            return self.stream.mark, self.stream.source
        return self.number(what).mark, self.number(what).source

    def _of(self, models: Mapping[Format, _Model], precision: Precision) -> _Model:
        """The model for `precision`.

        Raises:
            UserError: the device's file has none.
        """
        if format_of(precision) not in models:
            raise UserError(
                f"{self.name} has no times of {precision}",
                cure=f"set train.precision to what it has: {', '.join(models)} (half: bf16)",
                field="train.precision",
                value=precision,
            )
        return models[format_of(precision)]
