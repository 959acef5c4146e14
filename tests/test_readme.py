"""The commands of README.md work as they are printed, at a size that a test can wait for."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[1]
# Appended to `phalanx train`: the command as printed, but a small model for a few steps.
SMALL = [
    "model.layers=3",
    "model.hidden=32",
    "model.heads=2",
    "data.sequence_length=128",
    "train.steps=4",
    "train.global_batch=2",
    "optim.schedule.warmup_steps=1",
    "evaluate.every_steps=2",
    "evaluate.tokens=512",
    "evaluate.final_tokens=512",
    "train.threads=1",
]


def _commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_two_make_commands_are_there_and_have_recipes() -> None:
    targets = [shlex.split(line)[1] for line in _commands() if line.startswith("make ")]
    assert targets == ["train", "test"]
    for target in targets:
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "phalanx train" in planned.stdout if target == "train" else "pytest" in planned.stdout


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.slow
def test_the_phalanx_commands_run_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lines = [line for line in _commands() if not line.startswith("make ")]
    assert {shlex.split(line)[1] for line in lines} >= {"explain", "train", "generate", "evaluate"}
    for line in lines:
        program, command, *arguments = shlex.split(line)
        assert program == ".venv/bin/phalanx"
        extra = SMALL if "train" in (command, *arguments) else []
        call = [sys.executable, "-m", "phalanx", command, *arguments, *extra]
        if command == "dashboard":  # it serves until Ctrl-C
            _serves_until_interrupted([*call, "--port", "0"], tmp_path)
            continue
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or done.stderr.strip()


def _serves_until_interrupted(call: list[str], folder: Path) -> None:
    with subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with httpx.Client(follow_redirects=True, trust_env=False, timeout=60) as client:
                assert "window" in client.get(address).text
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
