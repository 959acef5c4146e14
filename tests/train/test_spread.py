"""`phalanx train` in several real processes: same figures, same bits after kills, one end for all, honest refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from support.open_checkpoint import open_checkpoint
from support.tiny import WORDS
from train_helpers import (
    Commands,
    Ended,
    configured,
    copies,
    ended,
    entries,
    figures,
    overrides,
    run_all,
    wait_for_step,
)

from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.feasible import needed_bytes
from phalanx.telemetry.run_list import read_run
from phalanx.telemetry.run_samples import read_samples, read_why_none
from phalanx.telemetry.run_status import run_status
from phalanx.train.derived.run_layout import task_of

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

STEPS = 24
SETTINGS: dict[str, Any] = {
    "train.steps": STEPS,
    "train.global_batch": 4,
    "train.micro_batch": 1,
    "checkpoint.every_steps": 8,
    "evaluate.every_steps": 12,
    "evaluate.tokens": 128,
    "model.dropout": 0.1,
    "model.vocab_multiple": 64,
}
PROMPTS = {"data.sources.0.prompt_field": "question"}
TWO = {"parallel.pipeline": 2, "model.tie_embeddings": False}
FOUR: dict[str, Any] = PROMPTS | {
    "parallel.shard": 2,
    "parallel.tensor": 2,
    "parallel.zero": 2,
    "parallel.tensor_overlap": "auto",
    "evaluate.sample_prompt": "the",
    "evaluate.sample_at_evaluations": True,
}


def spread(folder: Path, commands: Commands, changes: Mapping[str, Any], run: str) -> Ended:
    """`phalanx train` with ranks of its own."""
    return commands.run(folder, *command(folder, changes, run))


def command(folder: Path, changes: Mapping[str, Any], run: str) -> list[str]:
    (folder / "tiny.toml").write_text("")
    return ["train", "tiny.toml", *overrides(folder, SETTINGS | dict(changes), run)]


def assert_close(found: Path, expected: Path) -> None:
    """Steps and evaluations as often, in the same order, with the same figures to 1e-5."""
    mine, theirs = figures(found), figures(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [*found, *(below for child in found for below in descendants(child))]


def await_end(pids: list[int]) -> None:
    """Wait until all of them are gone, which must be soon."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert wait([descriptor], 10), f"{pid} is still there"
        os.close(descriptor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the corpus, with prompts so long that some steps have no target, and the runs ``single`` and ``four``."""
    folder, chosen = tmp_path_factory.mktemp("spread"), random.Random(0)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for _ in range(60):
            fields = {
                name: " ".join(chosen.choices(WORDS, k=count)) for name, count in (("question", 28), ("text", 12))
            }
            corpus.write(json.dumps(fields) + "\n")
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    run_all(folder, SETTINGS | PROMPTS, "single")
    return folder / "single"


@pytest.fixture(scope="module")
def four(folder: Path, commands: Commands) -> Path:
    """A run of four ranks from beginning to end."""
    result = spread(folder, commands, FOUR, "four")
    assert result.status == 0, result
    assert "ranks: 4, " in result.out and "fs2·tp2" in result.out
    if not torch.cuda.is_available():
        assert "parallel.tensor_overlap = 'auto' is 'chunked': it computes on a CPU" in result.out
    assert result.err == ""
    return folder / "four"


@pytest.mark.slow
def test_four_ranks_have_the_figures_of_one(single: Path, four: Path) -> None:
    assert_close(four, single)
    assert [entry["step"] for entry in entries(four)] == list(range(1, STEPS + 1))
    assert 0 < sum("untrained" in entry for entry in entries(four)) < STEPS / 2


def test_a_model_that_is_spread_makes_no_samples_and_says_why(four: Path) -> None:
    assert not read_samples(four)
    assert read_why_none(four) == "no rank holds the whole model"


@pytest.mark.campaign
def test_two_stages_have_the_figures_of_one(folder: Path, single: Path, commands: Commands) -> None:
    result = spread(folder, commands, TWO | PROMPTS, "two")
    assert result.status == 0, result
    assert_close(folder / "two", single)


def test_what_four_ranks_saved_can_be_evaluated_and_sampled_from(
    folder: Path, single: Path, four: Path, commands: Commands
) -> None:
    result = commands.run(folder, "evaluate", str(four), "--json")
    assert result.status == 0, result
    final = entries(four, "evaluation")[-1]
    assert final["step"] == STEPS
    found = json.loads(result.out)
    assert found["loss"] == pytest.approx(final["validation_loss"], rel=1e-5)
    texts = []
    for run in (four, single):
        result = commands.run(folder, "generate", str(run), "the quick", "--temperature", "0", "--tokens", "12")
        assert result.status == 0, result
        texts.append(result.out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the quick") and len(texts[0]) > len("the quick\n")


def test_one_process_goes_on_with_what_four_saved(folder: Path, single: Path, four: Path) -> None:
    copy = folder / "went on"
    subprocess.run(["cp", "-r", str(four), str(copy)], check=True)
    newest = list(copies(copy))[-1]
    subprocess.run(["rm", "-r", str(newest)], check=True)
    assert f"step 16 of {STEPS}" in run_all(folder, SETTINGS | PROMPTS, "went on")
    assert_close(copy, single)


@pytest.mark.slow
def test_a_job_that_is_stopped_and_killed_goes_on_bit_for_bit(folder: Path, four: Path, commands: Commands) -> None:
    run, arguments = folder / "ended", command(folder, FOUR, "ended")
    process = commands.start(folder, arguments)
    wait_for_step(process, run, 5)
    os.kill(process.pid, signal.SIGTERM)
    result = ended(process, folder)
    assert result.status == 128 + signal.SIGTERM, result
    assert result.err == ""
    stopped = entries(run)[-1]["step"]
    assert 5 <= stopped < STEPS
    assert f"stopped by SIGTERM after step {stopped} of {STEPS}" in result.out
    assert open_checkpoint(list(copies(run))[-1]).step == stopped

    process = commands.start(folder, arguments)
    wait_for_step(process, run, stopped + 3)
    below = descendants(process.pid)
    assert len(below) >= 5  # the template and four ranks
    process.kill()
    process.join()
    await_end(below)
    assert len(entries(run)) < STEPS, "the kill came too late"

    result = commands.run(folder, *arguments)
    assert result.status == 0, result
    assert "going on from" in result.out
    assert figures(run) == figures(four)


def test_a_rank_that_raises_ends_all_and_is_read_last(tmp_path: Path, commands: Commands) -> None:
    config = configured(tmp_path, SETTINGS | TWO | {"checkpoint.every_steps": 0})
    result = commands.ranks(tmp_path, config, "spread_targets:raise_at_step_5", str(tmp_path))
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    assert result.status == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    lines = result.err.splitlines()
    assert lines[-1].startswith("ArithmeticError: rank 1 has come to step 5")
    mark = next(index for index, line in enumerate(lines) if line.startswith("rank 1 of 2 on "))
    assert "pipeline 1" in lines[mark]
    assert lines[mark + 2].startswith("Traceback"), "the traceback stands under the mark"
    assert "\n".join(lines[mark:]).count("Traceback") == 1
    for row in (read_run(tmp_path / "run"), run_status(tmp_path / "run")):  # rank 0 has only lost its peer
        assert (row.state, row.why) == ("failed", "rank 1: ArithmeticError: rank 1 has come to step 5")


@pytest.mark.campaign(but=("1-0",))
@pytest.mark.parametrize(("culprit", "stuck"), [(0, None), (1, 0)])
def test_out_of_memory_on_one_rank_ends_all_with_its_words(
    tmp_path: Path, commands: Commands, culprit: int, stuck: int | None
) -> None:
    """Also one that waits where nothing wakes it, as over NCCL, and also where the store goes with the culprit."""
    config = configured(tmp_path, SETTINGS | TWO | {"checkpoint.every_steps": 0})
    begun_s = time.monotonic()
    result = commands.ranks(tmp_path, config, "spread_targets:run_out_of_memory", str(tmp_path), culprit, stuck)
    assert time.monotonic() - begun_s < 60, result.err  # of a wait of half an hour
    said = {rank: tmp_path / f"said-{rank}" for rank in range(2)}
    expected = f"train.micro_batch = 1: 1 x 16 tokens at once do not fit into memory of rank {culprit} (no room); set "
    for rank, file in said.items():
        if rank != stuck:
            assert file.read_text().startswith(expected), result.err
    assert len({file.read_text() for file in said.values() if file.exists()}) == 1
    assert (stuck is None) == all(file.exists() for file in said.values())


def test_ranks_of_unequal_memory_take_one_layout(tmp_path: Path, commands: Commands) -> None:
    config = configured(tmp_path, SETTINGS | {"parallel.devices": 2, "optim.name": "adamw", "model.vocab_size": 512})
    little = needed_bytes(ParallelConfig(shard=2, zero=1), task_of(config, 1))
    # The ranks of a host share what is free: half of this is too little, unless more than the state is split.
    free = [little + little // 2 if rank == 1 else 1 << 40 for rank in range(2)]
    assert commands.ranks(tmp_path, config, "spread_targets:have_unequal_memory", str(tmp_path), free).status == 0
    layouts = [json.loads((tmp_path / f"layout-{rank}").read_text()) for rank in range(2)]
    assert layouts[0] == layouts[1]
    assert layouts[0]["shard"] == 2 and layouts[0]["zero"] > 1, "rank 0 alone would split the state and nothing else"


_REFUSED = """
import contextlib, io, json, sys
from phalanx.cli.main import main
refusals = []
for changes in json.loads(sys.argv[1]):
    said = io.StringIO()
    status = 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(["train", "tiny.toml", *json.loads(sys.argv[2]), *changes])
        except SystemExit as end:
            status = end.code
    refusals.append((status, said.getvalue()))
print(json.dumps([refusals, "torch" in sys.modules]))
"""


def test_impossible_layouts_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("")
    wrong = {
        "parallel.tensor=3": "parallel.tensor",
        "parallel.shard=3": "train.global_batch",
        "parallel.context=3": "parallel.context",
        "parallel.pipeline=8": "layers",
        "parallel.devices=2 parallel.tensor=4": "parallel.devices",
    }
    given = overrides(tmp_path, SETTINGS)
    program = [sys.executable, "-c", _REFUSED, json.dumps([keys.split() for keys in wrong]), json.dumps(given)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    refusals, has_torch = json.loads(done.stdout)
    for (status, said), (keys, named) in zip(refusals, wrong.items(), strict=True):
        assert status == 2, (keys, said)
        assert named in said, (keys, said)
    assert not has_torch
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
@pytest.mark.slow
def test_torchrun_starts_the_same_run(folder: Path, four: Path) -> None:
    (folder / "tiny.toml").write_text("")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    arguments = [*torchrun, "-m", "phalanx", *command(folder, FOUR, "torchrun")]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert figures(folder / "torchrun") == figures(four)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "layout",
    [
        {"replicate": 2},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3},
        {"tensor": 2},
        {"tensor": 2, "tensor_overlap": "chunked"},
        {"context": 2},
        {"context": 2, "context_method": "all_to_all"},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "zbv"},
    ],
    ids=lambda layout: " ".join(f"{key}={value}" for key, value in layout.items()),
)
def test_two_ranks_on_one_gpu_train_as_one_process(
    tmp_path: Path, commands: Commands, layout: Mapping[str, Any]
) -> None:
    """The CUDA path of a layout; what NCCL would carry goes through the host."""
    same = {
        "train.device": "cuda",
        "train.precision": "fp32",
        "train.compile": False,
        "model.attention_backend": "math",
        "model.layers": 4,  # zbv has two chunks on each of two stages
    }
    spread_out = {f"parallel.{key}": value for key, value in layout.items()} | {"parallel.share_device": True}
    for run, changes in (("one", same), ("two", same | spread_out)):
        done = spread(tmp_path, commands, changes, run)
        assert done.status == 0, done
    mine, theirs = figures(tmp_path / "two"), figures(tmp_path / "one")
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
