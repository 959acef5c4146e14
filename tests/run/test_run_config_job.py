"""The job file: what it takes, what it refuses, and what the decision function gets of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.config import parse_override, walk
from phalanx.core.errors import UserError
from phalanx.run.config import JobFile, PolicyConfig, RunConfig, load_job, toml_value, workers_on
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.drive.main import executor_command, watching
from phalanx.run.executor.executor_settings import ExecutorSettings
from phalanx.run.secrets import TlsFiles

SCRIPT = "run.script=train.py"

EXAMPLE = """
[run]
script = "train.py"
arguments = ["--lr", "1e-3"]
hosts = 4
spares = 1
workers_per_host = "gpu"
listen = "10.0.0.1:7000"
rules = ["mine.toml"]

[run.environment]
NCCL_DEBUG = "INFO"

[run.policy]
when_missing = "shrink"

[run.limits]
factor = 4.0

[run.tls]
certificate = "/x/driver.pem"
key = "/x/driver.key"

[run.logs]
kept_bytes = "1 GiB"

[run.backend_options]
partition = "gpu"
"""


def test_a_file_flags_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EXAMPLE)
    loaded = load_job(path, ["run.hosts=8"], {"run.spares": 2, "run.arguments": ["a b", 'c"d', "\x7f"]})
    run = loaded.value.run
    assert (run.hosts, run.spares, run.workers_per_host) == (8, 2, "gpu")
    assert run.arguments == ("a b", 'c"d', "\x7f")
    assert run.environment == {"NCCL_DEBUG": "INFO"}
    assert (run.policy.when_missing, run.limits.factor, run.logs.kept_bytes) == ("shrink", 4.0, 1 << 30)
    assert run.tls.files == TlsFiles(Path("/x/driver.pem"), Path("/x/driver.key"))
    assert run.backend_options == {"partition": "gpu"}
    assert loaded.origin("run.hosts") == "override"
    assert loaded.origin("run.workers_per_host") == f"{path}:7"


def test_what_is_not_given_is_resolved() -> None:
    run = load_job(None, ["run.script=folder/my train.py"]).value.run
    assert run.job_name == "my-train"
    assert run.run_folder == Path("runs/my-train")
    assert run.journal_url == "runs/my-train/journal.db"
    assert run.token_path == Path("runs/my-train/secret/token")
    assert run.log_folder == Path("runs/my-train/logs")
    assert run.tls.files is None
    module = load_job(None, ["run.script=package.train", "run.module=true", "run.folder=/there"]).value.run
    assert (module.job_name, module.run_folder) == ("train", Path("/there"))
    assert load_job(None, ["run.script=…"]).value.run.job_name == "job"


def training(*words: str, **given: object) -> RunConfig:
    changes = {"run.script": "phalanx", "run.module": True, "run.arguments": ["train", *words]}
    return load_job(None, (), {**changes, **{f"run.{key}": value for key, value in given.items()}}).value.run


def test_a_training_has_the_folder_and_name_of_its_run() -> None:
    run = training("configs/shakespeare.toml", "optim.lr=1e-3")
    assert (run.job_name, run.run_folder) == ("shakespeare", Path("runs/shakespeare"))
    assert run.script_arguments == ("train", "configs/shakespeare.toml", "optim.lr=1e-3")  # its own default
    own = training("--cluster", "h100", "configs/shakespeare.toml", "run.folder=runs/a", "run.folder=big/the run")
    assert (own.job_name, own.run_folder) == ("the-run", Path("big/the run"))
    assert own.script_arguments == own.arguments
    quoted = training("x.toml", 'run.folder="runs/b"', working_folder="/work")
    assert (quoted.job_name, quoted.run_folder) == ("b", Path("/work/runs/b"))
    assert training().job_name == training("--help").job_name == "phalanx"


def test_the_folder_that_is_given_for_the_job_is_the_trainings_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    passed_on = f"run.folder={json.dumps(str(tmp_path / 'there'))}"
    assert training("x.toml", folder="there").script_arguments == ("train", "x.toml", passed_on)
    assert training("x.toml", folder="there", working_folder="/work").script_arguments[-1] == passed_on
    named = training("x.toml", name="second")
    assert named.run_folder == Path("runs/second")
    assert named.script_arguments[-1] == f"run.folder={json.dumps(str(tmp_path / 'runs' / 'second'))}"
    # but not where the user has said where the training goes
    assert training("x.toml", "run.folder=mine", folder="there").script_arguments == (
        "train",
        "x.toml",
        "run.folder=mine",
    )
    (tmp_path / "x.toml").write_text('[run]\nfolder = "of the file"\n')
    assert training("x.toml", folder="there").script_arguments == ("train", "x.toml")
    (tmp_path / "x.toml").write_text("[run")  # which the training will say
    assert training("x.toml", folder="there").script_arguments[-1] == passed_on


def test_another_script_gets_what_it_is_given() -> None:
    other = load_job(None, (), {"run.script": "train.py", "run.arguments": ["train", "x.toml"], "run.folder": "there"})
    assert other.value.run.script_arguments == ("train", "x.toml")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.hosts=0", "run.hosts = 0.*hosts that take part"),
        ("run.spares=-1", "run.spares = -1"),
        ("run.host=3", "no such setting; did you mean run.hosts"),
        ("run.workers_per_host=0", "workers_per_host = 0 is too few; give 1 or more"),
        ("run.workers_per_host=many", "'many' is no number of ranks; give 1 or more, gpu, cpu or auto"),
        ("run.workers_per_host=true", "is no number of ranks"),
        ("run.allowed_hosts=[2]", "allowed_hosts has 2, and hosts = 1; give numbers"),
        ("run.name=a/b", "'a/b' is no name; use up to 63"),
        ("run.script=''", "script is not given; name the script"),
        ('run.environment={RANK="1"}', "environment.RANK is set for each rank by phalanx run; remove it"),
        ('run.environment={MASTER_PORT="1"}', "environment.MASTER_PORT"),
        ('run.environment={PHALANX_TOKEN_FILE="/x"}', "environment.PHALANX_TOKEN_FILE"),
        (
            "run.listen=0.0.0.0:7000",
            r"needs TLS; give a certificate and its key \(run.tls.certificate, run.tls.key\), or use 127.0.0.1",
        ),
        ('run.http="[::]:80"', "needs TLS"),
        ('run.listen="127.0.0.1"', "is no address; write HOST:PORT"),
        ('run.listen="127.0.0.1:70000"', "is no address"),
        ('run.listen="http://127.0.0.1:80"', "is no address"),
        ("run.heartbeat_s=2", r"limits.margin_s = 2.5 is less than two heartbeats.*raise the one or lower the other"),
        ("run.limits.patience_s=30", "floor_s = 60.0 is above limits.patience_s = 30.0"),
        ("run.policy.quick_check_s=601", "quick_check_s = 601.0 is above full_check_s = 600.0; lower quick_check_s"),
        ("run.policy.passive_check_s=31", "above quick_check_s"),
        ("run.policy.backoff_s=61", "above backoff_limit_s"),
        ("run.policy.settle_s=5", "above evidence_s"),
        ("run.policy.unknown_stop_s=16", "above stop_s"),
        ("run.policy.max_restarts_without_step=0", "max_restarts_without_step = 0"),
        ("run.policy.slow_factor=1", "slow_factor = 1"),
        ('run.logs.segment_bytes="1 TiB"', "segment_bytes = 1099511627776 is above kept_bytes"),
        ('run.logs.kept_bytes="lots"', "'lots' is no size; write bytes"),
        ("run.tls.certificate=/x", "go together.*give certificate and key"),
        ("run.tls.authority=/x", "before authority"),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(override: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_job(None, [SCRIPT, override])


def test_a_replacement_is_waited_for_no_longer_than_the_job_waits() -> None:
    shrink = ["run.policy.when_missing=shrink", "run.policy.replace_wait_s=100"]
    with pytest.raises(UserError, match=r"replace_wait_s = 100.0 is above give_up_s = 50.0"):
        load_job(None, [SCRIPT, *shrink, "run.policy.give_up_s=50"])
    load_job(None, [SCRIPT, *shrink, "run.policy.give_up_s=0"])


def test_nothing_at_all_is_told() -> None:
    with pytest.raises(UserError, match="run: is required"):
        load_job(None)


def test_the_policy_is_that_of_the_decision_function() -> None:
    assert PolicyConfig().to_policy() == Policy()
    assert set(PolicyConfig.model_fields) == {field.name for field in msgspec.structs.fields(Policy)}
    changed = PolicyConfig(advise_only=True, when_missing="shrink", max_restarts=7).to_policy()
    assert (changed.advise_only, changed.when_missing, changed.max_restarts) == (True, "shrink", 7)


def test_the_job_is_that_of_the_decision_function() -> None:
    overrides = ["run.hosts=4", "run.spares=1", "run.allowed_hosts=[2,3]", "run.previous.working_folder=/old"]
    job = load_job(None, [SCRIPT, *overrides]).value.run.to_job(2)
    assert job == Job("train", 4, 2, 1, (2, 3), "/old")
    assert load_job(None, [SCRIPT]).value.run.to_job(1).previous_version == ""
    assert load_job(None, [SCRIPT, "run.previous.arguments=[]"]).value.run.to_job(1).previous_version == "given"


@pytest.mark.parametrize(
    ("setting", "cores", "gpus", "workers"),
    [(3, 8, 2, 3), ("cpu", 8, 2, 8), ("gpu", 8, 2, 2), ("auto", 8, 2, 2), ("auto", 8, 0, 8)],
)
def test_workers_of_a_host(setting, cores: int, gpus: int, workers: int) -> None:
    assert workers_on(setting, cores, gpus) == workers


def test_a_host_without_gpus_is_told() -> None:
    with pytest.raises(UserError, match=r"workers_per_host = 'gpu'.*no GPU; give a number, or auto"):
        workers_on("gpu", 8, 0)


PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(blacklist_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aü \"'=.", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_flags_say_comes_through_toml(value: object) -> None:
    assert parse_override(f"key={toml_value(value)}") == ("key", value)


def test_executors_are_told_where_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(**given: str) -> str:
        command = executor_command(RunConfig(script="train.py", **given), "host-1")  # type: ignore[arg-type]
        return msgspec.json.decode(command[-1], type=ExecutorSettings).checkpoints

    assert told() == ""
    assert told(checkpoints="s3://bucket/run") == "s3://bucket/run"
    assert told(checkpoints="out", working_folder="code") == str(tmp_path / "code" / "out")
    assert told(checkpoints="/mnt/out", working_folder="code") == "/mnt/out"
    monkeypatch.setenv("HOME", "/home/ann")
    assert told(checkpoints="~/out") == "/home/ann/out"


def test_scripts_of_others_start_fresh_and_a_training_warm_unless_that_is_said() -> None:
    others = RunConfig(script="train.py"), RunConfig(script="torchtitan.train", module=True), training()
    assert [run.starts_warm for run in others] == [False, False, False]  # the last one shows its help
    assert training("x.toml").starts_warm and not training("x.toml", start="fresh").starts_warm
    warm = RunConfig(script="train.py", start="warm", preload=("numpy",))
    assert [watching(run).versions[""].is_warm for run in (warm, others[0])] == [True, False]
    with pytest.raises(UserError, match=r"preload .*start warm; set start"):
        RunConfig(script="train.py", preload=("numpy",))


def test_every_setting_is_described_here_and_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_config.md").read_text()
    settings = list(walk(JobFile(run=RunConfig(script="train.py"))))
    assert all(field.description for _, _, field in settings)
    missing = [key for key, _, _ in settings if f"`{key.removeprefix('run.')}`" not in page]
    assert missing == []
    tables = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert tables


def test_examples_of_the_docs_are_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_config.md").read_text()
    for number, text in enumerate(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        load_job(path)


def test_nothing_of_this_knows_torch() -> None:
    program = (
        "import sys, phalanx.run.secrets, phalanx.run.journal, phalanx.run.config, phalanx.run.flags\n"
        "import phalanx.run.logs.log_pump, phalanx.run.logs.log_files, phalanx.run.incidents.incident_pages\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
