"""Which attention kernel a run on a GPU takes: settled by trials on every rank, kept for the next start, and said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.kernels.attention_trial import Shape, Trial
from phalanx.train import training_run
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import attention_lines, kernels_to_try
from phalanx.train.run_progress import RunProgress
from phalanx.train.training_run import described_attention, require_attention, settle_attention

SHAPE = Shape(4, 8, 2, 256, 64, torch.bfloat16)


def config(**sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"sequence_length": 256, "document_mask": False, "sources": [{"kind": "python-stdlib"}]},
        "train": {"steps": 1},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return validate(RunConfig, tree)


class Peers:
    """This rank, and others whose trials found what is given."""

    def __init__(self, *others: dict[str, str]) -> None:
        self.rank, self.others, self.kernel = 0, others, ""

    def lowest(self, mine: Any) -> Any:
        found = [other.get(self.kernel, "") for other in self.others]
        theirs = [[reason != "no memory", rank, reason] for rank, reason in enumerate(found, 1) if reason]
        return min([*([mine] if mine else []), *theirs], default=None)


def run_of(
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, str],
    *others: dict[str, str],
    device: str = "cuda",
    **sections: Any,
) -> Any:
    """A run whose kernels' trials end as `found` says; `used` is what was chosen, `tried` what was tried."""
    peers, used, tried = Peers(*others), [], []

    def find_fault(kernel: str, shape: Shape, where: torch.device, attend: Any) -> str:
        assert (shape, where.type, attend) == (SHAPE, "cuda", None)
        tried.append(kernel)
        peers.kernel = kernel
        if found.get(kernel) == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found.get(kernel, "")

    monkeypatch.setattr(training_run, "find_fault", find_fault)
    trainer = SimpleNamespace(attention_trial=lambda batch, length: Trial(SHAPE), use_attention=used.append)
    return SimpleNamespace(
        config=config(**sections), device=SimpleNamespace(torch_device=torch.device(device)), trainer=trainer,
        ranks=SimpleNamespace(peers=peers), progress=RunProgress(micro_batch=4), attention=None, used=used, tried=tried,
    )  # fmt: skip


def test_the_fastest_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {})
    require_attention(run)
    assert [kernel.name for kernel in run.used] == run.tried == ["cudnn"]
    assert run.used[0].length == 256
    assert run.progress.attention_kernel == "cudnn"
    assert described_attention(run) == "cuDNN, tried with 4 x 256 positions, 8 over 2 heads of 64"


def test_a_fault_is_said_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {"cudnn": "not finite: gradient of queries", "flash": "this torch does not have it"})
    require_attention(run)
    assert run.progress.attention_kernel == run.used[-1].name == "flex"
    assert described_attention(run) == (
        "FlexAttention, tried with 4 x 256 positions, 8 over 2 heads of 64; refused: cuDNN (not finite: gradient of "
        "queries); FlashAttention 2 (this torch does not have it)"
    )


def test_all_ranks_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails on one rank is taken by none."""
    run = run_of(monkeypatch, {}, {}, {"cudnn": "not finite: output"})
    require_attention(run)
    assert run.progress.attention_kernel == "flash"
    assert "cuDNN (not finite: output)" in described_attention(run)


def test_it_is_tried_once_for_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {})
    for micro_batch in (8, 8, 4, 4):
        assert settle_attention(run, micro_batch)
    require_attention(run)
    assert run.tried == ["cudnn", "cudnn"]


@pytest.mark.parametrize("others", [(), ({},)])
def test_no_memory_is_no_fault(monkeypatch: pytest.MonkeyPatch, others: Any) -> None:
    """The micro-batch does not fit then, on any rank."""
    run = run_of(monkeypatch, {"cudnn": "memory"}, *others)
    assert not settle_attention(run, 4)
    assert not run.used
    with pytest.raises(UserError, match=r"4 x 256 tokens at once do not fit.*one layer's attention"):
        require_attention(run)


def test_a_run_that_goes_on_has_the_kernel_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had to take another when it began; now both would pass, and give figures that differ by rounding."""
    run = run_of(monkeypatch, {})
    run.progress.attention_kernel = "flash"
    require_attention(run)
    assert run.tried == ["flash"]
    assert "before" not in described_attention(run)


def test_a_run_that_has_to_change_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {"cudnn": "not finite: output"})
    run.progress.attention_kernel = "cudnn"
    require_attention(run)
    assert described_attention(run).endswith("; it was cuDNN before: figures differ by rounding")
    assert run.progress.attention_kernel == "flash"
    assert RunProgress.from_json(run.progress.to_json()).attention_kernel == "flash"


def test_a_kernel_that_is_asked_for_must_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {}, model={"attention_backend": "flash"})
    require_attention(run)
    assert run.tried == ["flash"]
    run = run_of(monkeypatch, {"cudnn": "not finite: output"}, model={"attention_backend": "cudnn"})
    with pytest.raises(UserError, match=r"'cudnn': the kernel fails its self-test .*not finite: output.*auto"):
        require_attention(run)


def test_a_ring_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {}, model={"attention_backend": "efficient"})
    run.trainer.attention_trial = lambda batch, length: Trial(SHAPE, None, ("cudnn", "flash", "flex", "math"))
    with pytest.raises(UserError, match=r"'efficient': .*ring.*auto, or one of cudnn, flash, flex$"):
        require_attention(run)


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"document_mask": True}},
        {"model": {"attention": ["window"], "window": 32}},
        {"model": {"attention_dropout": 0.1, "attention_backend": "math"}},
        {"model": {"attention_backend": "sdpa"}},
    ],
)
def test_nothing_is_tried_where_no_layer_uses_it(monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]) -> None:
    run = run_of(monkeypatch, {}, **sections)
    require_attention(run)
    assert not run.tried
    assert run.progress.attention_kernel == ""
    assert described_attention(run)


def test_a_cpu_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {}, device="cpu")
    require_attention(run)
    assert (run.tried, run.used, described_attention(run)) == ([], [], "")


WINDOWS: dict[str, Any] = {"attention": ["window", "full"], "window": 32}


@pytest.mark.parametrize(
    ("sections", "kernels", "word"),
    [
        ({}, ["cuDNN, else FlashAttention 2, else FlexAttention, else torch's memory-efficient kernel"], "self-test"),
        ({"train": {"deterministic": True}}, ["FlashAttention 2, else FlexAttention, else torch's"], "deterministic"),
        ({"train": {"precision": "fp32"}}, ["FlexAttention, else torch's memory-efficient"], "16 bits"),
        ({"data": {"document_mask": True}}, ["FlexAttention"], "data.document_mask"),
        ({"model": WINDOWS}, ["cuDNN, else", "FlexAttention"], "windows without a dense mask"),
        ({"model": WINDOWS | {"window": 256}}, ["cuDNN, else"], "self-test"),
        ({"model": {"attention_dropout": 0.1, "attention_backend": "math"}}, ["matrix products"], "drops"),
        ({"model": {"attention_backend": "flash"}}, ["FlashAttention 2"], "model.attention_backend"),
        ({"model": {"attention_backend": "sdpa"}}, ["torch's choice"], "model.attention_backend"),
        ({"data": {"document_mask": True}, "model": {"head_size": 8}}, ["torch's memory-efficient"], "heads of 8"),
        ({"parallel": {"context": 2}}, ["cuDNN, else FlashAttention 2, else FlexAttention"], "log-sum-exp"),
        ({"parallel": {"context": 2}, "model": WINDOWS}, ["cuDNN, else", "FlexAttention"], "where the window ends"),
    ],
)
def test_what_explain_says_of_a_gpu(sections: dict[str, Any], kernels: list[str], word: str) -> None:
    lines = attention_lines(config(**sections), "cuda")
    assert [line.kernel[: len(start)] for line, start in zip(lines, kernels, strict=True)] == kernels
    assert word in lines[-1].why


def test_what_explain_says_of_a_cpu() -> None:
    (full,) = attention_lines(config(), "cpu")
    assert "bf16" in full.why
    assert [line.kernel for line in attention_lines(config(model=WINDOWS), "cpu")][1] == "chunks of queries"
    (ring,) = attention_lines(config(parallel={"context": 2}), "cpu")
    assert "ring" in ring.layers


def test_what_is_tried() -> None:
    assert kernels_to_try(config())[:2] == ("cudnn", "flash")
    assert kernels_to_try(config(model={"attention_backend": "efficient"})) == ("efficient",)
