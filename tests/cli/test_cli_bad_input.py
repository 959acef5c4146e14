"""What a person can get wrong: each is one line with the cure, exit status 2, no traceback, and before any step."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_helpers import Commands, copies, entries, overrides

Setup = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """A mistake: what is put into the folder first, which settings differ, and what stderr must say.

    `says` are regular expressions that must be found in the one line, the last one being about the cure.
    """

    name: str
    says: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    setup: Setup | None = None
    extra: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    config: str = "tiny.toml"


def _corpus(content: bytes) -> Setup:
    def write(folder: Path) -> None:
        (folder / "corpus.jsonl").write_bytes(content)

    return write


def _file(name: str, content: bytes) -> Setup:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def _text(content: bytes) -> dict[str, Any]:
    return {"setup": _corpus(content), "changes": {"data.sources.0.kind": "text", "data.validation_split": "tail"}}


def _tokens(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    settings = {"data.sources.0.kind": "nanogpt", "data.tokenizer.kind": "none", "data.tokenizer.vocab_size": 300}
    return {"setup": _corpus(array.tobytes()), "changes": settings | changes}


CONFIGS = [
    Case("no config", ("nothing.toml", "there is no such config file", "check the path"), config="nothing.toml"),
    Case("config is a folder", ("cannot be read", "check the path"), config="."),
    Case(
        "no TOML",
        ("bad.toml.*line 2", "correct that line"),
        config="bad.toml",
        setup=_file("bad.toml", b"a = 1\nb = = 2\n"),
    ),
    Case("config not UTF-8", ("bad.toml.*UTF-8", "save"), config="bad.toml", setup=_file("bad.toml", b"a = '\xff'")),
    Case("unknown key", ("train.stepz", "did you mean train.steps"), extra=("train.stepz=3",)),
    Case(
        "unknown key in the file",
        ("model.layer:", "did you mean model.layers"),
        config="bad.toml",
        setup=_file("bad.toml", b"[model]\nlayer = 3"),
    ),
    Case("no UTF-8", ("is not UTF-8 text", "UTF-8"), extra=("evaluate.sample_prompt=\udcff",)),
    Case("no pair", ("train.steps", "key=value"), extra=("train.steps",)),
    Case("not a number", ("train.steps = 'many'", "optimizer steps"), extra=("train.steps=many",)),
    Case("a table for a number", ("train.steps.x", "did you mean train.steps"), extra=("train.steps.x=3",)),
    Case("negative", ("train.global_batch = -1", "sequences per optimizer step"), {"train.global_batch": -1}),
    Case("no length", ("train.steps or train.tokens",), {"train.steps": 0}),
    Case("two lengths", ("steps = 20 and tokens = 99", "one of them"), {"train.tokens": 99}),
    Case("heads", ("heads = 3 does not divide hidden = 32", "multiple of heads"), {"model.heads": 3}),
    Case("key heads", ("kv_heads = 3 does not divide heads = 2", "take one of 1, 2"), {"model.kv_heads": 3}),
    Case("micro-batch", ("micro_batch = 3 does not divide global_batch = 4", "divisor"), {"train.micro_batch": 3}),
    Case("window unset", ("window = 0", "set window"), {"model.attention": ["window"]}),
    Case("attention dropout", ("attention_dropout", "math"), {"model.attention_dropout": 0.1}),
    Case("warm-up", ("warmup_steps = 50.*20 steps", "fewer steps"), {"optim.schedule.warmup_steps": 50}),
    Case(
        "batch warm-up",
        ("batch_warmup.start = 9.*full batch of 4", "at most 4"),
        {"optim.batch_warmup.start": 9, "optim.batch_warmup.increment": 1, "optim.batch_warmup.every_steps": 1},
    ),
    Case("pattern", ("fits no parameter", "names are such as"), extra=('optim.groups=[{pattern="x", lr=1.0}]',)),
    Case("sequence", ("max_sequence = 8.*sequence_length = 16", "16 or more"), {"model.max_sequence": 8}),
    Case("vocabulary", ("model.vocab_size = 99.*257 ids", "257 or more"), {"model.vocab_size": 99}),
    Case(
        "vocabulary of a trained tokenizer",
        ("model.vocab_size = 10.*300 ids", "300 or more"),
        {"model.vocab_size": 10, "data.tokenizer.kind": "bpe", "data.tokenizer.vocab_size": 300},
    ),
    Case("no tokenizer", ("gone.json", "give"), {"data.tokenizer.kind": "file", "data.tokenizer.path": "gone.json"}),
    Case(
        "no tokenizer.json",
        ("tokenizer.json", ";"),
        {"data.tokenizer.kind": "file", "data.tokenizer.path": "tiny.toml"},
    ),
    Case(
        "pipeline of too few layers",
        ("pipeline.*2 layers|layers.*pipeline", "."),
        {"parallel.pipeline": 4, "parallel.devices": 4},
    ),
    Case(
        "nothing held out",
        ("evaluate.every_steps = 5.*no held-out text", "evaluate.every_steps=0"),
        {"evaluate.every_steps": 5, "data.validation_fraction": 0.0},
    ),
    Case("no sources", ("data.sources", "corpora"), extra=("data.sources=[]",)),
    Case(
        "several at once", ("2 settings are wrong", "train.seed = -1", "correct each"), extra=("train.seed=-1", "x=1")
    ),
]

TEXTS = [
    Case("no such text", ("nowhere.txt", "path|check"), {"data.sources.0.path": "nowhere.txt"}),
    Case("no file fits", (r"\*\.txt", "path|pattern|check"), {"data.sources.0.path": "*.txt"}),
    Case("empty corpus", ("corpus.jsonl.*is empty", "check the path"), setup=_corpus(b"")),
    Case("empty text", ("corpus.jsonl.*is empty", "check the path"), **_text(b"")),
    Case("shorter than a sample", ("a sample needs 17", "add text"), **_text(b"short")),
    Case("shorter than a batch", ("train.global_batch = 4.*fewer than one batch", "add text"), **_text(b"word " * 9)),
    Case("bad UTF-8", ("UTF-8", "bad_utf8"), **_text(b"good text\n" * 50 + b"\xff\xfe" + b"more text\n" * 50)),
    Case("no JSON", ("corpus.jsonl.*line 2|line 2.*corpus.jsonl", ";"), setup=_corpus(b'{"text": "a b"}\n{oops\n')),
    Case("no such field", ("text", "missing_field|field"), setup=_corpus(b'{"body": "a b c"}\n' * 50)),
    Case("ids beyond", ("999", "vocab_size|token_dtype"), **_tokens(np.full(5000, 999, np.uint16))),
    Case("half an id", ("odd|multiple|whole|uint16", ";"), **_tokens(np.zeros(5001, np.uint8))),
    Case(
        "wrong dtype",
        ("vocab_size|token_dtype", ";"),
        **_tokens(np.arange(5000, dtype=np.uint32) * 70000 % 2**31, **{"data.sources.0.token_dtype": "uint32"}),
    ),
    Case("all held out", ("fewer than one batch", "hold less out"), {"data.validation_fraction": 0.999}),
    Case("data folder is a file", ("data.folder", "can write"), {"data.folder": "tiny.toml"}),
]


def _used(folder: Path) -> None:
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)


PLACES = [
    Case("run folder is a file", ("run.folder", "can be written"), {"run.folder": "tiny.toml"}),
    Case("run folder cannot be", ("run.folder", "can be written"), {"run.folder": "/proc/phalanx/run"}),
    Case("no such weights", ("train.init_from = 'gone'", "Hugging Face folder"), {"train.init_from": "gone"}),
    Case("weights are no weights", ("config.json", "Hugging Face folder"), {"train.init_from": "."}),
    Case("too large for memory", ("weights .*gradients .*adamw state", "smaller"), {"model.hidden": 65536}),
    Case(
        "too large for its limit",
        ("weights .* and .* has .* to give", "smaller"),
        {"model.hidden": 1024, "model.layers": 8},
        limits={"RLIMIT_AS": -500_000_000},
    ),
    Case(
        "activations too large",
        ("fit into memory|no memory left", "train.micro_batch.*train.recompute=full"),
        # A single tensor is more than there is, so that small amounts, such as a new thread needs, can always be had.
        {"train.global_batch": 1024, "train.micro_batch": 1024, "data.sequence_length": 1024, "model.hidden": 1024},
        setup=_corpus(b'{"text": "some words to read here, and some more"}\n' * 40000),
        limits={"RLIMIT_AS": -3_000_000_000},
    ),
]
if not torch.cuda.is_available():
    PLACES.append(Case("no CUDA", ("train.device = 'cuda'", "use cpu or auto"), {"train.device": "cuda"}))


@pytest.mark.parametrize("case", CONFIGS + TEXTS + PLACES, ids=lambda case: case.name)
def test_a_mistake_is_one_line_with_its_cure(tmp_path: Path, commands: Commands, case: Case) -> None:
    (tmp_path / "tiny.toml").write_text("")
    if case.setup is not None:
        case.setup(tmp_path)
    arguments = [*overrides(tmp_path, case.changes), *case.extra]
    result = commands.run(tmp_path, "train", case.config, *arguments, limits=case.limits)
    _one_line(result.status, result.err, case.says)
    assert "step 1/" not in result.out
    assert not list(copies(tmp_path / "run"))


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case.name)
def test_what_training_refuses_for_its_settings_explaining_refuses_alike(
    tmp_path: Path, commands: Commands, case: Case
) -> None:
    (tmp_path / "tiny.toml").write_text("")
    if case.setup is not None:
        case.setup(tmp_path)
    result = commands.run(tmp_path, "explain", case.config, *overrides(tmp_path, case.changes), *case.extra)
    _one_line(result.status, result.err, case.says)
    assert result.out == ""


def _one_line(status: int, err: str, says: tuple[str, ...]) -> None:
    assert "Traceback" not in err, err
    assert err.startswith("error: "), err
    assert status == 2, err
    if "settings are wrong" not in err:
        assert err.count("\n") == 1, err
        assert ";" in err, f"no cure: {err}"
    for words in says:
        assert re.search(words, err, re.DOTALL), f"{words!r} is not in {err!r}"


def _copy(trained: Path, folder: Path) -> list[str]:
    """The trained run in a place of its own, and the settings that go on with it."""
    shutil.copytree(trained / "run", folder / "run")
    (folder / "tiny.toml").write_text("")
    return ["train", "tiny.toml", *overrides(trained, {"checkpoint.keep_last": 1}), f"run.folder={folder / 'run'}"]


def test_a_run_of_another_config_offers_both_ways_out(tmp_path: Path, commands: Commands, trained: Path) -> None:
    result = commands.run(tmp_path, *_copy(trained, tmp_path), "optim.lr=0.5")
    _one_line(result.status, result.err, (r"optim.lr: 0.003 -> 0.5", "run.folder to a new name, or run.resume=changed"))


def test_a_used_folder_may_be_refused(tmp_path: Path, commands: Commands, trained: Path) -> None:
    result = commands.run(tmp_path, *_copy(trained, tmp_path), "run.resume=never")
    _one_line(result.status, result.err, ("already holds a run", "new name"))


def test_a_checkpoint_of_a_newer_version(tmp_path: Path, commands: Commands, trained: Path) -> None:
    arguments = _copy(trained, tmp_path)
    (checkpoint,) = copies(tmp_path / "run")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["format_version"] += 1
    content = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(content)
    sums = next(path for path in checkpoint.iterdir() if "sum" in path.name.lower())
    lines = sums.read_text().splitlines()
    lines = [f"{hashlib.sha256(content).hexdigest()}  manifest.json" if "manifest" in x else x for x in lines]
    sums.write_text("\n".join(lines) + "\n")
    for pointer in checkpoint.parent.glob("latest-*.json"):
        pointer.unlink()  # the newer version's would mean this manifest
    result = commands.run(tmp_path, *arguments)
    _one_line(result.status, result.err, ("newer", "upgrade|update|install|version"))


def test_a_damaged_record_of_the_config(tmp_path: Path, commands: Commands, trained: Path) -> None:
    arguments = _copy(trained, tmp_path)
    (tmp_path / "run" / "config.json").write_text("{")
    result = commands.run(tmp_path, *arguments)
    assert result.status == 0, result.err
    assert "config.json is damaged" in result.out and "step-" in result.out


@pytest.mark.campaign(but=("300", "100000"))
@pytest.mark.parametrize("limit_bytes", [300, 900, 3000, 12_000, 100_000])
def test_a_disk_that_is_full(tmp_path: Path, commands: Commands, limit_bytes: int) -> None:
    """No file may grow beyond a limit, as on a disk that fills up: between the first file and a checkpoint."""
    (tmp_path / "tiny.toml").write_text("")
    arguments = ["train", "tiny.toml", *overrides(tmp_path)]
    result = commands.run(tmp_path, *arguments, limits={"RLIMIT_FSIZE": limit_bytes})
    _one_line(result.status, result.err, ("full|room|cannot be written|File too large", "free|space"))
    assert not list(copies(tmp_path / "run"))
    result = commands.run(tmp_path, *arguments)
    assert result.status == 0, result
    assert [entry["step"] for entry in entries(tmp_path / "run")] == list(range(1, 21))


def test_a_disk_without_room_for_the_next_checkpoint(tmp_path: Path, commands: Commands, trained: Path) -> None:
    arguments = _copy(trained, tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    result = commands.run(tmp_path, *arguments, limits={"RLIMIT_FSIZE": 300_000})
    _one_line(result.status, result.err, ("no room for a checkpoint", "free space"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the folder under /proc stands for it")
def test_a_read_only_run_folder(tmp_path: Path, commands: Commands, trained: Path) -> None:
    arguments = _copy(trained, tmp_path)
    (tmp_path / "run").chmod(0o500)
    result = commands.run(tmp_path, *arguments)
    _one_line(result.status, result.err, ("run.folder.*Permission denied", "can be written"))


OTHER_COMMANDS = [
    (("generate", "nowhere", "x"), ("is no run folder", "phalanx train")),
    (("evaluate", "nowhere"), ("is no run folder", "phalanx train")),
    (("generate", "run", "word " * 9), ("prompt takes 46 tokens.*longest sequence is 16", "shorten")),
    (("generate", "run", "x\udcff"), ("prompt is not UTF-8", "UTF-8")),
    (("generate", "run", "x", "--temperature", "-1"), ("temperature = -1", "0 .greedy. or more")),
    (("generate", "run", "x", "--top-p", "2"), ("top_p = 2", "at most 1")),
    (("generate", "run", "x", "--top-k", "-3"), ("top_k = -3", "0 .all. or more")),
    (("generate", "run", "the ", "word " * 9), ("prompt 2: the prompt takes 46 tokens", "shorten")),
    (
        ("generate", "run", "--prompts", "gone.txt"),
        ("--prompts = 'gone.txt'.*No such file", "name a file"),
    ),
    (("generate", "run", "--prompts", "run"), ("--prompts = 'run'.*Is a directory", "name a file")),
    (("generate", "run", "--prompts", os.devnull), ("has no prompt", "write one on each line")),
    (("evaluate", "run", "--data", "gone.toml"), ("there is no such config file", "check")),
    (("checkpoint", "inspect", "nowhere"), ("there is no such folder", "run folder")),
    (("data", "info", "tiny.toml", "train.steps=1"), ("has not been", "phalanx data prepare")),
    (("explain", "tiny.toml", "model.heads=5", "train.steps=1"), ("does not divide", "multiple")),
]


@pytest.mark.parametrize(("arguments", "says"), OTHER_COMMANDS, ids=lambda value: " ".join(value)[:30])
def test_other_commands_say_what_is_wrong(
    commands: Commands, trained: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    result = commands.run(trained, *arguments)
    _one_line(result.status, result.err, says)


@pytest.mark.parametrize("arguments", [("--batch", "0"), ("--tokens", "-1"), ("--device", "tpu")])
def test_options_out_of_range_are_usage_errors(commands: Commands, trained: Path, arguments: tuple[str, str]) -> None:
    result = commands.run(trained, "evaluate", "run", *arguments)
    assert result.status == 2
    assert arguments[0] in result.err
    assert "Traceback" not in result.err


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path, commands: Commands, trained: Path) -> None:
    arguments = _copy(trained, tmp_path)
    with (tmp_path / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = commands.run(tmp_path, *arguments)
    _one_line(result.status, result.err, ("another process is training", "wait for it"))
