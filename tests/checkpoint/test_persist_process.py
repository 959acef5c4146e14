"""Persister processes: they make checkpoints of snapshots, whatever befalls them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import zipfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from persist_helpers import Job, areas, collect, persister, problems

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.persist.persister_process import PersisterProcess
from phalanx.checkpoint.storage.latest import claim, read_latest
from phalanx.checkpoint.storage.location import open_store

POINTS = (
    "persist.begin",
    "persist.shard-half",
    "persist.shard-written",
    "persist.part-written",
    "persist.manifest-written",
    "persist.before-publish",
    "persist.published",
    "persist.pointer-moved",
    "persist.pruned",
)


def test_a_shard_becomes_a_checkpoint_that_everybody_reads(tmp_path: Path) -> None:
    job = Job(tmp_path / "c")
    with persister() as process:
        job.submit(process, 7)
        written, published = collect([process], 2)
    assert (written.published, written.problem, written.bytes) == (False, "", job.plans[0].file_bytes)
    assert (published.published, published.problem, published.name) == (True, "", "step-00000007")
    checkpoint = job.latest()
    job.require(checkpoint)
    manifest = examine(checkpoint.path)
    assert {path.name for path in checkpoint.path.iterdir()} == {
        "manifest.json", "SHA256SUMS", *(file.name for file in manifest.files),
    }  # fmt: skip
    latest = read_latest(open_store(job.folder))
    digest = hashlib.sha256((checkpoint.path / "manifest.json").read_bytes()).hexdigest()
    assert latest is not None and (latest.attempt, latest.step, latest.name) == (1, 7, "step-00000007")
    assert latest.manifest_sha256 == digest
    targets = {"w": torch.zeros(12, 256)}
    torch_dcp.load(targets, checkpoint_id=checkpoint.path, no_dist=True)  # type: ignore[attr-defined]
    assert torch.equal(targets["w"], job.tensors(0, 7)["w"])
    entry = manifest.tensors["w"].chunks[0]
    content = (checkpoint.path / entry.file).read_bytes()[entry.offset : entry.offset + entry.length]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None


def test_the_process_knows_no_torch_and_gives_way(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=2, timeout_s=30, hurry=False)
    with persister() as process:
        job.submit(process, 1)
        collect([process], 1)  # it waits for rank 1 now
        assert process.pid is not None
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        child = psutil.Process(process.pid)
        nices = {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in child.threads()}
        job.submit(process, 1, [1])
        assert not problems(collect([process], 3))
    assert "torch" not in maps
    assert nices == {os.getpriority(os.PRIO_PROCESS, 0), 10}
    assert not child.is_running()


def test_two_hosts_write_one_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=4)
    with persister() as left, persister() as right:
        for step in (1, 2):
            job.submit(right, step, [2, 3])
            job.submit(left, step, [0, 1])
            outcomes = collect([left, right], 8)
            assert not problems(outcomes)
            assert {o.name for o in outcomes if o.published} == {f"step-{step:08d}"}
            job.require(job.latest())
    assert not areas(job.folder)


class Undying:
    """Plays a process that has hung up, as one that raised does, and is not at its end in time."""

    pid = 1
    returncode: int | None = None

    def kill(self) -> None:
        self.returncode = -9

    def wait(self, timeout: float) -> None:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout)


def test_a_process_that_the_keeper_had_to_kill_is_not_taken_for_one_that_was_killed() -> None:
    process = PersisterProcess()
    process._process = Undying()  # type: ignore[assignment]
    assert process._end() == "had hung up and did not end, so that it was killed by SIGKILL"


def test_old_checkpoints_are_pruned(tmp_path: Path) -> None:
    job = Job(tmp_path / "c")
    with persister() as process:
        for step in (1, 2, 3):
            job.submit(process, step)
            assert not problems(collect([process], 2))
    assert open_store(job.folder).names() == ["step-00000003", "step-00000002"]


@pytest.mark.campaign(but=("persist.shard-half", "persist.published"))
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_the_latest_stays_readable(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "c", size=2)
    with persister() as here, persister() as there:
        monkeypatch.setenv("PHALANX_FAULTS", f"{point}:2")
        job.submit(here, 1)
        monkeypatch.delenv("PHALANX_FAULTS")
        job.submit(there, 1, [1])
        assert not problems(collect([here, there], 4))
        before = here.pid
        job.submit(there, 2, [1])
        job.submit(here, 2)
        outcomes = collect([here, there], 4)
        assert any("was killed by SIGKILL while" in problem for problem in problems(outcomes))
        checkpoint = job.latest()
        job.require(checkpoint)
        assert checkpoint.step == (1 if POINTS.index(point) < POINTS.index("persist.pointer-moved") else 2)
        latest = read_latest(open_store(job.folder))
        assert latest is not None and latest.step <= checkpoint.step
        for step in (3, 4):
            job.submit(there, step, [1])
            job.submit(here, step)
            assert not problems(collect([here, there], 4))
            job.require(job.latest())
            assert job.latest().step == step
        assert here.pid != before
    assert not areas(job.folder)


def test_who_waits_for_a_publisher_that_was_killed_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=3)
    with persister() as here, persister() as there:
        job.submit(here, 1)
        job.submit(there, 1, [1])
        assert not problems(collect([here, there], 2))  # rank 2 is missing
        assert here.pid is not None
        os.kill(here.pid, signal.SIGKILL)
        [mine] = collect([here], 1)
        assert mine.published and "was killed by SIGKILL while step 1 was being published" in mine.problem
        [told] = collect([there], 1)
        assert told.published and "was killed by SIGKILL" in told.problem


def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=3, timeout_s=2.0)
    with persister() as process:
        job.submit(process, 1, [0, 1])
        failed = problems(collect([process], 4))
    assert len(failed) == 2 and all("1 of 3 shards were not written within 2 s: of rank 2" in p for p in failed)
    assert not areas(job.folder) and not open_store(job.folder).names()


def test_memory_that_is_not_what_its_record_says_is_not_written(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=2, rows=4200)
    with persister() as process:
        job.submit(process, 1, [0])
        with job.task(1, 1) as task:
            os.pwrite(task.descriptor, b"\xff", (4 << 20) + 17)
            process.submit(task)
        failed = problems(collect([process], 4))
        assert len(failed) == 3
        assert all("rank 1" in p and "chunk 1" in p and "holds w" in p for p in failed)
        assert not areas(job.folder) and not open_store(job.folder).names()
        job.submit(process, 2, [0, 1])
        assert not problems(collect([process], 4))
    job.require(job.latest())


def test_a_leftover_of_an_earlier_attempt_cannot_publish(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=2)
    store = open_store(job.folder)
    assert claim(store) == 1
    with persister() as process:
        job.submit(process, 1)
        assert not problems(collect([process], 1))
        assert claim(store) == 2
        job.submit(process, 1, [1])
        failed = problems(collect([process], 3))
        assert failed and all("attempt 2 is in charge" in problem for problem in failed)
    latest = read_latest(store)
    assert latest is not None and (latest.attempt, latest.name) == (2, "")
    assert not store.names() and not areas(job.folder)


@pytest.mark.campaign(but=("changes1-sick",))
@pytest.mark.parametrize(
    ("changes", "why"),
    [({"changed": False}, "stale"), ({"sick": ("w", "own.0")}, "sick")],
)
def test_what_is_stale_or_sick_is_kept_aside(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    job = Job(tmp_path / "c", size=2)
    with persister() as process:
        job.submit(process, 1, [0, 1], **changes)
        failed = problems(collect([process], 4))
        assert len(failed) == 2 and all(f"is {why}" in problem for problem in failed)
        assert why == "stale" or all("own.0, w" in problem for problem in failed)
        store = open_store(job.folder)
        assert not store.names() and read_latest(store) is None
        [aside] = store.quarantined()
        assert aside.startswith(why) and json.loads(store.at(aside).read("manifest.json"))["step"] == 1
        job.submit(process, 2, [0, 1])
        assert not problems(collect([process], 4))
    job.require(job.latest())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "file" / "c")
    (tmp_path / "file").write_text("")
    with persister() as process:
        job.submit(process, 1)
        failed = problems(collect([process], 2))
        assert len(failed) == 2 and all(str(tmp_path / "file") in p and "Not a directory" in p for p in failed)
        (tmp_path / "file").unlink()
        job.submit(process, 2)
        assert not problems(collect([process], 2))
    job.require(job.latest())


def test_it_can_be_ended_in_the_middle(tmp_path: Path) -> None:
    job = Job(tmp_path / "c", size=2)
    with persister() as process:
        assert process.fileno() == -1
        job.submit(process, 1)
        collect([process], 1)
        child = psutil.Process(process.pid)
    assert not child.is_running()
    assert process.fileno() == -1
