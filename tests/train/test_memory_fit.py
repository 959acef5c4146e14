"""Micro-batch and recompute from predicted memory, as the trainer takes them on a GPU."""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from train_helpers import begin, configured

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.launch.environment import Worker
from phalanx.plan.memory.rank import rank_memory
from phalanx.train import assemble, start
from phalanx.train.config import RunConfig
from phalanx.train.derived.memory_fit import GPU_MEMORY_SHARE, LEVELS, Fit, Level, Passes, off_line
from phalanx.train.derived.run_numbers import complete_model
from phalanx.train.device import Device
from phalanx.train.ranks import Ranks
from phalanx.train.run_folder import Refused, RunFolder
from phalanx.train.training_run import Run, choose_passes

GIB = float(1 << 30)
MODEL = {"vocab_size": 32000, "layers": 24, "hidden": 2048, "heads": 16}


def fit(gib: float, *, sequence: int = 2048, batch: int = 32, micro_batch: int = 0, **train: Any) -> Fit:
    settings = {
        "model": MODEL,
        "data": {"sequence_length": sequence},
        "train": {"steps": 1, "global_batch": batch, "precision": "bf16"} | train,
    }
    config = validate(RunConfig, settings)
    model, parallel = complete_model(config, 32000), config.parallel
    return Fit.of(config, model, parallel, "bf16", device_bytes=gib * GIB, micro_batch=micro_batch)


@pytest.mark.parametrize(("on_cpu", "levels"), [(False, ("none", "full")), (True, LEVELS)])
def test_only_what_is_compiled_in_pieces_has_fewer_choices(on_cpu: bool, levels: tuple[Level, ...]) -> None:
    text = {"sources": [{"kind": "text", "path": "here"}]}
    settings = {"model": {"attention_backend": "chunked"}, "train": {"steps": 1}, "data": text}
    config = RunConfig.model_validate(settings)
    model = config.model.model_copy(update={"vocab_size": 256, "max_sequence": 64})
    made = Fit.of(config, model, config.parallel, "bf16", device_bytes=GIB, on_cpu=on_cpu)
    assert made.levels == levels


def test_nothing_is_computed_again_where_enough_fits_without() -> None:
    found = fit(141.0)
    chosen = found.choose()
    assert (chosen.recompute, chosen.micro_batch) == ("none", 16)
    assert chosen.predicted_bytes <= GPU_MEMORY_SHARE * 141 * GIB < found.predicted(32, "none").predicted_bytes


@pytest.mark.parametrize(("gib", "expected"), [(46.0, "none"), (39.0, "selective"), (33.0, "mlp"), (28.0, "full")])
def test_less_memory_computes_more_again(gib: float, expected: Level) -> None:
    chosen = fit(gib).choose()
    assert chosen.recompute == expected
    assert chosen.micro_batch * 2048 >= 8192
    assert chosen.predicted_bytes <= GPU_MEMORY_SHARE * gib * GIB


def test_short_of_enough_the_level_with_most_tokens_is_taken() -> None:
    found = fit(27.0)
    chosen = found.choose()
    sizes = {level: found._largest(level) for level in LEVELS}
    assert chosen.micro_batch == max(each.micro_batch for each in sizes.values() if each is not None) < 4


def test_what_is_asked_for_is_kept() -> None:
    assert fit(40.0, recompute="full").choose().recompute == "full"
    assert fit(40.0, micro_batch=2).choose().micro_batch == 2
    assert fit(33.0, micro_batch=32).choose() == fit(33.0).predicted(32, "full")


def test_where_nothing_fits_the_least_is_taken_and_said() -> None:
    found = fit(8.0)
    chosen = found.choose()
    assert (chosen.micro_batch, chosen.recompute) == (1, "full")
    assert found.line(chosen).startswith("micro-batch 1 of 32 sequences, recompute full: ")
    assert found.line(chosen).endswith("of 8.00 GiB predicted, more than there is: it will probably not fit")


def test_whether_a_layout_fits_counts_what_is_computed_again_and_what_is_left_free() -> None:
    least = fit(80.0).least().predicted_bytes / GIB
    without = min(fit(80.0).predicted(1, level).predicted_bytes for level in LEVELS[:-1]) / GIB
    assert least < 0.97 * without
    for gib, verdict in (
        (without / GPU_MEMORY_SHARE * 1.01, "well"),
        (without / GPU_MEMORY_SHARE * 0.99, "slowly"),
        (least / GPU_MEMORY_SHARE * 0.99, "barely"),
        (least * 0.99, "no"),
    ):
        need = fit(gib).need()
        assert (need.verdict, need.num_bytes) == (verdict, least * GIB)
    assert fit(without / GPU_MEMORY_SHARE * 0.99, recompute="full").need().verdict == "well", "it was asked for"
    short = fit(least * 0.99, recompute="none").need()
    assert "train.recompute=auto" in short.cure and "activations" in short.parts


@settings(deadline=None, max_examples=30)
@given(st.floats(20, 200), st.sampled_from((512, 2048, 8192)), st.sampled_from((1, 6, 32)))
def test_a_choice_fits_or_is_the_least_and_smaller_ones_end(gib: float, sequence: int, batch: int) -> None:
    found = fit(gib, sequence=sequence, batch=batch)
    choice: Passes | None = found.choose()
    assert choice is not None and batch % choice.micro_batch == 0
    least = min(
        (found.predicted(size, level) for size in found.micro_batches for level in LEVELS),
        key=lambda each: each.predicted_bytes,
    )
    assert choice.predicted_bytes <= found.limit_bytes or choice == least
    seen = []
    while choice is not None:
        seen.append(choice)
        choice = found.smaller(choice)
    assert all(a.predicted_bytes > b.predicted_bytes for a, b in itertools.pairwise(seen))
    assert seen[-1] == least


def test_far_predictions_are_told() -> None:
    choice = Passes(1, "none", 11 * GIB, 10 * GIB)
    assert off_line(choice, 10.9 * GIB) == off_line(choice, 9.1 * GIB) == ""
    assert off_line(choice, 12 * GIB) == "memory: 12.00 GiB at most, +20% of the 10.00 GiB that were predicted"


@dataclass(frozen=True)
class _Gpu(Device):
    """The host, said to be a GPU with so much memory, of which so much is in use."""

    total: int = 0
    most: int = 0

    @property
    def torch_device(self) -> Any:  # type: ignore[override]
        return _FakeType

    def memory_bytes(self) -> int:
        return self.total

    def memory_in_use_bytes(self) -> int:
        return self.most

    def release_unused(self) -> None:
        pass


class _FakeType:
    type = "cuda"


def on_gpu(run: Run, total: int, most: int = 0) -> list[str]:
    run.device = replace(run.device)
    notes: list[str] = []
    device = run.device
    fake = object.__new__(_Gpu)
    for name in ("name", "compute_dtype", "threads"):
        object.__setattr__(fake, name, getattr(device, name))
    object.__setattr__(fake, "total", total)
    object.__setattr__(fake, "most", most)
    run.device, run.note = fake, notes.append
    return notes


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path) -> Run:
    run = begin(configured(tmp_path, {"train.micro_batch": 0, "train.recompute": "auto"}))
    run.folder.release()
    return run


def test_a_cpu_computes_nothing_again_and_predicts_nothing(run: Run) -> None:
    assert run.fit is None and run.progress.recompute == "none"


def test_a_gpu_says_what_it_takes_and_keeps_it(run: Run) -> None:
    notes = on_gpu(run, 1 << 30)
    choose_passes(run, notes.append)
    assert run.fit is not None and notes == [run.fit.line(run.passes)]
    assert (run.progress.micro_batch, run.progress.recompute) == (run.passes.micro_batch, "none")
    assert run.progress.to_json()["recompute"] == "none"


def test_a_resumed_run_computes_as_much_again_as_it_did(run: Run) -> None:
    on_gpu(run, 1 << 30)
    run.progress.micro_batch, run.progress.recompute = 2, "mlp"
    choose_passes(run, lambda _: None, keep=True)
    assert (run.progress.micro_batch, run.progress.recompute) == (2, "mlp")
    assert {block.recompute for block in run.trainer.model.layers} == {"mlp"}  # type: ignore[attr-defined]


def test_out_of_memory_takes_the_next_smaller_choice_and_the_same_gradients(run: Run) -> None:
    expected = _gradients(run)
    notes = on_gpu(run, 1 << 30)
    choose_passes(run, lambda _: None)
    before, passes, refused = run.passes, run.trainer.accumulate_gradients, []

    def refuse(*args: Any, **named: Any) -> Any:
        if not refused:
            refused.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return passes(*args, **named)

    run.trainer.accumulate_gradients = refuse  # type: ignore[method-assign]
    got = _gradients(run)
    assert (run.passes.micro_batch, run.passes.recompute) == (before.micro_batch, "selective")
    assert notes == [f"out of memory, against the prediction; now {run.fit.line(run.passes)}"]  # type: ignore[union-attr]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_out_of_memory_with_nothing_smaller_ends_the_run(run: Run) -> None:
    on_gpu(run, 1 << 30)
    choose_passes(run, lambda _: None)

    def refuse(*_args: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.trainer.accumulate_gradients = refuse  # type: ignore[method-assign]
    with pytest.raises(UserError, match="1 x 16 tokens at once do not fit"):
        run.accumulate_gradients(run.loader.batch(0, 4))
    assert (run.passes.micro_batch, run.passes.recompute) == (1, "full")


@dataclass
class _OneOfTwo:
    """What a second rank, with nothing of its own to say, agrees to."""

    rank = 0
    size = 2

    def lowest(self, value: Any) -> Any:
        return value

    def broadcast(self, value: Any) -> Any:
        return value


def test_what_one_of_several_ranks_had_no_memory_for_is_not_tried_again(run: Run) -> None:
    on_gpu(run, 1 << 30)
    run.ranks = Ranks(_OneOfTwo())  # type: ignore[arg-type]
    said: list[str] = []
    choose_passes(run, said.append)
    passes = run.trainer.accumulate_gradients

    def refuse(*_args: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    seen = []
    while run.passes not in seen:
        seen.append(run.passes)
        run.trainer.accumulate_gradients = refuse  # type: ignore[method-assign]
        smaller = run.fit.smaller(run.passes)  # type: ignore[union-attr]
        then = f"start again, and all take micro-batch {smaller.micro_batch}, recompute" if smaller else "set train"
        with pytest.raises(UserError, match=rf"do not fit into memory of rank 0 \(CUDA.*; ({then}|take a smaller)"):
            run.accumulate_gradients(run.loader.batch(0, 4))
        run.trainer.accumulate_gradients = passes  # type: ignore[method-assign]
        said.clear()
        choose_passes(run, said.append, keep=True)  # as the next start does
        if smaller is not None:
            assert run.passes == smaller and said[0].startswith("a rank had no memory for micro-batch ")
    assert len(seen) > 3 and seen[-1].recompute == "full" and seen[-1].micro_batch == 1


def test_what_was_refused_in_another_layout_says_nothing(run: Run) -> None:
    on_gpu(run, 1 << 30)
    run.ranks = Ranks(_OneOfTwo())  # type: ignore[arg-type]
    choose_passes(run, lambda _: None)
    first = run.passes
    Refused("fs2", first.micro_batch, first.recompute).write(run.folder)
    choose_passes(run, lambda _: None)
    assert run.passes == first
    run.folder.out_of_memory.write_text("{")
    choose_passes(run, lambda _: None)
    assert run.passes == first


def test_ranks_are_started_again_as_long_as_there_is_less_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, {"parallel.devices": 2})
    folder = RunFolder(Path(config.run.folder))
    folder.path.mkdir()
    ends, out = iter((2, 2, 2, 0)), io.StringIO()

    def launched(*_args: Any, **_named: Any) -> int:
        status = next(ends)
        if status and left:
            Refused("dp2", left.pop(), "none").write(folder)
        return status

    monkeypatch.setattr(start, "launch_local", launched)
    monkeypatch.setattr(start, "resolve_layout", lambda config, *args: config)
    left = [2, 4]
    assert start.start_ranks(config, Path("tiny.toml"), Console(file=out)) == 2
    assert out.getvalue().count("starting again, with less in memory at a time") == 2
    assert start.start_ranks(config, Path("tiny.toml"), Console(file=out)) == 0


def test_after_the_second_step_a_far_prediction_is_told(run: Run) -> None:
    notes = on_gpu(run, 1 << 30, most=1 << 29)
    choose_passes(run, lambda _: None)
    run.updated()
    assert not notes
    run.updated()
    run.updated()
    assert len(notes) == 1 and notes[0].startswith("memory: 512.00 MiB at most, +")


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    run.accumulate_gradients(run.loader.batch(0, 4))
    return {name: p.grad.clone() for name, p in run.trainer.parameters.items() if p.grad is not None}


def test_offload_is_counted_and_said_to_have_no_effect_on_a_cpu(tmp_path: Path) -> None:
    none, half, whole = (fit(80.0, offload=share).predicted(8, "none") for share in (0.0, 0.5, 1.0))
    layer = (none.allocated_bytes - whole.allocated_bytes) / 22  # all of 24 but the two on their way
    assert none.allocated_bytes - half.allocated_bytes == pytest.approx(10 * layer)
    notes: list[str] = []
    begin(configured(tmp_path, {"train.offload": 0.5}), notes).folder.release()
    assert any("train.offload = 0.5 has no effect" in note for note in notes)


class _Peers:
    """Ranks that are threads."""

    def __init__(self, rank: int, values: list[Any], together: Barrier) -> None:
        self.rank, self.size, self._values, self._together = rank, len(values), values, together

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._together.wait(120)
        found = list(self._values)
        self._together.wait(120)
        return found

    def collect(self, value: Any) -> list[Any] | None:
        found = self.gather(value)
        return None if self.rank else found

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def decided(config: RunConfig, gib_of_ranks: list[float]) -> list[RunConfig | UserError]:
    """What each rank takes for its layout, on GPUs with so much memory."""
    values, together = [None] * len(gib_of_ranks), Barrier(len(gib_of_ranks))

    def one(rank: int) -> RunConfig | UserError:
        size = len(gib_of_ranks)
        worker = Worker(rank, rank, size, size, "localhost", 1)
        ranks = Ranks(_Peers(rank, values, together), worker)  # type: ignore[arg-type]
        device = object.__new__(_Gpu)
        total = int(gib_of_ranks[rank] * GIB)
        for name, value in (("name", "x"), ("compute_dtype", torch.bfloat16), ("threads", 1), ("total", total)):
            object.__setattr__(device, name, value)
        object.__setattr__(device, "available_bytes", lambda: total)
        try:
            prepared: Any = SimpleNamespace(vocab_size=32000)
            return assemble._with_layout(config, prepared, ranks, device, lambda _: None)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(gib_of_ranks)) as pool:
        return list(pool.map(one, range(len(gib_of_ranks))))


def test_ranks_of_unequal_memory_take_the_layout_that_fits_the_least() -> None:
    """Weights, gradients and state of 1.3B parameters are 20 GiB; activations of a sequence as much again."""
    tree = {
        "model": MODEL,
        "data": {"sequence_length": 4096},
        "train": {"steps": 1, "global_batch": 32, "precision": "bf16"},
        "optim": {"name": "adamw"},
        "parallel": {"devices": 2},
    }
    config = validate(RunConfig, tree)
    alike = decided(config, [80.0, 80.0])
    unequal = decided(config, [80.0, 18.0])
    for found in (alike, unequal):
        assert all(isinstance(one, RunConfig) for one in found) and found[0] == found[1]
    rich, poor = alike[0], unequal[0]
    assert isinstance(rich, RunConfig) and isinstance(poor, RunConfig)
    assert (rich.parallel.shard, rich.parallel.zero) == (2, 1) and poor.parallel != rich.parallel
    model = complete_model(poor, 32000)
    micro_batch = poor.train.micro_batch
    made = Fit.of(poor, model, poor.parallel, "bf16", device_bytes=18 * GIB, micro_batch=micro_batch)
    strategy = made.strategy(made.choose().micro_batch, made.choose().recompute)
    assert max(rank.total for rank in rank_memory(made.job, strategy)) <= GPU_MEMORY_SHARE * 18 * GIB
    refused = decided(config, [80.0, 2.0])
    assert all(isinstance(one, UserError) and "The nearest: weights" in str(one) for one in refused)
    assert str(refused[0]) == str(refused[1])
