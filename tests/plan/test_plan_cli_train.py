"""The prediction that `phalanx train` makes: for which machine, what of it, and that it keeps no run from starting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny

from phalanx.api.planning import expected_of, grouped, plan_of
from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import known_cluster, load_cluster
from phalanx.plan.predict import predict
from phalanx.train.config import RunConfig

ROOT = Path(__file__).parents[2]
GPT = ROOT / "configs" / "plan" / "gpt-175b.toml"


def _driver(folder: Path, model: str) -> Path:
    gpu = folder / "driver" / "0000:18:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 218\nGPU UUID: \t GPU-ef\n")
    return folder / "driver"


def test_this_machine_is_known_by_its_file_or_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert known_cluster(environ, tmp_path / "none") is None
    assert known_cluster(environ, _driver(tmp_path, "NVIDIA H100 80GB HBM3")) == "h100_400g"
    assert known_cluster(environ, _driver(tmp_path / "other", "NVIDIA GeForce GTX 1080")) is None
    kept = tmp_path / "cache" / "phalanx" / "clusters" / f"{socket.gethostname()}.toml"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert known_cluster(environ, tmp_path / "driver") == str(kept)
    (tmp_path / kept.name).touch()
    assert known_cluster(environ, tmp_path / "driver") == kept.name


@pytest.mark.parametrize("name", ["selene", "h100_400g", "h200_400g"])
def test_clusters_of_known_gpus_are_there(name: str) -> None:
    assert load_cluster(name, 1).devices == 1


def test_layers_are_expected_compiled_on_a_gpu_as_they_are_run_there() -> None:
    def expected(*words: str) -> tuple[float, bool]:
        config = load(RunConfig, GPT, ("model.layers=4", "train.micro_batch=1", "train.global_batch=1", *words)).value
        planned = plan_of(config, load_cluster("h100_400g", 1))
        return expected_of(config, "gpt", "h100_400g", 1).step_s, planned.job.software.compiled

    plain, as_left = expected("train.compile=false"), expected()
    assert as_left == expected("train.compile=true")
    assert (plain[1], as_left[1]) == (False, True) and as_left[0] < plain[0]


def test_what_is_handed_to_training_is_the_prediction() -> None:
    words = ("parallel.pipeline=8", "parallel.tensor=8", "parallel.shard=8", "train.micro_batch=1")
    config = load(RunConfig, GPT, words).value
    expected = expected_of(config, "gpt", "selene", 512)
    cluster = load_cluster("selene", 512)
    planned = plan_of(config, cluster)
    prediction = predict(planned.job, planned.strategy, cluster)
    assert expected.step_s == prediction.step_s
    assert expected.interval_s is prediction.interval_s is None  # of our own program no steps were judged
    assert sum(expected.parts.values()) == pytest.approx(prediction.step_s)
    assert expected.parts == grouped(prediction)
    assert expected.parts["passes"] == pytest.approx(prediction.seconds("compute"))
    assert (expected.layout, expected.micro_batch) == ("pp8·fs8·tp8", 1)
    assert expected.misfit("pp8·fs8·tp8", 1) == ""
    assert json.loads(json.dumps(dict(expected.details)))["step_s"] == prediction.step_s


def test_a_cluster_that_is_not_there_is_refused_only_if_it_was_asked_for() -> None:
    with pytest.raises(UserError, match="is none of the clusters"):
        expected_of(load(RunConfig, GPT).value, "gpt", "selen", 1)


@pytest.mark.slow
def test_train_predicts_compares_and_survives_a_broken_file(tmp_path: Path) -> None:
    settings = tiny.overrides(tmp_path, tmp_path / "run", tiny.SETTINGS | {"train.steps": 16})
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "tiny.toml").touch()

    def train(*more: str) -> str:
        command = [sys.executable, "-m", "phalanx", "train", "tiny.toml", *settings, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = train("--cluster", "cpu_host")
    assert "expected: step " in told and "measured over steps 6 to 15: step " in told
    kept = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert kept["measured"]["last"] == 15 and kept["prediction"]["cluster"] == "cpu_host"

    (tmp_path / f"{socket.gethostname()}.toml").write_text("nonsense = true")
    again = train(f"run.folder={tmp_path / 'other'}")
    assert "no prediction: " in again and "done: 16 steps" in again
    assert not (tmp_path / "other" / "prediction.json").exists()
