"""What the persister made durable, harmed afterwards or while it is written, and what is restored then: in a folder and
on an S3 server. Every harm is seen, the line names file and cause, and the next source is used.

What is proven elsewhere and not again here:

- flipped bits, each of 100: of what the keeper holds (`test_restoring_memory`), of replicas that are fetched
  (`test_replicas_fetch`), of what is on its way to a peer (`test_replicas_transfer`), of a slot that is being persisted
  (`test_persist_process`), of tensors that several ranks share (`test_restoring_durable`);
- memory, then peer, then durable, then older: `test_restoring_memory`; with real keepers: `test_restoring_keepers`;
- a pointer that is truncated, empty, another's: `test_storage_latest`; keys changed by hand: `test_storage_restore`;
- each file of a checkpoint refused with ENOSPC, EROFS, EIO: `test_persist_storage`; the blocking save on full and
  read-only disks: `test_checkpoint_faults`;
- a lower attempt refused by keeper and peer: `test_keeper_process`, `test_replicas_transfer`; a process that was
  stopped and goes on after the next attempt has begun: `tests/train/test_background_runs`;
- storage of 1 MB/s behind keeper and persister: `test_storage_slow`; buckets that refuse, or come to refuse:
  `tests/train/test_object_store_run`.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from persist_helpers import Job
from storage_helpers import (  # noqa: F401
    DENIED,
    FULL,
    Place,
    place_fixture,
    s3_place_fixture,
    s3_server_fixture,
)
from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.format.manifest import DamagedCheckpointError, FileEntry
from phalanx.checkpoint.keeper_contract import Destination, PersistOutcome
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import claim, read_latest
from phalanx.cli.checkpoint_list_and_prune import rows_of
from phalanx.cli.checkpoint_paths import Place as Listed
from phalanx.core.fault_points import NO_POINTS, Points

PLACES = pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
UNREAD = (".metadata", "part-0.json")
"""Files that restoring does without: harm to them is said, and discards nothing."""
SPARED = (*UNREAD, "SHA256SUMS")
"""Of the checkpoint that the pointer names, with the checksum of its manifest."""


@dataclass
class PlacedJob(Job):
    """One rank, whose checkpoints lie at `url`."""

    url: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def destination(self) -> Destination:
        return replace(super().destination, url=self.url, options=self.options, keep_last=10)


def a_job(place: Place, **settings: Any) -> PlacedJob:
    return PlacedJob(Path("unused"), url=place.url, options=place.options, **settings)


def persist(job: Job, store: Store, step: int, points: Points = NO_POINTS, **changes: Any) -> list[PersistOutcome]:
    """What the persister says of a checkpoint."""
    outcomes: list[PersistOutcome] = []
    with job.task(0, step, **changes) as task:
        mine = replace(task, descriptor=os.dup(task.descriptor))
        PersistWork(mine, points, outcomes.append, open_storage=lambda _: store).run()
    return outcomes


def names_of(job: Job, store: Store, steps: Sequence[int]) -> list[str]:
    """Persist these steps; the names of their checkpoints."""
    outcomes = [persist(job, store, step)[-1] for step in steps]
    assert not [outcome.problem for outcome in outcomes if outcome.problem]
    return [outcome.name for outcome in outcomes]


def restored(job: Job, store: Store) -> tuple[int, list[str]]:
    """The step that training would go on from, whose every bit is right, and what was told."""
    lines: list[str] = []
    tensors = {name: torch.full_like(tensor, 77).clone() for name, tensor in job.tensors(0, 0).items()}
    found = restore(tensors, keeper=None, store=store, report=lines.append)
    assert found is not None
    assert found.state == {"step": found.step}
    expected = job.tensors(0, found.step)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    return found.step, lines


def flipped(content: bytes, chance: random.Random) -> bytes:
    """With one bit changed."""
    where = chance.randrange(len(content))
    return content[:where] + bytes([content[where] ^ 1 << chance.randrange(8)]) + content[where + 1 :]


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
def test_each_of_100_flipped_bits_is_seen_and_the_one_before_taken(place: Place) -> None:
    job, store, chance = a_job(place), place.open(), random.Random(0)
    claim(store)
    _, name = names_of(job, store, (1, 2))
    files = [("", store.keys("latest-")[-1])] + [(name, file) for file in store.files(name)]
    assert len(files) == 6
    for number in range(100):
        where, file = files[number % len(files)]
        good: list[bytes] = []

        def flip(content: bytes, good: list[bytes] = good) -> bytes:
            good.append(content)
            return flipped(content, chance)

        place.change(where, file, flip)
        step, lines = restored(job, store)
        if file in SPARED:
            assert step == 2 and len(lines) == 1 and file in lines[0] and "used all the same" in lines[0]
        else:
            assert step == 1, (file, lines)
            assert any(file in line for line in lines), (file, lines)
        if where:
            with pytest.raises(DamagedCheckpointError, match=file.replace(".", r"\.")):
                examine(store.at(name))
        place.change(where, file, lambda _, good=good: good[0])
    assert restored(job, store) == (2, [])
    examine(store.at(name))


@pytest.mark.campaign
@pytest.mark.slow
def test_each_of_100_flipped_bits_on_a_server_is_seen(s3_place: Place) -> None:
    """Five at a time, since requests take time: one in a file of each of the newest three checkpoints, one in a file
    that restoring the one before them does without, one in the pointer."""
    job, store, chance = a_job(s3_place), s3_place.open(), random.Random(0)
    claim(store)
    names = names_of(job, store, (1, 2, 3, 4))
    pointer, *_ = sorted(store.keys("latest-"), reverse=True)
    good = {(name, file): store.at(name).read(file) for name in names for file in store.files(name)}
    good["", pointer] = store.get(pointer)
    read = [file for file in store.files(names[0]) if file not in UNREAD]
    for turn in range(20):
        needed = [file for file in read if file not in SPARED]
        harmed = [(names[3], needed[turn % 2]), *((names[number], read[(turn + number) % 3]) for number in (2, 1))]
        unread = (names[0], UNREAD[turn % 2])
        for where in (*harmed, unread):
            s3_place.change(*where, lambda _, where=where: flipped(good[where], chance))
        step, lines = restored(job, store)
        assert step == 1, lines
        *refusals, remark = lines
        for (name, file), line in zip(harmed, refusals, strict=True):
            assert name in line and file in line and "is damaged" in line, (file, line)
        assert all(word in remark for word in (*unread, "used all the same")), remark
        with pytest.raises(DamagedCheckpointError, match=unread[1].replace(".", r"\.")):
            examine(store.at(names[0]))
        s3_place.change("", pointer, lambda content: flipped(content, chance))
        told: list[str] = []
        latest = read_latest(store, told.append)
        assert latest is not None and latest.step == 3
        assert len(told) == 1 and pointer in told[0] and "cannot be read" in told[0]
        for where in (*harmed, unread, ("", pointer)):
            s3_place.change(*where, lambda _, where=where: good[where])
    assert restored(job, store) == (4, [])


@pytest.mark.campaign(but=("folder",))
@PLACES
def test_truncated_deleted_and_swapped(place: Place) -> None:
    job, store = a_job(place), place.open()
    names = names_of(job, store, (1, 2, 3, 4, 5))
    tensors = "__0_0.distcp"
    contents = {name: store.at(name).read(tensors) for name in names}
    place.change(names[4], tensors, None)
    place.change(names[3], tensors, lambda content: content[:-1])
    place.change(names[2], tensors, lambda _: contents[names[1]])
    place.change(names[1], tensors, lambda _: contents[names[2]])
    step, lines = restored(job, store)
    assert step == 1
    causes = ["is missing", "bytes", "do not match their checksum", "do not match their checksum"]
    for name, cause, line in zip(reversed(names[1:]), causes, lines, strict=True):
        assert all(words in line for words in (name, tensors, cause)), line


@pytest.mark.campaign(but=("s3",))
@PLACES
def test_a_writer_of_an_older_attempt_that_wakes_up_late(place: Place) -> None:
    old, new = a_job(place, nonce="old"), a_job(place, attempt=2, nonce="new")
    store = place.open()
    assert claim(store) == 1
    names_of(old, store, (1,))
    asleep, awake = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        assert awake.wait(60)

    told: list[PersistOutcome] = []
    points = Points({"persist.before-publish": sleep})
    zombie = threading.Thread(target=lambda: told.extend(persist(old, place.open(), 2, points)))
    zombie.start()
    assert asleep.wait(60)
    assert claim(store) == 2
    [name] = names_of(new, store, (2,))
    awake.set()
    zombie.join()
    assert "attempt 2" in told[-1].problem
    latest = read_latest(store)
    assert latest is not None
    assert (latest.attempt, latest.step, latest.name) == (2, 2, name)
    assert examine(store.at(name)).attempt == 2
    assert restored(new, store) == (2, [])
    assert len(store.names()) == 2


@pytest.mark.campaign(but=("changes0-stale-folder", "changes1-sick-s3"))
@PLACES
@pytest.mark.parametrize(("changes", "why"), [({"changed": False}, "stale"), ({"sick": ("w",)}, "sick")])
def test_what_is_kept_aside_is_whole_and_called_what_it_is(place: Place, changes: dict[str, Any], why: str) -> None:
    job, store = a_job(place), place.open()
    [name] = names_of(job, store, (1,))
    told = persist(job, store, 2, **changes)[-1]
    [aside] = store.quarantined()
    assert why in told.problem
    assert aside in told.problem
    assert examine(store.at(aside)).step == 2
    rows = rows_of([Listed(store, name), Listed(store, aside)], datetime.now(UTC))
    assert [(row.status, row.problem) for row in rows] == [("latest", ""), (why, "")]
    assert restored(job, store) == (1, [])
    place.change(aside.partition("-")[2] if place.kind == "s3" else aside, "__0_0.distcp", lambda content: content[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        examine(store.at(aside))
    store.delete(aside)
    assert not store.quarantined()
    assert store.files(aside) == []


def test_a_server_of_which_every_third_answer_is_a_failure(s3_place: Place) -> None:
    job, store = a_job(s3_place), s3_place.open()
    assert s3_place.gate is not None
    s3_place.gate.fail_every = 3
    outcomes = [persist(job, store, step)[-1] for step in (1, 2)]
    s3_place.gate.fail_every = 0
    assert all(outcome.name or "503" in outcome.problem for outcome in outcomes)
    good = [outcome.step for outcome in outcomes if outcome.name]
    names_of(job, store, (3,))
    assert restored(job, store) == (3, [])
    assert [int(name[5:13]) for name in store.names()] == [3, *reversed(good)]


@pytest.mark.campaign(but=("manifest.json-refusal3", "latest--refusal7"))
@pytest.mark.parametrize(
    ("file", "refusal"),
    [(file, FULL) for file in ("__0_0.distcp", "part-0.json", ".metadata", "manifest.json", "SHA256SUMS", "latest-")]
    + [(file, DENIED) for file in ("__0_0.distcp", "latest-")],
)
def test_a_server_that_takes_nothing_more_from_some_file_on(
    s3_place: Place, file: str, refusal: tuple[str, str, str]
) -> None:
    job, store, gate = a_job(s3_place), s3_place.open(), s3_place.gate
    assert gate is not None
    [name] = names_of(job, store, (1,))

    def refuse(method: str, path: str) -> None:
        if method == "PUT" and file in path:
            gate.refusal = refusal

    gate.watch = refuse
    told = persist(job, store, 2)[-1]
    assert not told.name
    assert refusal[2] in told.problem
    assert file in told.problem
    gate.reset()
    step, lines = restored(job, store)
    assert step == 1
    if file == "latest-":
        assert len(lines) == 1 and "step-00000002" in lines[0] and "was not published" in lines[0]
    else:
        assert (lines, store.names()) == ([], [name])
    names_of(job, store, (3,))
    assert restored(job, store) == (3, [])
    area = f"step-00000002.a{job.attempt}-{job.nonce}"
    claim(store)
    store.clean(job.attempt + 1)  # as the next attempt does
    assert bool(store.files(area)) == (file == "latest-")


class Slow(LocalStore):
    """1 MB/s."""

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        def slowly() -> Iterator[Buffer]:
            for piece in content:
                time.sleep(memoryview(piece).nbytes / 1e6)
                yield piece

        return super().write(area, file, slowly())


def test_slow_storage_only_takes_longer(tmp_path: Path) -> None:
    job, store = Job(tmp_path, rows=500), Slow(tmp_path)
    assert names_of(job, store, (1, 2)) == ["step-00000001", "step-00000002"]
    assert restored(job, store) == (2, [])


@pytest.fixture(name="tiny_disk")
def tiny_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_while_a_checkpoint_is_persisted(tiny_disk: Path) -> None:
    job, store = Job(tiny_disk, rows=150), LocalStore(tiny_disk)
    names_of(job, store, (1,))
    told = persist(job, store, 2)[-1]
    assert "No space left on device" in told.problem
    assert "__0_0.distcp" in told.problem
    assert restored(job, store) == (1, [])
    assert [path.name for path in tiny_disk.glob(".writing*")] == []
    subprocess.run(["mount", "-o", "remount,size=1m", str(tiny_disk)], check=True)
    names_of(job, store, (3,))
    assert restored(job, store) == (3, [])


def test_a_disk_that_becomes_read_only(tiny_disk: Path) -> None:
    job, store = Job(tiny_disk), LocalStore(tiny_disk)
    names_of(job, store, (1,))
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    told = persist(job, store, 2)[-1]
    assert "Read-only file system" in told.problem
    assert "step-00000002" in told.problem
    assert restored(job, store) == (1, [])
    subprocess.run(["mount", "-o", "remount,rw", str(tiny_disk)], check=True)
    names_of(job, store, (3,))
    assert restored(job, store) == (3, [])
