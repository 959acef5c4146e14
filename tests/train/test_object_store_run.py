"""`phalanx train` whose checkpoints lie on an S3 server (moto's, on loopback): killed and gone on with, and refused."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.kills.campaign import KEEPER, PERSISTER
from support.kills.run import TinyRun, kill
from test_background_runs import UNDISTURBED, Runner, SharedRun, end_killed, until

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from storage_helpers import DENIED, SLOW_DOWN, Server, s3_server_fixture  # noqa: F401
from support.open_checkpoint import newest

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.latest import Latest, read_latest
from phalanx.checkpoint.storage.location import open_store

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

STEPS = 20
GUARD_S = 180.0
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
EVERY_METHOD = ("GET", "HEAD", "PUT", "POST", "DELETE")
UNKNOWN = ("403 Forbidden", "InvalidAccessKeyId", "The access key id you provided does not exist in our records")
NO_KEYS = {
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class StoredRun(SharedRun):
    """A run whose checkpoints lie on the server; it has its credentials from its environment."""

    environment: dict[str, str] = field(default_factory=dict)

    def become(self, faults: str = "") -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(NO_KEYS | self.environment)
        super().become(faults)


class StoredRunner(Runner):
    """Starts runs on a server."""

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder)
        self.server = server

    def stored(self, name: str, url: str, environment: dict[str, str] = KEYS, **changes: Any) -> StoredRun:
        settings: dict[str, Any] = {
            "parallel.host_loader": False,
            "train.steps": STEPS,
            "checkpoint.folder": url,
            "checkpoint.storage_options.endpoint_url": self.server.options["endpoint_url"],
            "checkpoint.storage_options.config_kwargs.retries.max_attempts": 0,
            "checkpoint.every_steps": 10,
            "checkpoint.wait": True,  # or the run would end before its first checkpoint is durable
        }
        return StoredRun(self._folder, name, settings | changes, environment=environment)

    def store(self, run: TinyRun) -> Store:
        return open_store(run.changes["checkpoint.folder"], self.server.options)


@pytest.fixture(name="runner", scope="module")
def runner_fixture(tmp_path_factory: pytest.TempPathFactory, s3_server: Server) -> StoredRunner:
    return StoredRunner(tmp_path_factory.mktemp("runs"), s3_server)


@pytest.fixture(name="url")
def url_fixture(s3_server: Server) -> Any:
    yield f"s3://bucket/{uuid.uuid4().hex}"
    s3_server.gate.reset()


def latest_of(store: Store) -> Latest:
    latest = read_latest(store, pytest.fail)
    assert latest is not None
    return latest


@pytest.mark.slow
def test_killed_with_its_keeper_while_it_uploads_it_goes_on_from_what_is_durable(
    runner: StoredRunner, url: str
) -> None:
    straight = runner.run("straight", UNDISTURBED | {"train.steps": STEPS})
    with runner.kept(straight):
        runner.end(runner.start(straight), straight)
    uploading, killed = threading.Event(), threading.Event()
    seen: list[str] = []

    def hold(method: str, path: str) -> None:
        """The second checkpoint has its tensors, and comes no further."""
        if method != "PUT" or not path.endswith("part-0.json"):
            return
        seen.append(path.split("/")[-2])
        if len(seen) == 2:
            uploading.set()
            killed.wait(GUARD_S)

    with runner.kept(runner.stored("killed", url)) as run:
        runner.server.gate.watch = hold
        process = runner.start(run)
        until(uploading.is_set, process, run)
        kill([*run.processes(KEEPER), *run.processes(PERSISTER)])
        os.killpg(process.pid, signal.SIGKILL)
        end_killed(process)
        killed.set()
        first, second = seen
        store = runner.store(run)
        former = latest_of(store)
        assert (former.name, former.attempt) == (first, 1)
        examine(store.at(first), manifest_sha256=former.manifest_sha256)
        assert f"{second}/__0_0.distcp" in everything(runner, url)
        runner.end(runner.start(run), run)
        assert f"going on from {url}/{first} (step {former.step} of {STEPS})" in run.log.read_text()
        assert_the_same(run, store, straight)
        latest = latest_of(store)
        assert (latest.step, latest.attempt) == (STEPS, 2)
        assert not [key for key in everything(runner, url) if key.startswith(second)], "what the killed writer left"


@pytest.mark.campaign
@pytest.mark.slow
def test_a_server_that_fails_to_give_the_latest_ends_the_start_and_not_the_checkpoint(
    runner: StoredRunner, url: str
) -> None:
    """Training never goes on from an older one for it, and the pointer stays."""
    gate = runner.server.gate
    with runner.kept(runner.stored("slowed-down", url)) as run:
        store = runner.store(run)
        runner.end(runner.start(run), run)
        names, latest = store.names(), latest_of(store)
        assert len(names) > 1 and latest.step == STEPS
        kill([*run.processes(KEEPER), *run.processes(PERSISTER)])
        file = f"{latest.name}/__0_0.distcp"
        gate.refusal, gate.refused_methods, gate.refused_name = SLOW_DOWN, ("GET",), file
        run.changes["train.steps"] = STEPS + 5  # type: ignore[index]
        process = runner.start(run)
        process.join(GUARD_S)
        said = run.log.read_text()
        assert process.exitcode == 2, said[-4000:]
        [line] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert file in line and "503 SlowDown" in line and "start again" in line
        assert "damaged (" not in said and "Traceback" not in said
        assert run.last_step() == STEPS
        gate.reset()
        assert store.names() == names
        runner.end(runner.start(run), run)
        assert f"going on from {url}/{latest.name}" in run.log.read_text()


@pytest.mark.campaign
@pytest.mark.slow
def test_credentials_that_are_withdrawn_cost_checkpoints_and_nothing_else(runner: StoredRunner, url: str) -> None:
    """Until the end, when it is told; what lies in memory then is taken up by the next start."""
    gate = runner.server.gate
    pointed: list[str] = []

    def withdraw(method: str, path: str) -> None:
        """After the first checkpoint."""
        if pointed:
            gate.refusal, gate.refused_methods = UNKNOWN, EVERY_METHOD
        elif method == "PUT" and path.endswith("latest-00000002.json"):
            pointed.append(path)  # the first is the attempt's claim

    with runner.kept(runner.stored("withdrawn", url)) as run:
        store = runner.store(run)
        gate.watch = withdraw
        process = runner.start(run)
        process.join(GUARD_S)
        assert gate.refusal
        log = run.log.read_text()
        assert process.exitcode == 2, log[-4000:]
        assert run.last_step() == STEPS, "training went on"
        [line] = [line for line in log.splitlines() if line.startswith("error: ")]
        assert f"the last checkpoint (step {STEPS}) is not durable" in line
        assert url.removeprefix("s3://") in line and UNKNOWN[2] in line
        gate.reset()
        assert latest_of(store).step < STEPS
        runner.end(runner.start(run), run)
        log = run.log.read_text()
        assert "going on from the memory of this host" in log and f"(step {STEPS} of {STEPS})" in log
        assert (latest_of(store).step, latest_of(store).attempt) == (STEPS, 2)


def assert_the_same(run: TinyRun, store: Store, straight: TinyRun) -> None:
    """Each step and each bit at the end, of a run that nobody disturbed and that lay in a folder."""
    assert run.steps() == straight.steps()
    ends = [newest(place, pytest.fail) for place in (store, straight.path / "checkpoints")]
    mine, theirs = (found.read() for found in ends if found is not None)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def everything(runner: StoredRunner, url: str) -> list[str]:
    """The keys of all objects of a run."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **runner.server.options)
    return [key.removeprefix(f"{root}/") for key in fs.find(root)]


REFUSED = {
    "no such bucket": ("s3://absent/run", KEYS, (), "The specified bucket does not exist"),
    "no credentials": ("", {}, (), "Unable to locate credentials"),
    "refused credentials": ("", KEYS, UNKNOWN, "does not exist in our records"),
    "read only": ("", KEYS, DENIED, "Access Denied"),
}


@pytest.mark.campaign(but=("no credentials", "read only"))
@pytest.mark.parametrize("what", REFUSED)
def test_storage_that_cannot_be_written_is_told_before_training(runner: StoredRunner, url: str, what: str) -> None:
    other, environment, refusal, cause = REFUSED[what]
    runner.server.gate.refusal = refusal
    if what == "refused credentials":
        runner.server.gate.refused_methods = EVERY_METHOD
    where = other or url
    with runner.kept(runner.stored(what.replace(" ", "-"), where, environment)) as run:
        process = runner.start(run)
        process.join(GUARD_S)
        said = run.log.read_text()
        assert process.exitcode == 2, said
        assert "Traceback" not in said
        [line] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert f"checkpoint.folder = {where!r}: checkpoints cannot be written there" in line
        assert cause in line
        assert "see to bucket, credentials (in the environment) and network, or set checkpoint.folder" in line
        assert run.last_step() == 0


def test_a_url_of_which_the_slashes_were_forgotten(runner: StoredRunner) -> None:
    with runner.kept(runner.stored("slashes", "s3:/bucket/run")) as run:
        del run.changes["checkpoint.storage_options.endpoint_url"]  # type: ignore[attr-defined]
        del run.changes["checkpoint.storage_options.config_kwargs.retries.max_attempts"]  # type: ignore[attr-defined]
        process = runner.start(run)
        process.join(GUARD_S)
        assert process.exitcode == 2
        assert "checkpoint.folder = 's3:/bucket/run': is a URL whose slashes are missing" in run.log.read_text()
        assert not (run.folder / "s3:").exists()
