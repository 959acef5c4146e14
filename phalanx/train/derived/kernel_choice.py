"""Which attention kernels a run uses and whether its layers are compiled, as far as its settings decide.

For `phalanx explain`, and where a trial is due: `phalanx.train.training_run` finds out which kernel passes its
self-test on the GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from phalanx.train.config import RunConfig

_NAMED = ("cudnn", "flash", "efficient")
_TRIED = ("cudnn", "flash", "flex", "efficient", "math")
_TITLES = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "flex": "FlexAttention",
    "efficient": "torch's memory-efficient kernel",
    "math": "matrix products",
    "chunked": "chunks of queries",
    "sdpa": "torch's choice",
}
_SMALLEST_FLEX_HEAD = 16


class AttentionLine(NamedTuple):
    """What some of the layers do: which ones, by which kernel, and why."""

    layers: str
    kernel: str
    why: str


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel of plain causal attention that a run on a GPU uses."""

    kernel: str  # its name, as of `model.attention_backend`
    micro_batch: int  # sequences that it was tried with
    shape: str  # in words
    refused: tuple[str, ...] = ()  # faster kernels, each with what its trial found
    former: str = ""  # what the run used before, where that is another

    def __str__(self) -> str:
        text = f"{title(self.kernel)}, tried with {self.shape}"
        if self.refused:
            text += f"; refused: {'; '.join(self.refused)}"
        if self.former:
            text += f"; it was {title(self.former)} before: figures differ by rounding"
        return text


def title(kernel: str) -> str:
    """A kernel as people call it."""
    return _TITLES.get(kernel, kernel)


def kernels_to_try(config: RunConfig) -> tuple[str, ...]:
    """Kernels of plain causal attention on a GPU, the preferred one first; none where no layer trains with one."""
    model, backend = config.model, config.model.attention_backend
    if model.attention_dropout or backend not in ("auto", *_NAMED):
        return ()
    if config.data.document_mask or "full" not in _kinds(config):
        return ()
    return _TRIED if backend == "auto" else (backend,)


def attention_lines(config: RunConfig, device: Literal["cpu", "cuda"]) -> list[AttentionLine]:
    """Which kernel each kind of layer uses on a device, and why."""
    model, backend = config.model, config.model.attention_backend
    if model.attention_dropout:
        return [AttentionLine("all layers", title("math"), "the only one that drops attention weights")]
    is_ring = _is_ring(config)
    if not is_ring and backend not in ("auto", *_NAMED):
        return [AttentionLine("all layers", title(backend), "model.attention_backend says so")]
    lines = []
    for kind in _kinds(config):
        where = "layers that see all of the past" if kind == "full" else "layers with a window"
        kernel, why = _on_cpu(kind) if device == "cpu" else _on_cuda(config, kind)
        if is_ring:
            where += ", pieces of a ring"
            joined = "pieces are put together by their log-sum-exp"
            if device == "cpu":
                kernel, why = "torch's flash kernel for CPUs", joined
            elif kind == "window" and not config.data.document_mask:
                why = "where the window ends; whole pieces by the kernel of full attention"
            else:
                why = f"{why}; {joined}"
        lines.append(AttentionLine(where, kernel, why))
    return lines


def _kinds(config: RunConfig) -> list[str]:
    """Kinds of layers; a window as long as the sequences counts as full attention."""
    window = config.model.window
    restricts = 0 < window < config.data.sequence_length
    kinds = ["window" if kind == "window" and restricts else "full" for kind in config.model.attention]
    return sorted(set(kinds))


def _is_ring(config: RunConfig) -> bool:
    return (config.parallel.context or 1) > 1 and config.parallel.context_method == "ring"


def _on_cpu(kind: str) -> tuple[str, str]:
    if kind == "window":
        return title("chunked"), "each sees the keys of its window alone"
    why = "bf16: matrix products in chunks of queries; fp32, and long sequences: torch's flash kernel for CPUs"
    return "by type and length", why


def _on_cuda(config: RunConfig, kind: str) -> tuple[str, str]:
    has_documents = config.data.document_mask
    if kind == "full" and not has_documents:
        return _plain_on_cuda(config)
    restricted = " and ".join((["documents"] if has_documents else []) + (["windows"] if kind == "window" else []))
    if config.model.head_dim < _SMALLEST_FLEX_HEAD:
        why = f"{restricted}; FlexAttention has no kernel for heads of {config.model.head_dim}: a dense mask"
        return title("efficient"), why
    why = f"{restricted} without a dense mask, compiled once for the run"
    if has_documents:
        why += "; data.document_mask = false lets cuDNN do it, across the borders of documents"
    return title("flex"), why


def _plain_on_cuda(config: RunConfig) -> tuple[str, str]:
    left_out = ("math", "efficient") if _is_ring(config) else ("math",)
    names = [name for name in kernels_to_try(config) if name not in left_out]
    if len(names) == 1:
        return title(names[0]), "model.attention_backend says so; a run ends where it fails its self-test"
    why = "the first that passes a self-test of the run's own shape before the first step"
    if config.train.precision == "fp32":
        names, why = names[2:], why + "; cuDNN and FlashAttention compute in 16 bits"
    elif config.train.deterministic:
        names, why = names[1:], why + "; cuDNN's backward adds up in any order (train.deterministic)"
    return ", else ".join(map(title, names)), why


class Compiling(NamedTuple):
    """Whether layers are compiled, and why, where a reader of the settings would not expect it."""

    on: bool
    why: str = ""


def decide_compiling(config: RunConfig, on_gpu: bool, lacking: str = "") -> Compiling:
    """What `train.compile` comes to, with the layout known.

    On a CPU layers run as they are written unless compiling is asked for: its kernels are fused by hand, and a compiler
    takes tens of seconds.

    Args:
        lacking: what the machine lacks, by `lacking_for_a_gpu`.
    """
    wanted, opaque = config.train.compile, config.not_traced()
    if wanted is False or (wanted == "auto" and not on_gpu):
        return Compiling(False)
    if wanted == "auto":
        if opaque and (level := config.train.recompute) in ("selective", "mlp"):
            return Compiling(False, f"layers are not compiled: train.recompute = {level!r} does not go with {opaque}")
        if lacking:
            return Compiling(False, f"layers are not compiled: {lacking}, which Triton needs to launch its kernels")
    return Compiling(True, f"layers are compiled in pieces, around {opaque}" if opaque else "")


def lacking_for_a_gpu() -> str:
    """What a compiler for GPUs needs on this machine and is not there; empty: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "there is no package triton here"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "there is no C compiler here (cc, gcc, clang, or the one named by CC)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"there is no {header} here"
