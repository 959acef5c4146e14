"""What a job begins with in a cluster: manifests, submitting them, and the first program of a pod."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

import yaml
from kubernetes import client
from kubernetes_cluster import Cluster, checked

from phalanx.core.errors import UserError
from phalanx.run.backends.backend import submit_job
from phalanx.run.backends.kubernetes import entry
from phalanx.run.backends.kubernetes.cluster_api import ClusterApi, ClusterError, indexes
from phalanx.run.backends.kubernetes.kubernetes_options import KubernetesOptions, read_options
from phalanx.run.backends.kubernetes.kubernetes_submit import make_all
from phalanx.run.backends.kubernetes.manifests import DRIVER_VARIABLE, base_name, executors, for_driver, host_name
from phalanx.run.config import RunConfig, load_job
from phalanx.run.executor.executor_settings import ExecutorSettings

OPTIONS = {"image": "registry/train:1", "tls_secret": "tls", "namespace": "ml", "claim": "runs"}
FULL = {
    **OPTIONS,
    "resources": {"nvidia.com/gpu": 8, "memory": "900Gi"},
    "shared_memory": "64Gi",
    "node_selector": {"pool": "a"},
    "driver_node_selector": {"pool": "b"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "host_network": True,
    "capabilities": ["IPC_LOCK", "SYS_PTRACE"],
    "user": 1000,
    "priority_class": "high",
    "runtime_class": "nvidia",
    "scheduler": "other",
    "labels": {"kueue.x-k8s.io/queue-name": "research"},
    "annotations": {"note": "x"},
    "claim_is_shared": True,
    "volumes": {"/checkpoints": "checkpoints"},
    "environment_secrets": ["hf-token"],
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "cordon": True,
    "deadline_s": 86_400,
}


def job(options: dict[str, Any], **given: Any) -> RunConfig:
    changes = {"run.script": "/work/train.py", "run.backend": "kubernetes", "run.backend_options": options}
    return load_job(None, (), {**changes, **{f"run.{key}": value for key, value in given.items()}}).value.run


def driver_manifests(options: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    config = job(options, **given)
    return for_driver(config, read_options(config), "ml", "ab" * 32)


@pytest.mark.parametrize("options", [OPTIONS, FULL])
def test_every_manifest_is_as_the_api_has_it(options: dict[str, Any]) -> None:
    manifests = driver_manifests(options)
    kinds = [checked(manifest)["kind"] for manifest in manifests]
    assert kinds[-4:] == ["Secret", "ConfigMap", "Service", "Job"]
    assert ("ClusterRole" in kinds) == ("cordon" in options)
    checked(executors("phalanx-train", 1, 5, KubernetesOptions(**options), {}, avoid={"a", "b"}, deadline_s=60))


def test_the_driver_in_its_pod_reads_the_same_job() -> None:
    manifests = driver_manifests(FULL, hosts=4, spares=1, workers_per_host="gpu", environment={"A": "1"})
    text = next(manifest for manifest in manifests if manifest["kind"] == "ConfigMap")["data"]["job.toml"]
    told = RunConfig(**tomllib.loads(text)["run"])
    assert (told.hosts, told.spares, told.workers_per_host, told.environment) == (4, 1, 8, {"A": "1"})
    assert told.listen == "0.0.0.0:7700" and told.tls.files is not None and told.job_name == "train"
    assert read_options(told) == read_options(job(FULL))


def test_the_token_is_in_the_secret_and_nowhere_else() -> None:
    found = [manifest["kind"] for manifest in driver_manifests(FULL) if "ab" * 32 in json.dumps(manifest)]
    assert found == ["Secret"]


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({}, {}, "image"),
        ({**OPTIONS, "imagee": "x"}, {}, "run.backend_options.imagee"),
        ({**OPTIONS, "resources": {"nvidia.com/gpu": "eight"}}, {}, "is no quantity"),
        ({**OPTIONS, "host_network": True, "one_per_node": False}, {}, "one_per_node"),
        ({**OPTIONS, "claim": ""}, {}, "journal would be lost"),
        (OPTIONS, {"workers_per_host": "gpu"}, "cannot be known"),
        (OPTIONS, {"environment": {"HF_TOKEN": "x"}}, "environment_secrets"),
        ({**OPTIONS, "deadline_s": 100}, {}, "stop_before_s"),
        ({**OPTIONS, "volumes": {"data": "claim"}}, {}, "absolute"),
    ],
)
def test_mistakes_are_told_with_their_cure(options: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        driver_manifests(options, **given)


def test_names_are_such_as_the_api_takes() -> None:
    assert base_name("train") == "phalanx-train"
    assert base_name("Llama_8B") != base_name("llama-8b")
    longest = host_name(base_name("x" * 63), 999, 99_999)
    assert len(longest) <= 63


def test_lists_of_indexes() -> None:
    assert indexes("1,3-5,7") == {1, 3, 4, 5, 7} and indexes(None) == indexes("") == set()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def api_of(cluster: Cluster) -> ClusterApi:
    configuration = client.Configuration(host=cluster.url)
    configuration.retries = False
    return ClusterApi(client.ApiClient(configuration), "ml")


def test_everything_is_made_and_belongs_to_the_job_which_begins_last(cluster: Cluster) -> None:
    make_all(api_of(cluster), driver_manifests(FULL))
    made = cluster.get("Job", "phalanx-train")
    assert made["spec"]["suspend"] is False
    assert cluster.seen[-1] == ("PATCH", "/apis/batch/v1/namespaces/ml/jobs/phalanx-train")
    owned = {kind: body["metadata"].get("ownerReferences") for (kind, _), body in cluster.objects.items()}
    assert all(owned[kind][0]["uid"] == made["metadata"]["uid"] for kind in ("Secret", "ConfigMap", "Role", "Service"))
    with pytest.raises(UserError, match="in the cluster already"):
        make_all(api_of(cluster), driver_manifests(FULL))


def test_what_cannot_be_made_whole_is_removed(cluster: Cluster) -> None:
    cluster.refuse("POST", "/secrets$", 403, "Forbidden", "secrets is forbidden")
    with pytest.raises(ClusterError, match="secrets is forbidden"):
        make_all(api_of(cluster), driver_manifests(OPTIONS))
    assert ("Job", "phalanx-train") not in cluster.objects


def test_submitting_by_a_kubeconfig(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.delenv(DRIVER_VARIABLE, raising=False)
    options = {key: value for key, value in OPTIONS.items() if key != "namespace"}
    assert submit_job(job({**options, "manifest": "print"})) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["kind"] for each in printed][-1] == "Job" and not cluster.objects
    assert submit_job(job(options)) == 0
    assert "kubectl -n ml logs -f job/phalanx-train" in capsys.readouterr().out
    with pytest.raises(UserError, match="give one of here"):
        submit_job(job({**options, "context": "there"}))
    monkeypatch.setenv(DRIVER_VARIABLE, "phalanx-train")
    assert submit_job(job(options)) is None


def test_secrets_become_files_of_this_user_alone(tmp_path: Path) -> None:
    hidden = tmp_path / "source" / "..2026_11_21"
    hidden.mkdir(parents=True)
    (hidden / "token").write_text("ab" * 32)
    (tmp_path / "source" / "token").symlink_to(hidden / "token")
    for _ in range(2):
        entry.take_secrets(tmp_path / "source", tmp_path / "own")
    token = tmp_path / "own" / "token"
    assert token.read_text() == "ab" * 32 and not token.is_symlink()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["token"]


def test_an_executor_is_told_who_it_is(tmp_path: Path) -> None:
    settings = {"job": "train", "host": "", "folder": "/f", "driver": "", "token": "", "logs": "/f/logs"}
    given = {"settings": settings, "base": "phalanx-train", "wave": 2, "driver": "phalanx-train.ml.svc:7700"}
    environ = {"JOB_COMPLETION_INDEX": "3", "PHALANX_POD_IP": "10.1.2.3"}
    command = entry.executor_command(["executor", json.dumps(given)], environ, tmp_path)
    told = ExecutorSettings(**json.loads(command[-1]))
    assert (told.host, told.address, told.uses_tls) == ("phalanx-train-w2-3", "10.1.2.3", True)
    assert Path(told.driver).read_text().split() == ["phalanx-train.ml.svc:7700"]
    with pytest.raises(UserError, match="no part of a job"):
        entry.executor_command(["something"], environ, tmp_path)


@pytest.mark.parametrize(("body", "status"), [("1 / 0", 70), ("raise SystemExit(4)", 4), ("", 0)])
def test_a_driver_that_crashes_does_not_end_as_a_script_does_that_fails(tmp_path: Path, body: str, status: int) -> None:
    (tmp_path / "fake_command.py").write_text(f"{body}\n")
    call = f"from {entry.__name__} import drive; drive([], 'fake_command')"
    assert subprocess.run([sys.executable, "-c", call], cwd=tmp_path, capture_output=True).returncode == status


def test_every_option_is_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_kubernetes.md").read_text()
    missing = [name for name in KubernetesOptions.model_fields if f"| `{name}` |" not in page]
    assert not missing
