"""Whole tiny runs: what they learn, what they leave behind, and arithmetic against plain torch."""

from __future__ import annotations

import gc
import gzip
import json
import math
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import write_corpus
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import begin, configured, entries, figures, finish, overrides, run_all

from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.model.decoder import Decoder
from phalanx.optim.bad_step import _Mailbox
from phalanx.optim.skipping import SkippingOptimizer
from phalanx.telemetry.run_samples import read_samples
from phalanx.train.config import RunConfig
from phalanx.train.evaluation import evaluate
from phalanx.train.run_folder import RunFolder
from phalanx.train.session import sample
from phalanx.train.summary import closing
from phalanx.train.trainer import accumulate_gradients
from phalanx.train.training_run import Run


def test_a_run_learns_and_leaves_its_record(tmp_path: Path) -> None:
    printed = run_all(tmp_path, {"train.steps": 40, "evaluate.every_steps": 10})
    run = tmp_path / "run"
    steps = entries(run)
    assert [entry["step"] for entry in steps] == list(range(1, 41))
    assert steps[0]["loss"] == pytest.approx(math.log(257), abs=0.1)
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    assert [entry["step"] for entry in entries(run, "evaluation")] == [10, 20, 30, 40]
    assert RunFolder(run).config() == configured(tmp_path, {"train.steps": 40, "evaluate.every_steps": 10})
    (start,) = json.loads((run / "environment.json").read_text())
    assert start["packages"]["torch"] == torch.__version__
    assert start["hardware"]["threads"] == 1
    assert set(start) >= {"commit", "python", "host", "cores", "command"}
    assert "done: 40 steps" in printed
    assert f"phalanx generate {run}" in printed
    assert "bits per byte" in printed


def test_without_held_out_text_a_run_still_ends_well(tmp_path: Path) -> None:
    printed = run_all(tmp_path, {"data.validation_fraction": 0.0})
    assert "done: 20 steps" in printed
    assert "held-out text:" not in printed
    assert entries(tmp_path / "run", "evaluation") == []


def test_figures_do_not_depend_on_how_often_they_are_read(tmp_path: Path) -> None:
    run_all(tmp_path)
    for steps in (3, 7):
        run_all(tmp_path, {"logging.every_steps": steps, "checkpoint.every_steps": 0}, f"every {steps}")
        assert figures(tmp_path / "run") == figures(tmp_path / f"every {steps}")


def test_checkpoints_do_not_fill_the_screen_with_steps(tmp_path: Path) -> None:
    """Each writes down the steps before it; what is shown, and when, is for ``logging.every_steps`` to say."""
    printed = run_all(tmp_path, {"logging.every_steps": 5, "checkpoint.every_steps": 2})
    shown = [line.split()[1] for line in printed.splitlines() if "grad norm" in line]
    assert shown == ["5/20", "10/20", "15/20", "20/20"]
    assert [entry["step"] for entry in entries(tmp_path / "run")] == list(range(1, 21))


def _uneven(batch: Batch) -> Batch:
    """Weights that differ from row to row, with an empty row, as loss masks make them."""
    weights = batch.weights_BS.clone()
    for row in range(len(batch)):
        weights[row, : (row * 5) % 17] = 0
    weights[1] = 0
    weights[2] *= 0.5
    return Batch(batch.tokens_BS, batch.targets_BS, weights, batch.documents_BS, batch.sample_index_B)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 6, 7])
def test_gradients_do_not_depend_on_the_micro_batch(tmp_path: Path, micro_batch: int, fill: bool) -> None:
    """Nor on rows that only fill a last, shorter one up."""
    run = begin(configured(tmp_path, {"train.global_batch": 6, "train.micro_batch": 6, "model.dropout": 0.2}))
    run.folder.release()
    run.trainer.model.double()
    for module in run.trainer.model.modules():
        if hasattr(module, "compute"):
            module.compute = torch.float64
    run.trainer.model.compute_dtype = run.trainer.model.residual_dtype = torch.float64
    batch = _uneven(run.loader.batch(0, 6))

    def gradients(size: int) -> tuple[float, list[torch.Tensor]]:
        run.trainer.model.zero_grad()
        loss = accumulate_gradients(
            run.trainer.model, batch, micro_batch=size, device=run.device, seed=0, step=3, fill=fill
        )
        return float(loss), [p.grad.clone() for p in run.trainer.model.parameters() if p.grad is not None]

    whole, expected = gradients(6)
    loss, found = gradients(micro_batch)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-9)


def _reference(run: Run, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, by torch alone from the same initial weights; logits are the model's."""
    optim = run.config.optim
    decayed = [p for n, p in run.trainer.parameters.items() if p.dim() == 2 and "embedding" not in n]
    rest = [p for n, p in run.trainer.parameters.items() if not (p.dim() == 2 and "embedding" not in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    found = []
    for step in range(steps):
        batch = run.loader.batch(step * 4, 4)
        logits = run.trainer.model.logits(run.trainer.model(batch.tokens_BS, documents_BS=batch.documents_BS))
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets_BS.flatten(), reduction="none")
        loss = (losses * batch.weights_BS.flatten()).sum() / batch.weights_BS.sum()
        run.trainer.model.zero_grad()
        loss.backward()
        run.trainer.parameters.bind_gradients()
        norm = torch.nn.utils.clip_grad_norm_(run.trainer.parameters.values(), 1.0)
        for group in adamw.param_groups:
            warm = 2
            done = max(step - warm, 0) / (10 - warm)
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
            group["lr"] = optim.lr * ((step + 1) / warm if step < warm else cosine)
        adamw.step()
        found.append((float(loss.detach()), float(norm)))
    return found


def test_ten_steps_equal_plain_torch(tmp_path: Path) -> None:
    """Documents are cut without end-of-text tokens, so that weights are uneven between micro-batches."""
    changes: dict[str, Any] = {
        "train.steps": 10,
        "data.tokenizer.end_of_text": False,
        "optim.schedule": {"warmup_steps": 2},
        "train.micro_batch": 1,
    }
    plain = _toml_config(tmp_path, changes)
    reference = begin(plain)
    reference.folder.release()
    weights = reference.loader.batch(0, 4).weights_BS.sum(1)
    assert len(set(weights.tolist())) > 1
    expected = _reference(reference, 10)
    run = begin(plain.model_copy(update={"run": plain.run.model_copy(update={"folder": str(tmp_path / "b")})}))
    finish(run)
    found = [(entry["loss"], entry["grad_norm"]) for entry in entries(tmp_path / "b")]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=2e-5)


def _toml_config(folder: Path, changes: dict[str, Any]) -> RunConfig:
    """Like `configured`, with inline tables."""
    flat = {k: v for k, v in changes.items() if not isinstance(v, dict)}
    tables = [f"{k}.{name}={value}" for k, v in changes.items() if isinstance(v, dict) for name, value in v.items()]
    return load(RunConfig, None, [*overrides(folder, flat), *tables]).value


@pytest.mark.campaign(but=("0.2",))
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_changes_no_bit(tmp_path: Path, dropout: float) -> None:
    kinds = ("none", "selective", "mlp", "full")
    for kind in kinds:
        run_all(tmp_path, {"train.steps": 6, "model.dropout": dropout, "train.recompute": kind}, kind)
    plain, *others = (figures(tmp_path / kind) for kind in kinds)
    assert others == [plain] * 3


def test_deterministic_mode(tmp_path: Path) -> None:
    try:
        run_all(tmp_path, {"train.deterministic": True, "train.steps": 5})
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    run_all(tmp_path, {"train.steps": 5}, "other")
    assert not torch.are_deterministic_algorithms_enabled()
    assert figures(tmp_path / "run") == figures(tmp_path / "other")


@pytest.mark.campaign
@pytest.mark.slow
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    changes = {"train.steps": 5, "model.layers": 1}  # layers of a kind are compiled once
    run_all(tmp_path, changes)
    run_all(tmp_path, changes | {"train.compile": True}, "compiled")
    plain, compiled = ([entry["loss"] for entry in entries(tmp_path / name)] for name in ("run", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_a_window_of_steps_is_profiled(tmp_path: Path) -> None:
    printed = run_all(tmp_path, {"train.steps": 6, "profile.start_step": 2, "profile.steps": 2})
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "steps-2-3.json.gz"
    assert str(trace) in printed
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_a_profile_window_beyond_the_end_is_said(tmp_path: Path) -> None:
    assert "profile.start_step = 50" in run_all(tmp_path, {"train.steps": 4, "profile.start_step": 50})


@pytest.mark.parametrize(("length", "expected"), [(16, 4), (2048, 2), (4096, 1)])
def test_the_micro_batch_is_chosen_by_size(tmp_path: Path, length: int, expected: int) -> None:
    if length > 16:
        write_corpus(tmp_path, documents=600)
    run = begin(configured(tmp_path, {"train.micro_batch": 0, "data.sequence_length": length}))
    run.folder.release()
    assert run.progress.micro_batch == expected


@pytest.mark.parametrize("frozen_before", [False, True])
def test_garbage_is_collected_at_fixed_steps_only(tmp_path: Path, *, frozen_before: bool) -> None:
    gc.freeze() if frozen_before else gc.unfreeze()
    frozen = gc.get_freeze_count()
    collections: list[int] = []
    run = begin(configured(tmp_path, {"train.garbage_collect_steps": 4, "checkpoint.every_steps": 0}))
    original = run.accumulate_gradients

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(run.progress.step)

    def noisy(batch: Batch) -> torch.Tensor:
        for _ in range(3000):  # cycles enough for the automatic collector to start several times a step
            cycle: list[Any] = []
            cycle.append(cycle)
        return original(batch)

    run.accumulate_gradients = noisy  # type: ignore[method-assign]
    gc.callbacks.append(note)
    try:
        finish(run)
        left = gc.get_freeze_count()
    finally:
        gc.callbacks.remove(note)
        gc.collect()
        gc.freeze()  # as it is for all other tests, see tests/conftest.py
    inside = [step for step in collections if 0 < step < 20]
    assert inside == [4, 8, 12, 16]
    assert gc.isenabled()
    assert (left > 0) == frozen_before and left <= frozen


def _from_mailbox() -> bool:
    """Whether the bad-step policy is looking into its mailbox, which on a GPU is host memory that has arrived."""
    return any(frame.f_code is _Mailbox.read.__code__ for frame, _ in traceback.walk_stack(sys._getframe()))


class HostReads(TorchDispatchMode):
    """Notes every operator that makes the host wait for values of the device, and the step it belongs to."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.steps: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.WAITING and not _from_mailbox():
            self.steps.append(self.run.progress.step)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "came", "muon"])
def test_a_step_reads_nothing_back_from_the_device(
    tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from above (methods of tensors) and below (operators).

    Our optimizers decide on the device as on a GPU; on a CPU they would look, since looking is free there.
    """
    changes = {"optim.name": optimizer, "logging.every_steps": 1000, "checkpoint.every_steps": 0, "model.dropout": 0.1}
    changes |= {"train.steps": 8}
    run = begin(configured(tmp_path, changes))
    monkeypatch.setattr(SkippingOptimizer, "as_on_device", True)
    above: list[int] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _of: Any = original) -> Any:
            if not _from_mailbox():
                above.append(run.progress.step)
            return _of(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with HostReads(run) as below:
        finish(run)
    finished = range(run.total_steps)
    assert not [step for step in above if step in finished]
    # torch's _foreach_add_, which LAMB calls, reads its scalar on a CPU; its CUDA kernel takes the address.
    allowed = set(finished) if optimizer == "lamb" else set()
    assert {step for step in below.steps if step in finished} <= allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["as written", "compiled"])
def test_twenty_steps_on_a_gpu_wait_for_nothing(tmp_path: Path, compiled: bool) -> None:
    """After the first steps, in which libraries load and kernels are tuned."""
    changes = {
        "logging.every_steps": 1000,
        "checkpoint.every_steps": 0,
        "train.device": "cuda",
        "train.compile": compiled,
        "train.steps": 25,
        "model.head_size": 64,
        "model.hidden": 128,
        "model.heads": 2,
    }
    run = begin(configured(tmp_path, changes))
    run.folder.release()
    try:
        with run.batches() as batches:
            for number, batch in enumerate(batches):
                if number == 5:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                loss = run.accumulate_gradients(batch)
                norm, scale = run.optimizer.clip()
                run.optimizer.step(found_inf=run.judge.judge(loss, norm), grad_scale=scale)
                run.updated()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(loss))


def test_held_out_loss_and_bits_per_byte_against_plain_torch(tmp_path: Path) -> None:
    run = begin(configured(tmp_path, {"data.tokenizer.kind": "bpe", "data.tokenizer.vocab_size": 300}))
    run.folder.release()
    tokenizer = run.prepared.tokenizer
    loss, tokens, text = 0.0, 0, b""
    with torch.no_grad():
        for batch in run.loader.validation_batches(3):
            logits = run.trainer.model.logits(run.trainer.model(batch.tokens_BS, documents_BS=batch.documents_BS))
            chances = torch.log_softmax(logits.double(), -1)
            for row in range(len(batch)):
                for column in range(batch.tokens_BS.shape[1]):
                    if batch.weights_BS[row, column]:
                        target = int(batch.targets_BS[row, column])
                        loss -= float(chances[row, column, target])
                        tokens += 1
                        text += b"" if target == tokenizer.end_of_text else _bytes_of(tokenizer, target)
    result = evaluate(run.trainer.held_out_loss, run.held_out(0), tokenizer)
    assert result.tokens == tokens
    assert result.text_bytes == len(text)
    assert result.loss == pytest.approx(loss / tokens, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / len(text), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(loss / tokens), rel=1e-5)


def _bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes of a byte-level BPE token, from GPT-2's table of printable stand-ins."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    table |= {chr(256 + n): b for n, b in enumerate(others)}
    vocabulary = json.loads(tokenizer.json)["model"]["vocab"]
    (name,) = (text for text, index in vocabulary.items() if index == token)
    return bytes(table[c] for c in name)


def test_evaluating_while_training_changes_nothing(tmp_path: Path) -> None:
    changes = {"train.steps": 7, "model.dropout": 0.1}
    run_all(tmp_path, changes)
    run_all(tmp_path, changes | {"evaluate.every_steps": 3}, "other")
    assert [e["loss"] for e in entries(tmp_path / "run")] == [e["loss"] for e in entries(tmp_path / "other")]


def test_bad_batches_are_skipped_counted_and_logged(tmp_path: Path) -> None:
    run = begin(configured(tmp_path))
    original = run.accumulate_gradients

    def sometimes_nan(batch: Batch) -> torch.Tensor:
        loss = original(batch)
        return loss * math.nan if run.progress.step in (4, 5, 9) else loss

    run.accumulate_gradients = sometimes_nan  # type: ignore[method-assign]
    finish(run)
    steps = entries(tmp_path / "run")
    assert [entry["step"] for entry in steps if entry["skipped"]] == [5, 6, 10]
    assert [entry["step"] for entry in steps if entry["loss"] is None] == [5, 6, 10]
    assert steps[4]["not_finite"] == {"loss": "nan"}
    assert all(torch.isfinite(p).all() for p in run.trainer.parameters.values())
    assert int(run.judge.skipped) == 3


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (range(4, 18), r"most updates were skipped\[/\], 14 of 20: the loss or .*; lower optim\.lr"),
        (range(4, 14), r"^10 update\(s\) skipped by the bad-step policy$"),
    ],
)
def test_a_run_of_which_most_updates_were_skipped_says_so(tmp_path: Path, bad: range, said: str) -> None:
    run = begin(configured(tmp_path, {"optim.bad_step.max_in_a_row": 20}))
    original = run.accumulate_gradients

    def often_nan(batch: Batch) -> torch.Tensor:
        loss = original(batch)
        return loss * math.nan if run.progress.step in bad else loss

    run.accumulate_gradients = often_nan  # type: ignore[method-assign]
    result = finish(run)
    lines = closing(run, result).splitlines()
    assert "done" in lines[0]
    assert re.search(said, lines[1])


def test_a_hopeless_run_stops_with_a_good_checkpoint_before(tmp_path: Path) -> None:
    config = configured(tmp_path, {"optim.bad_step.max_in_a_row": 3})
    run = begin(config)
    original = run.accumulate_gradients

    def broken(batch: Batch) -> torch.Tensor:
        loss = original(batch)
        return loss * math.inf if run.progress.step >= 11 else loss

    run.accumulate_gradients = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"3 updates in a row were skipped.*lower optim.lr"):
        finish(run)
    assert [entry["skipped"] for entry in entries(tmp_path / "run")][-4:] == [0, 1, 1, 1]
    notes: list[str] = []
    again = begin(config, notes)
    assert again.progress.step == 10
    finish(again)
    run_all(tmp_path, {"optim.bad_step.max_in_a_row": 3}, "straight")
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


def _counted_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the graphs that are compiled from here on."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    torch.compiler.reset()
    compile_model = Decoder.compile
    monkeypatch.setattr(Decoder, "compile", lambda model: compile_model(model, backend=count))
    return graphs


def test_a_compiled_run_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of fewer sequences, evaluations and the sample at the end compile nothing, and change no figure."""
    changes: dict[str, Any] = {
        "train.steps": 9,
        "train.global_batch": 6,
        "train.micro_batch": 3,
        "optim.batch_warmup.start": 2,
        "optim.batch_warmup.increment": 2,
        "optim.batch_warmup.every_steps": 2,
        "evaluate.every_steps": 4,
        "evaluate.sample_prompt": "the",
        "evaluate.sample_tokens": 12,
        "model.layers": 1,
    }
    run_all(tmp_path, changes)
    graphs = _counted_graphs(monkeypatch)
    assert "a sample" in run_all(tmp_path, changes | {"train.compile": True}, "compiled")
    assert len(graphs) == 1
    plain, compiled = (figures(tmp_path / name) for name in ("run", "compiled"))
    assert len(plain) == len(compiled) == 9 + 3
    for one, other in zip(plain, compiled, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_a_prompt_is_continued_at_each_evaluation_and_training_goes_on_as_without(tmp_path: Path) -> None:
    prompt = {"evaluate.sample_prompt": "the", "evaluate.sample_tokens": 8}
    changes = {"train.steps": 6, "evaluate.every_steps": 2, **prompt}
    run_all(tmp_path, changes, "plain")
    assert not read_samples(tmp_path / "plain")
    run_all(tmp_path, changes | {"evaluate.sample_at_evaluations": True})
    samples = read_samples(tmp_path / "run")
    assert [sample.step for sample in samples] == [2, 4, 6]
    assert {sample.prompt for sample in samples} == {"the"}
    assert all(sample.text for sample in samples)
    assert figures(tmp_path / "run") == figures(tmp_path / "plain")
    with pytest.raises(UserError, match="sample_prompt"):
        configured(tmp_path, {"evaluate.sample_at_evaluations": True})


def test_sampling_at_the_end_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model would be compiled again for the text of each length: the sample is taken from the plain one."""
    graphs = _counted_graphs(monkeypatch)
    changes = {"evaluate.sample_prompt": "the", "evaluate.sample_tokens": 12, "model.layers": 1}
    run = begin(configured(tmp_path, changes | {"train.compile": True}))
    run.folder.release()
    text = sample(run)
    assert text.startswith("the")
    assert not graphs
    run.trainer.model(torch.zeros(1, 4, dtype=torch.int64))
    assert graphs
