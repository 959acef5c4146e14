"""Every benchmark runs; that of a GPU says when there is none, and its code runs on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_gpu.py"


_HELP = """
import runpy, sys
for script in sys.argv[1:]:
    print("==", script)
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, script
"""


def test_every_benchmark_has_a_quick_form_for_make_bench(tmp_path: Path) -> None:
    """In one process, which imports torch once, and finds what `python benchmarks/NAME.py` finds from any folder."""
    scripts = sorted(map(str, SCRIPT.parent.glob("*.py")))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, "-c", _HELP, *scripts]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path).stdout
    helps = shown.split("== ")[1:]
    assert len(helps) == len(scripts)
    assert [text.split("\n")[0] for text in helps if "--quick" not in text] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    train_gpu.main()
    assert "no CUDA device is visible: nothing was measured" in capsys.readouterr().out


@pytest.mark.campaign
def test_the_same_code_runs_on_a_cpu(tmp_path: Path) -> None:
    """The step and the trainer, and a peer: that of transformers, which is there for other tests."""
    out, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text("a rose is a rose is a rose. " * 400)
    arguments = ["--device", "cpu", "--shapes", "tiny", "--no-compile", "--quick", "--peers", "--text", str(text)]
    subprocess.run([sys.executable, str(SCRIPT), *arguments, "--json", str(out)], check=True, capture_output=True)
    (found,) = json.loads(out.read_text())
    ours, trainer, peer = found["contenders"]
    assert [each["problem"] for each in found["contenders"]] == [""] * 3
    assert ours["tokens_per_s"] == pytest.approx(ours["tokens_per_step"] / ours["step_s"])
    assert ours["mfu"] is None and ours["ours_is"] == 1.0
    assert peer["ours_is"] == pytest.approx(peer["step_s"] / ours["step_s"])
    assert trainer["step_s"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reaches_a_sensible_share_of_its_product_rate(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--shapes", "gpt2-124m", "--quick", "--json", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *arguments], check=True, capture_output=True)
    ((ours,),) = (found["contenders"] for found in json.loads(out.read_text()))
    assert 0.1 < ours["product_share"] < 1.0
    assert ours["peak_bytes"] > 0
