"""`phalanx plan CONFIG`: quick help, the prediction in its forms, exit statuses, and errors with their cure."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.main import main
from phalanx.cli.plan import command as plan
from phalanx.cli.planning import cluster_of, plan_of
from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.plan.hardware.load import load_cluster
from phalanx.plan.predict import predict
from phalanx.train.config import RunConfig

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "configs" / "plan" / "gpt-175b.toml")
LLAMA = str(ROOT / "configs" / "plan" / "llama-70b.toml")
ON = ("--cluster", "selene", "--devices", "512", "parallel.pipeline=8", "parallel.tensor=8", "train.micro_batch=1")


def _plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(plan, [GPT, *arguments])


def _python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)


@pytest.mark.parametrize("words", [["plan", "--help"], ["simulate", "--help"], ["plan", "x.toml", "-h"]])
def test_help_imports_next_to_nothing(words: list[str]) -> None:
    code = f"""
import sys
from phalanx.cli.main import main
try:
    main({words})
except SystemExit as ended:
    assert ended.code == 0, ended.code
print([name for name in ("torch", "numpy", "pydantic", "rich", "plotly") if name in sys.modules])
"""
    assert _python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_takes_less_than_0_3_s(command: str) -> None:
    took = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "phalanx", command, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3  # of a processor's time: how busy the machine is does not matter


def test_help_names_options_and_subcommands() -> None:
    told = CliRunner().invoke(plan, ["--help"]).output
    for word in ("CONFIG --cluster NAME|FILE", "--devices", "--json", "--html", "--sources", "calibrate", "validate"):
        assert word in told
    assert CliRunner().invoke(plan, []).output == told


def test_json_is_what_predict_says() -> None:
    done = _plan(*ON, "--json")
    assert done.exit_code == 0
    told = json.loads(done.output)
    config = load(RunConfig, Path(GPT), ON[4:]).value
    cluster, _ = cluster_of(config, "selene", 512)
    planned = plan_of(config, cluster)
    prediction = predict(planned.job, planned.strategy, cluster)
    assert told["step_s"] == prediction.step_s
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["step_s"], rel=1e-9)
    assert (told["devices"], told["strategy"]["shard"], told["strategy"]["micro_batch"]) == (512, 8, 1)
    assert told["run_tokens"] >= 300_000_000_000
    assert len(told["memory"]) == 8


@pytest.mark.parametrize(("tensor", "overlap"), [(8, "fused"), (16, "chunked")])
def test_an_overlap_that_is_left_open_is_fused_within_a_host(tensor: int, overlap: str) -> None:
    given = ("parallel.pipeline=4", f"parallel.tensor={tensor}", "parallel.tensor_overlap=auto", "train.micro_batch=1")
    planned = plan_of(load(RunConfig, Path(GPT), given).value, load_cluster("selene", 512))
    assert planned.strategy.tensor_overlap == overlap


def test_prediction_needs_no_torch() -> None:
    code = f"""
import sys
from phalanx.cli.main import main
try:
    main(["plan", {GPT!r}, *{ON!r}])
except SystemExit as ended:
    assert ended.code in (0, None), ended.code
print("torch" in sys.modules, "plotly" in sys.modules)
"""
    assert _python(code).splitlines()[-1] == "False False"


def test_what_does_not_fit_is_a_verdict_and_a_status() -> None:
    full = _plan("--cluster", "selene", "--devices", "8")
    assert full.exit_code == 1
    assert "does not fit: " in full.output and "too much" in full.output
    assert "micro-batch 1, recompute full: none leaves a tenth of the memory free" in full.output
    assert json.loads(_plan("--cluster", "selene", "--devices", "8", "--json").output)["fits"] is False


def test_settings_that_make_it_fit_do() -> None:
    job = ("--cluster", "h100_400g", "--devices", "64")
    full = CliRunner().invoke(plan, [LLAMA, *job, "train.recompute=none", "--json"])
    assert full.exit_code == 1
    offered = json.loads(full.output)["reliefs"]
    assert offered == sorted(offered, key=lambda one: one["step_s"])
    for one in offered:
        strategy = json.loads(full.output)["strategy"]
        ranks = [f"parallel.{axis}={strategy[axis]}" for axis in ("shard", "tensor")]
        settings = one["settings"].split()
        settings += [] if "train.recompute" in one["settings"] else ["train.recompute=none"]
        tried = CliRunner().invoke(plan, [LLAMA, *job, *ranks, *settings, "--json"])
        assert tried.exit_code == 0
        assert json.loads(tried.output)["step_s"] == pytest.approx(one["step_s"], rel=1e-9)


def test_what_was_left_open_is_told(tmp_path: Path) -> None:
    chosen = _plan("--cluster", "selene", "--devices", "1024").output
    assert "data parallel, which talks least" in chosen
    alone = _plan(
        "--cluster", "selene", "--devices", "512", "parallel.tensor=8", "parallel.shard=64", "parallel.zero=3"
    )
    assert "micro-batch" in alone.output and "leaves a tenth of the memory free" in alone.output


def test_a_page_is_written(tmp_path: Path) -> None:
    done = _plan(*ON, "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0 and "page: " in done.output
    assert (tmp_path / "page.html").stat().st_size > 1_000_000


def test_a_config_may_be_called_as_a_subcommand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calibrate").write_text(Path(GPT).read_text())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(plan, ["./calibrate", *ON, "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["name"] == "calibrate"


@pytest.mark.parametrize(
    ("words", "problem", "cure"),
    [
        ([], "no cluster to predict for", "give --cluster: one of "),
        (["--cluster", "selen"], "is none of the clusters", "take one of .*selene"),
        (["--cluster", "selene", "--devices", "8", "parallel.devices=16"], "is not --devices 8", "give one of the two"),
        (
            ["--cluster", "selene", "--devices", "64", "parallel.tensor=3"],
            "cannot be shared",
            "make it a multiple of 3",
        ),
        (
            ["--cluster", "selene", "--devices", "64", "model.vocab_size=0", "data.tokenizer.kind=chars"],
            "not known before the text",
            "set model.vocab",
        ),
        (["--cluster", "selene", "--devices", "64", "parallel.pipline=2"], "no such setting", "parallel.pipeline"),
    ],
)
def test_nonsense_is_refused_with_its_cure(words: list[str], problem: str, cure: str) -> None:
    error = _plan(*words).exception
    assert isinstance(error, UserError)
    assert problem in error.problem
    assert re.search(cure, str(error))


def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "/nowhere.toml", "--cluster", "selene"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_another_program_takes_another_time() -> None:
    ours, other = (json.loads(_plan(*ON, "--json", *more).output) for more in ((), ("--software", "megatron-lm-2023")))
    assert other["step_s"] != ours["step_s"]
    paths = [{part["path"] for part in found["parts"]} for found in (ours, other)]
    assert "compute/softmax" in paths[1] - paths[0]


def test_an_unknown_program_is_refused_with_those_that_are_known() -> None:
    result = _plan(*ON, "--software", "megatron")
    assert isinstance(result.exception, UserError)
    assert "megatron-lm-2023" in str(result.exception.cure)
