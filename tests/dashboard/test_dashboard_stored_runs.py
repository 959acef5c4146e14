"""Runs in object storage, on the pages: what their hosts sent is shown, and what they did not is said; on moto's S3."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_helpers import BASE, make_run
from fastapi.testclient import TestClient
from storage_helpers import Server, s3_server_fixture  # noqa: F401
from support.browser import TOKEN

from phalanx.cli.runs_command import command as runs_command
from phalanx.core import object_requests
from phalanx.core.errors import UserError
from phalanx.dashboard.dashboard_app import create_app
from phalanx.dashboard.data_source import DataSource
from phalanx.dashboard.stored_runs import StoredRuns, is_store_url
from phalanx.telemetry.remote_path import RemotePath
from phalanx.telemetry.run_presence import announce
from phalanx.telemetry.span_uploads import SpanUploads
from tests.telemetry.trace_runs import GROUPS, four_ranks, write_run


@pytest.fixture
def remote(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    monkeypatch.setattr(object_requests, "WAITS_S", ())
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)  # the client library's own, whose waits are long
    yield RemotePath.of(f"s3://bucket/{uuid.uuid4().hex}", s3_server.options)
    s3_server.gate.reset()


place_of = RemotePath.of


def upload(folder: Path, to: RemotePath) -> None:
    """All of a folder, as `aws s3 sync` does."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (to / str(path.relative_to(folder))).write_bytes(path.read_bytes())


def stored(at: RemotePath, server: Server, folder: Path, **more: int) -> StoredRuns:
    return StoredRuns(str(at), folder / at.name, server.options, **more)


def client_of(store: StoredRuns) -> TestClient:
    client = TestClient(create_app(DataSource.of_store(store), TOKEN), base_url=BASE, follow_redirects=False)  # type: ignore[arg-type]
    assert client.get(f"/?token={TOKEN.reveal()}").status_code == 303
    return client


def traced(folder: Path, total: int = 20) -> Path:
    """A run of 20 steps with figures and spans."""
    run = make_run(folder, total=total)
    lines = (run / "metrics.jsonl").read_bytes()
    write_run(run, four_ranks(10, slow={1: 1.4}), GROUPS)
    (run / "metrics.jsonl").write_bytes(lines)
    return run


def test_a_whole_run_that_was_copied_there_has_its_pages(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    run = traced(tmp_path / "here" / "base")
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "checkpoints" / "step-00000010" / "model").write_bytes(b"large")
    (run / "ended.json").write_text(json.dumps({"why": "all was done", "step": 20}))
    upload(run, remote / "base")
    store = stored(remote, s3_server, tmp_path / "mirror")
    assert store.refresh() == 1 and not (store.folder / "base" / "checkpoints").exists()
    client = client_of(store)
    runs = client.get("/runs").text + client.get("/runs/table").text
    assert "base" in runs and "finished" in runs
    curves = client.get("/run/figure", params={"run": "base", "column": "loss"})
    assert curves.status_code == 200 and "no figures" not in curves.text
    for page in ("/run", "/machines", "/timeline", "/parallelism", "/incidents", "/findings", "/plan", "/logs"):
        found = client.get(page, params={"run": "base"})
        assert found.status_code == 200, page
        assert str(tmp_path) not in found.text, f"{page} names the folder that stands for storage"
    assert "host0" in client.get("/machines/heatmap", params={"run": "base"}).text


def test_what_training_sends_is_enough_for_curves_and_timeline(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    run = traced(tmp_path / "here" / "live", total=40)
    announce(run, rank=0, world_size=4, start=1, page=None)
    presence = json.loads((run / "processes" / "rank-0.json").read_text())
    (run / "processes" / "rank-0.json").write_text(json.dumps(presence | {"host": "host0"}))
    for host in ("host0", "host1"):
        assert SpanUploads(run / "telemetry", remote / "live" / "telemetry", host, keeps=True, run=run).close(60)
    store = stored(remote, s3_server, tmp_path / "mirror")
    assert store.refresh() == 1
    assert (store.folder / "live" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    source = DataSource.of_store(store)
    (found,) = source.runs()
    assert (found.row.state, found.row.step) == ("running", 20)
    assert not list((store.folder / "live").glob("processes/*"))  # which live or not on their hosts alone


def test_the_host_of_rank_0_sends_how_the_run_ended(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    run = traced(tmp_path / "here" / "live", total=40)
    announce(run, rank=0, world_size=4, start=1, page=None)
    presence = run / "processes" / "rank-0.json"
    presence.write_text(json.dumps(json.loads(presence.read_text()) | {"host": "host0"}))
    uploads = SpanUploads(run / "telemetry", remote / "live" / "telemetry", "host0", keeps=True, run=run)
    until(lambda: (remote / "live" / "metrics.jsonl").exists())
    (run / "ended.json").write_text(json.dumps({"why": "stopped by SIGTERM", "step": 20}))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 21, "loss": 1.0}\n')
    assert uploads.close(60)
    store = stored(remote, s3_server, tmp_path / "mirror")
    store.refresh()
    (found,) = DataSource.of_store(store).runs()
    assert (found.row.state, found.row.step, found.row.why) == ("stopped", 21, "stopped by SIGTERM")


def until(is_so: object) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_telemetry_alone_says_what_is_not_there(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    run = write_run(tmp_path / "here", four_ranks(10), GROUPS).folder
    upload(run, remote / "own" / "telemetry")
    for at, kind in ((remote, "folder"), (remote / "own", "run"), (remote / "own" / "telemetry", "run")):
        store = stored(at, s3_server, tmp_path / kind / at.name)
        assert store.refresh() == 1
        source = DataSource.of_store(store)
        assert source.kind == kind and source.run().row.state == "running"
        client = client_of(store)
        assert client.get("/timeline").status_code == 200 and "host0" in client.get("/machines/heatmap").text
        assert "logs stay on the hosts" in client.get("/logs").text
        assert "No figures of this run" in client.get("/run").text
    for path in store.folder.rglob("*.parquet"):
        os.utime(path, (time.time() - 3600,) * 2)
    row = DataSource.of_store(store).run().row
    assert row.state == "unknown" and "its hosts have sent nothing for 1h" in row.why


def test_what_grows_is_read_on_and_what_is_gone_goes(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    run = remote / "a"
    (run / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n')
    (run / "telemetry/steps/h/a0-s1-s1-t1-t2-r0-r0-1.parquet").write_bytes(b"PAR1")
    store = stored(remote, s3_server, tmp_path)
    store.refresh()
    figures = store.folder / "a" / "metrics.jsonl"
    before = figures.stat().st_ino
    (run / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n')
    (run / "telemetry/steps/h/a0-s1-s1-t1-t2-r0-r0-1.parquet").unlink()
    store.refresh()
    assert figures.stat().st_ino == before and len(figures.read_bytes().splitlines()) == 2
    assert not list(store.folder.rglob("*.parquet"))
    (run / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 9}\n')  # a resumed run drops steps
    store.refresh()
    assert figures.read_bytes() == b'{"kind": "step", "step": 9}\n'


def test_names_that_no_folder_can_have_are_left_there(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    (remote / "a" / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n')
    for name in ("logs/../../../../outside", "logs//outside", "logs/b", "logs/b/c"):
        (remote / "a" / name).write_bytes(b"text")
    store = stored(remote, s3_server, tmp_path / "mirror")
    assert store.refresh() == 1
    store.refresh()
    assert not (tmp_path / "outside").exists() and not Path("/outside").exists()
    assert (store.folder / "a" / "metrics.jsonl").exists()


def test_the_oldest_spans_stay_there_where_all_would_be_too_many(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    for last in range(4):
        name = f"telemetry/spans/h/a0-s{last}-s{last}-t1-t2-r0-r0-{last}.parquet"
        (remote / "a" / name).write_bytes(b"x" * 100)
    store = stored(remote, s3_server, tmp_path, most_span_bytes=250)
    store.refresh()
    assert sorted(path.name[:5] for path in store.folder.rglob("*.parquet")) == ["a0-s2", "a0-s3"]
    assert store.left_span_bytes > 0


def test_storage_that_fails_is_said_and_the_last_state_stays(
    remote: RemotePath, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no run lies there"):
        stored(remote, s3_server, tmp_path / "none").begin()
    upload(make_run(tmp_path / "here" / "base"), remote / "base")
    monkeypatch.setattr("phalanx.dashboard.stored_runs.EVERY_S", 0.01)
    store = stored(remote, s3_server, tmp_path / "mirror")
    store.begin()
    try:
        client = client_of(store)
        monkeypatch.setattr(RemotePath, "iterdir", _refused)
        until(lambda: store.problem)
        assert "cannot be read (no route)" in client.get("/freshness", params={"run": "base"}).text
        assert client.get("/run", params={"run": "base"}).status_code == 200
    finally:
        store.close()
    with pytest.raises(UserError, match="cannot be read"):
        stored(remote, s3_server, tmp_path / "refused").begin()


def _refused(self: RemotePath) -> Iterator[RemotePath]:
    raise OSError("no route")


def test_the_table_of_runs_needs_no_spans(
    remote: RemotePath, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(traced(tmp_path / "here" / "base"), remote / "base")
    upload(write_run(tmp_path / "own", four_ranks(10), GROUPS).folder, remote / "own" / "telemetry")
    monkeypatch.setattr(RemotePath, "of", lambda url, options: place_of(url, s3_server.options))
    fetched: list[str] = []
    read_bytes = RemotePath.read_bytes

    def noted(self: RemotePath) -> bytes:
        fetched.append(self.name)
        return read_bytes(self)

    monkeypatch.setattr(RemotePath, "read_bytes", noted)
    result = CliRunner().invoke(runs_command, ["ls", str(remote), "--sort", "name", "--json"], catch_exceptions=False)
    base, own = json.loads(result.output)["runs"]
    assert (base["name"], base["state"], base["step"]) == ("base", "finished", 20)
    assert (own["name"], own["state"], own["step"]) == ("own", "running", None)
    assert base["folder"] == f"{remote}/base"
    assert not [name for name in fetched if name.endswith(".parquet")] and "metrics.jsonl" in fetched
    assert "base" in CliRunner().invoke(runs_command, [str(remote)], catch_exceptions=False).output


def test_what_is_a_place_in_storage() -> None:
    assert is_store_url("s3://bucket/runs") and is_store_url("memory://runs")
    assert not is_store_url("runs") and not is_store_url("https://driver:1")
