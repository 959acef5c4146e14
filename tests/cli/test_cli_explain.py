"""The command line without torch: help, explain, and errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.explain import command as explain
from phalanx.cli.main import COMMANDS, main, yield_idle_cores

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def _python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)


def test_help_and_explain_do_not_import_torch() -> None:
    code = """
import sys
from phalanx.cli.main import main
for arguments in (["--help"], ["explain", "configs/python-stdlib.toml"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0, ended.code
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    assert _python(code).splitlines()[-1] == "False False"


def test_help_names_every_command() -> None:
    out = subprocess.check_output([sys.executable, "-m", "phalanx", "--help"], text=True)
    for name in COMMANDS:
        assert f"  {name} " in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "phalanx", name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Usage: phalanx" in done.stdout


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_explained(path: Path) -> None:
    result = CliRunner().invoke(explain, [str(path), "model.vocab_size=300"], env={"COLUMNS": "240"})
    assert f"{path.name}:" in result.output
    assert result.exit_code == 0, result.output


def test_explain_says_where_each_value_came_from() -> None:
    arguments = [str(CONFIGS[0]), "train.steps=77", "train.global_batch=3", "data.sequence_length=10"]
    result = CliRunner().invoke(explain, arguments, env={"COLUMNS": "200"})
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert "77" in lines["train.steps"]
    assert "override" in lines["train.steps"]
    assert f"{CONFIGS[0]}:" in lines["optim.name"]
    assert "default" in lines["train.deterministic"]
    assert "tokens per step" in result.output
    assert "2,310" in result.output  # 77 steps x 3 sequences x 10 tokens


def test_given_leaves_defaults_out_and_describe_adds_meaning() -> None:
    result = CliRunner().invoke(explain, [str(CONFIGS[0]), "--given", "--describe"], env={"COLUMNS": "200"})
    assert "train.deterministic" not in result.output
    assert "optimizer steps" in result.output


def test_a_mistake_is_one_line_on_stderr_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(CONFIGS[0]), "train.stepz=3"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.strip() == "error: train.stepz: there is no such setting; did you mean train.steps?"
    assert captured.out == ""


def test_idle_openmp_threads_yield_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    yield_idle_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    yield_idle_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_values_are_written_as_toml_has_them() -> None:
    changes = ['model.attention=["window","full"]', "model.window=8", "train.compile=true"]
    result = CliRunner().invoke(explain, [str(CONFIGS[0]), *changes], env={"COLUMNS": "200"})
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    for name, value in (
        ("model.attention", '["window", "full"]'),
        ("train.compile", "true"),
        ("train.deterministic", "false"),
        ("optim.groups", "[]"),
        ("optim.eps", "unset"),
    ):
        assert f"  {value}  " in lines[name]


def test_rows_into_a_pipe_are_one_line_each(tmp_path: Path) -> None:
    """Another program reads whole values, however long; a terminal of 80 columns folds them."""
    config = f"{ROOT / 'configs' / 'shakespeare.toml'}"
    path = "/".join(["a-long-folder-name"] * 12)
    arguments = [sys.executable, "-m", "phalanx", "explain", config, f"data.sources.0.path={path}", "train.steps=200"]
    bare = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    for environment, lines in ((bare, 1), (bare | {"COLUMNS": "80"}, 0)):
        out = subprocess.check_output(arguments, text=True, env=environment, cwd=tmp_path)
        assert sum(path in line for line in out.splitlines()) == lines
