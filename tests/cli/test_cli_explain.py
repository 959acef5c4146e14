"""The command line without torch: help, explain, and errors in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.explain_command import command as explain
from phalanx.cli.main import COMMANDS, main, yield_idle_cores
from phalanx.core.errors import UserError

ROOT = Path(__file__).parents[2]
ADAMW = ("optim.name=adamw",)  # Muon, which the example takes, wants whole matrices
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def _python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)


def test_help_and_explain_do_not_import_torch() -> None:
    code = """
import sys
from phalanx.cli.main import main
for arguments in (
    ["--help"],
    ["explain", "configs/python-stdlib.toml"],
    ["explain", "configs/python-stdlib.toml", "parallel.devices=8", "parallel.pipeline=2"],
):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0, ended.code
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    assert _python(code).splitlines()[-1] == "False False"


def test_help_of_no_command_imports_torch_and_sampling_no_more_of_it_than_it_needs() -> None:
    code = """
import sys
from click.testing import CliRunner
from phalanx.cli.main import COMMANDS, group
for name in COMMANDS:
    assert CliRunner().invoke(group, [name, "--help"]).exit_code == 0
    assert "torch" not in sys.modules, name
import phalanx.train.session, phalanx.train.weights.trained
assert "torch.distributed.tensor" not in sys.modules  # with SymPy it takes as long as half of torch
"""
    _python(code)


def test_help_names_every_command() -> None:
    out = subprocess.check_output([sys.executable, "-m", "phalanx", "--help"], text=True)
    for name in COMMANDS:
        assert f"  {name} " in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    assert f"Usage: phalanx {name}" in capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_explained(path: Path) -> None:
    result = CliRunner().invoke(explain, [str(path), "model.vocab_size=5000"], env={"COLUMNS": "240"})
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


def test_explain_says_which_attention_kernels_are_used() -> None:
    def rows(*overrides: str) -> list[str]:
        result = CliRunner().invoke(explain, [str(CONFIGS[0]), "--given", *overrides], env={"COLUMNS": "240"})
        return [line for line in result.output.splitlines() if line.startswith(("CPU ", "GPU "))]

    both = rows("data.document_mask=false")
    assert [line[:3] for line in both] == ["CPU", "GPU"]
    assert "cuDNN, else FlashAttention 2" in both[1]
    (alone,) = rows("data.document_mask=true", "train.device=cuda")
    assert "FlexAttention" in alone
    assert "documents without a dense mask" in alone


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


def _explained(*arguments: str, width: int = 100, config: str = "python-stdlib.toml") -> Result:
    path = str(ROOT / "configs" / config)
    return CliRunner().invoke(explain, [path, "--given", *arguments], env={"COLUMNS": str(width)})


def _after(output: str, title: str) -> str:
    """From the line that begins with `title` on."""
    return output[output.index(f"\n{title}") :]


def test_one_process_has_no_layout_to_explain() -> None:
    output = _explained().output
    assert "FLOPs in all" in output and "layout" not in output


def test_a_chosen_layout_is_explained_with_its_reasons_and_the_keys_that_give_it() -> None:
    output = _explained(
        *ADAMW, "parallel.devices=8", "parallel.pipeline=2", "parallel.schedule=interleaved_1f1b"
    ).output
    assert "8 ranks: pipeline 2 x shard 4" in output
    assert "shard = 4: data parallel, which talks least" in output
    keys = re.search(r"same as +(.*)", output)
    assert keys is not None
    again = _explained(*ADAMW, *keys[1].split(), "parallel.schedule=interleaved_1f1b").output
    assert "why" not in again
    assert _after(again, "where each") == _after(output, "where each")
    for line in ("1 x 256 tokens", "MiB on the fullest rank"):
        assert line in output and line in again


@pytest.mark.parametrize(("device", "devices", "known"), [("cpu", 2, True), ("cpu", 64, False), ("cuda", 2, False)])
def test_a_layout_chosen_whatever_the_memory_is_told_as_such(device: str, devices: int, known: bool) -> None:
    output = _explained(*ADAMW, f"parallel.devices={devices}", f"train.device={device}").output
    assert ("where it is short, phalanx train takes another" in " ".join(output.split())) != known


def test_ranks_are_drawn_host_by_host_with_the_groups_of_every_axis() -> None:
    settings = (*ADAMW, "parallel.tensor=2", "parallel.pipeline=2", "parallel.replicate=2")
    output = _explained(*settings, "--ranks-per-host", "4").output
    hosts = [" ".join(line.split()) for line in output.splitlines() if line.startswith("host ")]
    assert hosts == [
        "host 0 0(0,0,0) 1(0,0,1) 2(0,1,0) 3(0,1,1)",
        "host 1 4(1,0,0) 5(1,0,1) 6(1,1,0) 7(1,1,1)",
    ]
    groups = output[output.index("axis ") : output.index("pipeline stages")]
    rows = {line.split()[0]: line for line in groups.splitlines() if line}
    assert "4 of 2  1      0-1  2-3  4-5  6-7" in rows["tensor"]
    assert "4 of 2  1      0,2  1,3  4,6  5,7" in rows["replicate"]
    assert "4 of 2  2      0,4  1,5  2,6  3,7" in rows["pipeline"]


def test_memory_is_that_of_needed_bytes() -> None:
    """Weights 20.26 MiB (5,310,720 of fp32), whole on each rank beside a quarter of them as masters."""
    output = _explained("parallel.shard=4", "optim.name=adamw").output
    assert "weights 25.32 MiB, gradients 20.26 MiB, optimizer state 10.13 MiB" in output
    assert "81.04 MiB in a single process" in output


def test_a_pipeline_shows_stages_costs_schedule_and_what_makes_it_even() -> None:
    output = _explained("parallel.pipeline=4", "train.micro_batch=2").output
    assert re.search(r"3 +3 +3 \+ loss head +42\.4%", output)
    assert "70% above the mean: ranks wait 41% of the time besides the bubble" in output
    assert "1f1b: 4 ranks, 8 micro-batches, 33 units of time, 27.3 % bubble" in output
    assert "rank 3  · · · F0B0─ F1B1─" in output
    suggested = re.search(r"(model\.layers=\d+) would make it (\d+)%", output)
    assert suggested is not None
    better = _explained("parallel.pipeline=4", suggested[1]).output
    assert f"{suggested[2]}% above the mean" in better


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    output = _explained(*ADAMW, "parallel.devices=64", "parallel.pipeline=4", "parallel.tensor=4", width=width).output
    assert max(map(len, output.splitlines())) <= width
    assert re.search(r"axis +groups +hosts +ranks +its members have", output)
    assert not re.search(r"[a-z]…", output)  # no column was squeezed


def test_an_impossible_layout_is_the_error_that_train_gives(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs" / "python-stdlib.toml")
    with pytest.raises(SystemExit) as ended:
        main(["explain", path, "--given", "parallel.tensor=3", *ADAMW])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "parallel.tensor = 3: does not divide model.heads = 4" in error and "take a tensor size of 1, 2, 4" in error


def test_before_the_vocabulary_is_known_the_rest_of_a_layout_is_explained() -> None:
    result = _explained("parallel.pipeline=2", "parallel.tensor=2", config="shakespeare.toml")
    assert result.exit_code == 0
    assert "4 ranks: pipeline 2 x tensor 2" in result.output and "host 0  0(0,0)" in result.output
    assert "Memory and stages are not known before the vocabulary is." in result.output
    assert "MiB" not in result.output
    refused = _explained("parallel.tensor=5", config="shakespeare.toml")
    assert isinstance(refused.exception, UserError) and "parallel.tensor = 5" in str(refused.exception)


def test_ten_thousand_ranks_are_explained_at_once() -> None:
    settings = (
        *ADAMW,
        "parallel.pipeline=8",
        "parallel.tensor=8",
        "parallel.shard=192",
        "model.layers=8",
        "model.heads=8",
    )
    begin_s = time.process_time()
    output = _explained(*settings, "train.global_batch=6144").output
    assert time.process_time() - begin_s < 1.0
    assert "12,288 ranks" in output and "… and 1,528 hosts more" in output
    assert "1,536 of 8  1 " in output


def test_settings_without_effect_are_named() -> None:
    line = "parallel.zero = 3 has no effect: parallel.shard and parallel.context are 1"
    assert line in _explained("parallel.zero=3").output
    assert line in _explained("parallel.zero=3", "parallel.replicate=2").output
    assert "no effect" not in _explained("parallel.zero=3", "parallel.shard=2", *ADAMW).output


def test_muon_is_spread_without_splitting_matrices() -> None:
    assert "replicate = 2: data parallel" in _explained("parallel.devices=2").output


def test_what_is_chosen_is_checked_as_if_it_was_given() -> None:
    """16 ranks for 8 sequences need tensor parallel, within whose compiled layers nothing can be chosen to be kept."""
    settings = ("parallel.devices=16", "train.global_batch=8", *ADAMW)
    assert "tensor = 2" in _explained(*settings).output
    assert _explained(*settings, "train.compile=true").exit_code == 0
    refused = _explained(*settings, "train.compile=true", "train.recompute=selective").exception
    assert isinstance(refused, UserError) and "parallel.tensor = 2" in str(refused)


@pytest.mark.parametrize("arguments", [["--help"], ["explain", str(CONFIGS[0])], ["plan", "--help"]], ids=str)
def test_output_that_cannot_be_written_is_one_line_and_no_success(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == (
        "error: the output cannot be written (No space left on device); free some space, or write it elsewhere\n"
    )


def test_a_reader_that_has_had_enough_is_no_error_to_tell() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "explain", str(CONFIGS[0])], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
