"""`phalanx checkpoint` where the pointer, rules of keeping and object stores matter."""

# ruff: noqa: F811  (the fixture `run` is imported)
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from moto.server import ThreadedMotoServer

from checkpoint_runs import call, call_json, checkpoint, damage, make_tensors, run  # noqa: F401  # isort: skip
from checkpoint_helpers import rewrite
from plain_writers import save_alone
from support.open_checkpoint import open_checkpoint

from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import advance, claim
from phalanx.core.errors import UserError


def test_ls_goes_by_the_pointer(run: Path) -> None:
    store = LocalStore(run / "checkpoints")
    attempt = claim(store)
    advance(store, attempt, 100, "step-00000100", "")
    assert {row["name"]: row["status"] for row in call_json("ls", run)} == {
        "step-00000200": "unused",
        "step-00000100": "latest",
    }
    assert call_json("show", run)["step"] == "100"


def test_prune(run: Path) -> None:
    for step in (300, 400, 500):
        save(run / "checkpoints", step, make_tensors())
    names = [f"step-00000{step}" for step in (500, 400, 300, 200, 100)]
    dry = call("prune", run, "--keep-last", 1, "--keep-every", 200, "--dry-run")
    assert [row["name"] for row in call_json("ls", run)] == names
    result = call("prune", run, "--keep-last", 1, "--keep-every", 200)
    assert dry.output.replace("would be ", "").replace("  ", " ").split() == result.output.split()
    assert [row["name"] for row in call_json("ls", run)] == [names[0], names[1], names[3]]
    assert "2 of 5 checkpoints" in result.output
    damage(run, 500)
    call("prune", run)
    assert [row["name"] for row in call_json("ls", run)] == [names[0], names[1], names[3]]  # 500 is not whole


def test_prune_by_metric_and_by_room(run: Path) -> None:
    for step, loss in ((100, 1.0), (200, 3.0), (300, 2.0), (400, 4.0)):
        save(run / "checkpoints", step, make_tensors())
        rewrite(checkpoint(run, step), lambda tree, loss=loss: tree.update(metrics={"loss": loss}))  # type: ignore[misc]
    call("prune", run, "--keep-last", 1, "--keep-best", 2, "--metric", "loss")
    assert [row["step"] for row in call_json("ls", run)] == [400, 300, 100]
    call("prune", run, "--keep-last", 3, "--budget", "15 kB")
    assert [row["step"] for row in call_json("ls", run)] == [400]
    with pytest.raises(UserError, match=r"--budget: 'huge' is no size; write bytes"):
        call("prune", run, "--budget", "huge")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
        yield "s3://runs"
    server.stop()


def test_on_an_object_store(run: Path, bucket: str) -> None:
    url = f"{bucket}/first/checkpoints"
    assert f"is now {url}/step-00000200.a2-" in call("convert", run, url, "--files", 2).output
    [row] = call_json("ls", f"{bucket}/first")
    assert row["status"] == "latest"
    assert call("diff", run, f"{url}/{row['name']}").exit_code == 0
    assert "whole (" in call("verify", url).output
    assert call_json("show", url, "--health")["tensors"]["model.head"]["health"]["mean"] == 1.0
    call("convert", url, run / "back")
    assert call("diff", run, run / "back").exit_code == 0
    assert "0 of 1 checkpoints" in call("prune", url).output
    with pytest.raises(UserError, match="there is no checkpoint here"):
        call("ls", f"{bucket}/second")
    with pytest.raises(UserError, match="holds checkpoints already"):
        call("convert", run, url)


def test_plain_checkpoint_on_an_object_store(tmp_path: Path, bucket: str) -> None:
    save_alone(tmp_path / "step-3", {"weight": torch.arange(6.0)})
    fsspec.filesystem("s3").put(str(tmp_path / "step-3"), "runs/titan/step-3", recursive=True)
    assert "weight" in call("show", f"{bucket}/titan/step-3").output
    call("convert", f"{bucket}/titan/step-3", tmp_path / "ours")
    assert torch.equal(open_checkpoint(tmp_path / "ours" / "step-00000003").read()["weight"], torch.arange(6.0))


def test_storage_that_refuses_is_a_user_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(LocalStore, "names", refuse)
    with pytest.raises(UserError, match=r"storage refuses \(Permission denied: there\); check the path"):
        call("ls", run)
