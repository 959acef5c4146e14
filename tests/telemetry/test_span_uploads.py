"""Telemetry in object storage: sent beside recording, asked where it lies; on moto's S3 server on loopback."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from storage_helpers import SLOW_DOWN, Server, s3_server_fixture  # noqa: F401
from trace_runs import GROUPS, four_ranks, write_run

from phalanx.cli.trace_command import command
from phalanx.core import object_requests
from phalanx.core.errors import UserError
from phalanx.telemetry.lost_telemetry import note_dropped
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.recording import record_spans
from phalanx.telemetry.remote_path import RemotePath, check_url
from phalanx.telemetry.span_store import parts
from phalanx.telemetry.span_uploads import RemoteFiles, SpanUploads
from phalanx.telemetry.span_writer import prune
from phalanx.telemetry.writer_place import WriterSettings


@pytest.fixture
def remote(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    monkeypatch.setattr(object_requests, "WAITS_S", ())
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)  # the client library's own, whose waits are long
    yield RemotePath.of(f"s3://bucket/{uuid.uuid4().hex}", s3_server.options)
    s3_server.gate.reset()


def until(is_so: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_place_in_storage_is_read_as_a_folder_is(remote: RemotePath, tmp_path: Path) -> None:
    names = ("spans/a/1.parquet", "spans/a/2.parquet", "spans/b/1.parquet", "spans/b/deep/3.parquet", "metrics.jsonl")
    for root in (tmp_path, remote):
        for name in names:
            path = root / name
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode())

    def below(pattern: str) -> list[str]:
        found = [str(path).removeprefix(str(remote)) for path in remote.glob(pattern)]
        assert found == sorted(str(path).removeprefix(str(tmp_path)) for path in tmp_path.glob(pattern))
        return found

    assert below("spans/*/*.parquet") == [f"/{name}" for name in names[:3]]
    assert below("spans/a/*.parquet") == ["/spans/a/1.parquet", "/spans/a/2.parquet"]
    assert (
        below("*.jsonl") == ["/metrics.jsonl"]
        and below("nothing/*") == []
        and below("spans/*") == ["/spans/a", "/spans/b"]
    )
    file = remote / "spans" / "a" / "1.parquet"
    assert file.read_text() == "spans/a/1.parquet" and file.stat().st_size == 17 and file.name == "1.parquet"
    assert next(iter(remote.glob("spans/a/*"))).stat().st_size == 17
    assert (remote / "spans").is_dir() and not (remote / "nothing").is_dir() and (remote / "metrics.jsonl").is_file()
    assert file.parent.parent == remote / "spans" and file.resolve() == file
    with file.open() as stream:
        assert stream.read(5) == b"spans"
    file.unlink()
    file.unlink(missing_ok=True)
    assert not file.exists()
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    with pytest.raises(UserError, match="knows no"):
        RemotePath.of("nonsense://bucket")


def copied(folder: Path, remote: RemotePath) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            (remote / str(path.relative_to(folder))).write_bytes(path.read_bytes())


def test_questions_have_the_same_answers_where_the_run_lies_in_storage(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    here = write_run(tmp_path, four_ranks(6, slow={1: 1.5, 3: 1.2}), GROUPS, [{"kind": "step", "step": 2, "loss": 3.5}])
    (tmp_path / "telemetry" / "clocks").mkdir()
    (tmp_path / "telemetry" / "clocks" / "host1.jsonl").write_text(
        json.dumps({"host": "host1", "at_ns": 1000 * 10**9, "offset_ns": 5, "error_ns": 3.0}) + "\n"
    )
    (tmp_path / "telemetry" / "incidents.jsonl").write_text('{"kind": "hang", "at_ns": 1000100000000}\n')
    copied(tmp_path, remote)
    there = Trace.open(str(remote), s3_server.options)
    assert there.hosts == here.hosts == ["host0", "host1"]
    for ask in (
        lambda trace: trace.rank_averages(1, 4),
        lambda trace: trace.transfers(),
        lambda trace: trace.launch_skew(2, 2),
        lambda trace: trace.incidents(),
        lambda trace: trace.timeline(1, 1, ranks=[2]),
        lambda trace: trace.sql("select loss, (select count(*) from spans) as spans from metrics"),
    ):
        assert sorted(ask(there).to_pylist(), key=str) == sorted(ask(here).to_pylist(), key=str) != []
    with pytest.raises(UserError, match="file system operations are disabled"):
        there.sql(f"select * from read_text('s3://bucket/{uuid.uuid4().hex}/secret')")
    with pytest.raises(UserError, match="no telemetry"):
        Trace.open("s3://bucket/nothing-there", s3_server.options)
    s3_server.gate.refusal, s3_server.gate.refused_methods = SLOW_DOWN, ("GET", "HEAD")
    with pytest.raises(UserError, match="cannot be read"):
        Trace.open(str(remote), s3_server.options)


def test_what_is_finished_is_sent_and_removed_and_lines_again_when_they_grow(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    write_run(tmp_path, four_ranks(3), GROUPS)
    spool = tmp_path / "telemetry"
    (spool / "spans" / "host0" / ".half.tmp").write_bytes(b"not finished")
    note_dropped(spool, "host0", 7)
    uploads = SpanUploads(spool, remote / "telemetry", "host0")
    groups = remote / "telemetry" / "groups" / "host0.jsonl"
    until(lambda: not uploads.left())
    before = len(groups.read_text().splitlines())
    with (spool / "groups" / "host0.jsonl").open("a") as file:
        file.write('{"rank": 9, "attempt": 0, "group": "tensor", "ranks": [9]}\n')
    assert uploads.close(60)
    assert len(groups.read_text().splitlines()) == before + 1
    left = sorted(str(path.relative_to(spool)) for path in spool.rglob("*") if path.is_file())
    assert [name for name in left if "host0" in name] == [
        "dropped/host0.jsonl",
        "groups/host0.jsonl",
        "spans/host0/.half.tmp",
    ]
    assert [name for name in left if "host1" in name]  # another host's
    there = Trace.open(str(remote), s3_server.options)
    assert there.sql("select distinct rank from spans order by rank").to_pylist() == [{"rank": 0}, {"rank": 1}]
    assert there.lost().dropped == {"host0": 7}


def test_storage_that_fails_holds_nothing_up_and_gets_all_later(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    write_run(tmp_path, four_ranks(3), GROUPS)
    spool = tmp_path / "telemetry"
    s3_server.gate.refusal = SLOW_DOWN
    uploads = SpanUploads(spool, remote / "telemetry", "host0")
    until(lambda: uploads.problem)
    assert "SlowDown" in uploads.problem or "503" in uploads.problem
    count = len(uploads.left())
    assert not uploads.close(60) and len(uploads.left()) == count > 3
    s3_server.gate.refusal = ()
    later = SpanUploads(spool, remote / "telemetry", "host0")  # as a writer that comes after
    assert later.close(60) and not later.left() and later.sent == count


def test_storage_that_hangs_does_not_keep_the_writer(remote: RemotePath, s3_server: Server, tmp_path: Path) -> None:
    write_run(tmp_path, four_ranks(3), GROUPS)
    released, began = threading.Event(), threading.Event()

    def hang(path: Path) -> None:
        began.set()
        released.wait(60)

    uploads = SpanUploads(tmp_path / "telemetry", remote / "telemetry", "host0", began=hang)
    assert began.wait(60) and not uploads.close(0.05)
    released.set()
    assert uploads.close(60)


def test_files_may_stay_here_and_lines_of_a_lost_folder_stay_there(
    remote: RemotePath, s3_server: Server, tmp_path: Path
) -> None:
    write_run(tmp_path, four_ranks(3), GROUPS)
    folder = tmp_path / "telemetry"
    groups = remote / "telemetry" / "groups" / "host0.jsonl"
    groups.write_bytes(b'{"rank": 7, "attempt": 0, "group": "old", "ranks": [7]}\n')
    kept = sorted(path.name for path in folder.glob("*/host0/*"))
    first = SpanUploads(folder, remote / "telemetry", "host0", keeps=True)
    assert first.close(60) and first.sent == len(kept) + 1
    assert sorted(path.name for path in folder.glob("*/host0/*")) == kept
    second = SpanUploads(folder, remote / "telemetry", "host0", keeps=True)
    assert second.close(60) and second.sent == 1  # the lines
    lines = groups.read_text().splitlines()
    assert '"old"' in lines[0] and len(lines) == 1 + len((folder / "groups" / "host0.jsonl").read_text().splitlines())


def test_commands_take_urls(
    remote: RemotePath, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, four_ranks(6), GROUPS)
    copied(tmp_path, remote)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.options["endpoint_url"])
    query = "select rank, sum(forward_ns) as ns from steps group by rank order by rank"
    found = [
        CliRunner().invoke(command, ["sql", place, query, "--json"], catch_exceptions=False)
        for place in (str(remote), str(tmp_path))
    ]
    assert found[0].exit_code == 0 and found[0].output == found[1].output != ""
    page = tmp_path / "report.html"
    reported = CliRunner().invoke(command, ["report", str(remote), "--out", str(page)], catch_exceptions=False)
    assert reported.exit_code == 0, reported.output
    assert remote.name in page.read_text() and "of a step" in reported.output
    refused = CliRunner().invoke(command, ["summary", "nonsense://bucket/run"])
    assert refused.exit_code != 0 and "nonsense" in str(refused.output) + str(refused.exception)


def test_a_script_records_into_storage_and_leaves_nothing_here(
    remote: RemotePath, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.options["endpoint_url"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spans = record_spans(str(remote), environ={})
    for step in (1, 2, 3):
        with spans.step(step), spans.span("loss", kind="forward"):
            pass
    spans.close()
    found: list[Any] = []

    def has_all() -> bool:  # the process that writes may need longer than the end of a script waits
        if (remote / "telemetry" / "spans").exists() and (remote / "telemetry" / "clocks").exists():
            trace = Trace.open(str(remote))
            found[:] = trace.sql("select step, count(*) as spans from spans group by step order by step").to_pylist()
        return bool(found)

    until(has_all)
    assert found == [{"step": step, "spans": 2} for step in (1, 2, 3)]
    (clock,) = (
        Trace.open(str(remote)).sql("select offset_ns, error_ns, host = reference as own from clocks").to_pylist()
    )
    assert clock == {"offset_ns": 0, "error_ns": 0.0, "own": True}
    until(lambda: not any(tmp_path.rglob("*.parquet")))


def test_old_spans_go_there_too_but_not_those_of_incidents(remote: RemotePath, tmp_path: Path) -> None:
    write_run(tmp_path, [one for step in range(3) for one in four_ranks(step + 1) if one["step"] == step], GROUPS)
    copied(tmp_path, remote)
    place: Any = remote / "telemetry"
    (kept,) = parts(place, "spans", "host0")
    RemoteFiles(place).write(
        "incidents/host1.jsonl", json.dumps({"kind": "hang", "at_ns": kept.to_ms * 10**6}).encode()
    )
    late_s = kept.to_ms / 1e3 + 7200
    prune(place, "host0", WriterSettings(), late_s)
    assert [part.path for part in parts(place, "spans", "host0")] == [kept.path]
    prune(place, "host0", WriterSettings(around_s=0.0, most_bytes=10), late_s)
    assert parts(place, "spans", "host0") == [] and parts(place, "steps", "host0") and parts(place, "spans", "host1")
    assert RemoteFiles(place).read("incidents/host9.jsonl") is None


def test_urls_that_nothing_can_be_sent_to_are_refused_before_anything_is_done() -> None:
    for url in ("nonsense://bucket", "s3://", "folder"):
        with pytest.raises(UserError):
            check_url(url)
    check_url("s3://bucket/run")
