import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from data_helpers import lines, write_jsonl

from phalanx.cli.data_command import command
from phalanx.core.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"q": f"[{i}] why?", "text": line} for i, line in enumerate(lines(200))])
    text = f"""
        [train]
        steps = 1
        [data]
        folder = "{tmp_path / "prepared"}"
        sequence_length = 16
        validation_fraction = 0.2
        [data.tokenizer]
        kind = "bytes"
        [[data.sources]]
        kind = "jsonl"
        path = "{tmp_path / "a.jsonl"}"
        prompt_field = "q"
    """
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_prepare_info_and_inspect(config: Path) -> None:
    said = run("prepare", config, "--workers", 1)
    assert "jsonl-0: tokenising" in said
    assert "ready in" in said
    shown = run("info", config)
    assert "257 token ids (bytes)" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("jsonl-0")] == ["train", "validation"]
    assert [line for line in said.splitlines() if line.startswith("jsonl-0  ")] == [
        line for line in shown.splitlines() if line.startswith("jsonl-0  ")
    ]
    counts = r"trained on in jsonl-0, train: [\d,]+ of [\d,]+ tokens; 0 of \d+ documents have none"
    assert re.search(counts, " ".join(shown.split()))
    text = run("inspect", config, "--tokens", 100)
    assert "document [1] why?line 1 of the text, å and 漢 in it" in text


def test_preparing_again_does_nothing(config: Path) -> None:
    run("prepare", config, "--workers", 1)
    assert "tokenising" not in run("prepare", config, "--workers", 1)


def test_info_before_preparing(config: Path) -> None:
    with pytest.raises(UserError, match=r"has not been prepared.*run `phalanx data prepare`"):
        run("info", config)


def test_inspect_beyond_the_end(config: Path) -> None:
    run("prepare", config, "--workers", 1)
    with pytest.raises(UserError, match="there is no token 1000000000 of source 0 in the validation split"):
        run("inspect", config, "--split", "validation", "--at", 10**9)


def test_a_ctrl_c_while_a_tokenizer_is_made_is_quick_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Training goes on in native code for many seconds; the terminal sends its signal to the whole group."""
    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(60_000)]
    (tmp_path / "corpus.txt").write_text("\n".join(" ".join(chosen.choices(words, k=40)) for _ in range(30_000)))
    (tmp_path / "big.toml").write_text(
        '[data]\nsources = [{kind = "text", path = "corpus.txt", document_separator = "\\n"}]\n'
        "tokenizer.vocab_size = 60000\n[train]\nsteps = 1\n"
    )
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "data", "prepare", "big.toml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    trainers: list[psutil.Process] = []
    while not trainers and process.poll() is None:
        trainers = psutil.Process(process.pid).children()
    (trainer,) = trainers
    while trainer.is_running() and trainer.cpu_times().user < 1:  # it has imported all it needs
        os.sched_yield()
    # In time of the CPU, since a busy machine takes longer: a training that is waited for takes many seconds of it.
    used_s = trainer.cpu_times().user + psutil.Process(process.pid).cpu_times().user
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s - used_s < 5
    assert err.splitlines()[-1] == "stopped by SIGINT"
    assert "Traceback" not in out + err
    assert not trainer.is_running()
    assert [path.name for path in (tmp_path / "prepared").rglob("*") if path.is_file()] == ["lock"]
