"""What is restored from storage whose files are harmed, whose pointer is, or that refuses; and what is pruned."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import assert_equal, make_tensors
from storage_helpers import (  # noqa: F401
    KINDS,
    Place,
    flipped,
    made,
    place_fixture,
    put,
    s3_place_fixture,
    s3_server_fixture,
)
from support.odd_files import ODD_FILES
from support.open_checkpoint import Checkpoint, newest, open_checkpoint

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import advance, claim, read_latest
from phalanx.checkpoint.storage.retention import prune
from phalanx.core.errors import UserError


@pytest.fixture(name="files", scope="module")
def files_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("made")
    return {step: made(folder, step, {"validation_loss": abs(step - 2.2)}) for step in range(1, 6)}


def restored(store: Store, *lines: tuple[str, ...]) -> Checkpoint | None:
    """What `newest` gives, which must report exactly these lines (some words of each)."""
    told: list[str] = []
    found = newest(store, told.append)
    assert len(told) == len(lines), told
    for line, words in zip(told, lines, strict=True):
        assert "\n" not in line
        assert all(word in line for word in words), line
    if found is not None:
        assert found.state == {"step": found.step}
        assert_equal(found.read(), make_tensors(found.step))
    return found


def step_of(found: Checkpoint | None) -> int | None:
    return None if found is None else found.step


def test_the_pointers_checkpoint_then_older_ones(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = place.open()
    assert restored(store) is None
    assert claim(store) == 1
    names = [put(store, step, 1, files[step]) for step in (1, 2, 3)]
    assert step_of(restored(place.open())) == 3
    newer = put(store, 4, 1, files[4], pointed=False)
    found = restored(store, (newer, "not published by the attempt in charge", names[2], "not used"))
    assert step_of(found) == 3
    store.delete(names[2])
    found = restored(store, (newer, "not used"), (names[2], "the latest, is gone", "trying the one before"))
    assert step_of(found) == 2


def test_without_a_pointer_or_one_that_names_none_the_newest_is_taken(
    place: Place, files: dict[int, dict[str, bytes]]
) -> None:
    store = place.open()
    for step in (1, 2):
        put(store, step, 1, files[step], pointed=False)
    assert step_of(restored(store)) == 2
    claim(store)
    assert step_of(restored(store)) == 2


def test_another_manifest_than_the_pointers_is_refused(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    """As when a leftover of an earlier attempt has replaced the folder of the same step."""
    store = place.open()
    put(store, 1, 1, files[1])
    name = put(store, 2, 1, files[2], pointed=False)
    advance(store, 1, 2, name, "0" * 64)
    found = restored(store, (name, "manifest.json is another than the one that was published last"))
    assert step_of(found) == 1


def test_a_damaged_pointer_means_the_entry_before(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = place.open()
    names = [put(store, step, 1, files[step]) for step in (1, 2)]
    place.change("", store.keys("latest-")[-1], lambda content: content[:30])
    found = restored(store, ("latest-00000002.json", "cannot be read"), (names[1], "not used"))
    assert step_of(found) == 1


def test_a_manifest_of_another_step_than_its_name_says_is_refused(
    place: Place, files: dict[int, dict[str, bytes]]
) -> None:
    """Whole by every checksum, and copied there by somebody: which step it is of would be anybody's guess."""
    store = place.open()
    names = [put(store, 1, 1, files[1]), put(store, 2, 1, files[3])]
    words = (names[1], "manifest.json is of step 3, and the name says 2", "trying the one before")
    assert step_of(restored(store, words)) == 1
    with pytest.raises(DamagedCheckpointError, match="is of step 3"):
        open_checkpoint(store.at(names[1]))


HARMS: dict[str, tuple[str, Any, str]] = {
    "bit of the tensors": ("__0_0.distcp", flipped, "__0_0.distcp: bytes "),
    "bit of the manifest": ("manifest.json", flipped, "manifest.json does not match its checksum"),
    "tensors truncated": ("__0_0.distcp", lambda c: c[:100], "__0_0.distcp has 100 of its"),
    "manifest truncated": ("manifest.json", lambda c: c[:100], "manifest.json does not match its checksum"),
    "tensors gone": ("__0_0.distcp", None, "__0_0.distcp is missing"),
    "manifest gone": ("manifest.json", None, "manifest.json is missing"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("file", ["manifest.json", "SHA256SUMS", "__0_0.distcp", ".metadata"])
def test_what_is_no_file_neither_blocks_nor_fills_memory(
    tmp_path: Path, files: dict[int, dict[str, bytes]], file: str, kind: str
) -> None:
    store = LocalStore(tmp_path)
    names = [put(store, step, 1, files[step]) for step in (1, 2)]
    path = tmp_path / names[1] / file
    path.unlink()
    ODD_FILES[kind][0](path)
    told: list[str] = []
    found = newest(store, told.append)
    assert step_of(found) == (1 if file in ("manifest.json", "__0_0.distcp") else 2)
    assert len(told) == 1 and file in told[0], told
    if file in ("manifest.json", "SHA256SUMS"):
        assert ODD_FILES[kind][1] in told[0]
    with pytest.raises(DamagedCheckpointError, match=file):
        open_checkpoint(tmp_path / names[1])
    assert prune(store, CheckpointConfig(keep_last=5)) == []


SPARED: dict[str, tuple[str, Any, str]] = {
    "bit of the index": (".metadata", flipped, ".metadata: does not match its checksum"),
    "index truncated": (".metadata", lambda c: c[:10], ".metadata has 10 of its"),
    "index gone": (".metadata", None, ".metadata is missing"),
    "bit of the sums": ("SHA256SUMS", lambda c: flipped(c, 3), "SHA256SUMS does not match manifest.json"),
    "sums truncated": ("SHA256SUMS", lambda c: c[:10], "manifest.json does not match its checksum in SHA256SUMS"),
}
"""Of the checkpoint that the pointer names with the checksum of its manifest, which makes up for ``SHA256SUMS``."""

FEW = ("bit of the tensors", "manifest truncated", "tensors gone")
"""For the server, whose requests take time."""


@pytest.mark.parametrize(
    ("place", "harm"),
    [(kind, harm) for kind in KINDS for harm in (FEW if kind == "s3" else HARMS)],
    indirect=["place"],
)
def test_harm_to_the_latest_is_seen_and_the_one_before_taken(
    place: Place, files: dict[int, dict[str, bytes]], harm: str
) -> None:
    store = place.open()
    names = [put(store, step, 1, files[step]) for step in (1, 2)]
    file, change, reason = HARMS[harm]
    place.change(names[1], file, change)
    assert step_of(restored(store, (names[1], "is damaged", reason, "trying the one before"))) == 1
    with pytest.raises(DamagedCheckpointError, match=names[1]):
        open_checkpoint(store.at(names[1]))


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
@pytest.mark.parametrize("harm", SPARED)
def test_harm_to_what_the_latest_does_without_is_said_and_it_is_used(
    place: Place, files: dict[int, dict[str, bytes]], harm: str
) -> None:
    store = place.open()
    names = [put(store, step, 1, files[step]) for step in (1, 2)]
    file, change, reason = SPARED[harm]
    place.change(names[1], file, change)
    assert step_of(restored(store, (names[1], reason, "used all the same"))) == 2
    with pytest.raises(DamagedCheckpointError, match=names[1]):
        open_checkpoint(store.at(names[1]))
    place.change(names[0], "SHA256SUMS", lambda content: flipped(content, 3))
    place.change(names[1], "__0_0.distcp", flipped)  # the one before, of whose manifest nobody knows the checksum
    told: list[str] = []
    with pytest.raises(UserError, match=f"{names[1]} is damaged .*; .*{names[0]} is damaged .SHA256SUMS does not"):
        newest(store, told.append)
    assert reason in told[0] and len(told) == 3


def test_sums_gone(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    """In an object store, a checkpoint that is not there yet looks so; in a folder the pointer vouches for it."""
    store = place.open()
    names = [put(store, step, 1, files[step]) for step in (1, 2)]
    place.change(names[1], "SHA256SUMS", None)
    in_folder = place.kind == "folder"
    words = "SHA256SUMS is missing" if in_folder else "the latest, is gone"
    assert step_of(restored(store, (names[1], words))) == (2 if in_folder else 1)


def test_files_of_two_steps_that_were_swapped(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = place.open()
    names = [put(store, step, 1, files[step]) for step in (1, 2, 3)]
    for name, other in ((names[2], 2), (names[1], 3)):
        place.change(name, "__0_0.distcp", lambda _, other=other: files[other]["__0_0.distcp"])
    lines = [(name, "__0_0.distcp: bytes 0 and following") for name in (names[2], names[1])]
    assert step_of(restored(store, *lines)) == 1


def test_harm_while_being_read_is_told(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = place.open()
    name = put(store, 1, 1, files[1])
    found = newest(store, pytest.fail)
    assert found is not None
    place.change(name, "__0_0.distcp", lambda content: content[:2000])
    with pytest.raises(DamagedCheckpointError, match=name):
        found.read()


class EveryThird:
    """A store of which every third write fails."""

    def __init__(self, store: Store) -> None:
        self._store, self._writes = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, area: str, file: str, content: Any) -> Any:
        self._writes += 1
        if self._writes % 3 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{area}/{file}")
        return self._store.write(area, file, content)


def test_every_third_write_fails(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store: Any = EveryThird(place.open())
    last = None
    for turn in range(7):
        step = 1 + turn % 5
        try:
            put(store, step, 1 + turn, {**files[step], "extra": b""} if turn % 2 else files[step])
            last = step
        except OSError as error:
            assert "Input/output error" in str(error)
            area = next(
                a
                for a in [f"step-{step:08d}.a{1 + turn}-aa", f".writing-step-{step:08d}-a{1 + turn}.aa"]
                if a in str(error)
            )
            store.discard(area)
        told: list[str] = []
        found = newest(place.open(), told.append)
        assert step_of(found) == last
        assert not [line for line in told if "damaged" in line]


@pytest.fixture(name="tiny_disk")
def tiny_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(tiny_disk: Path, files: dict[int, dict[str, bytes]]) -> None:
    store = LocalStore(tiny_disk)
    put(store, 1, 1, files[1])
    area = store.begin(2, 1, "aa")
    with pytest.raises(OSError, match=r"No space left on device.*__0_0\.distcp") as refused:
        store.write(area, "__0_0.distcp", [bytes(1 << 18)] * 8)
    assert refused.value.errno == errno.ENOSPC
    assert store.files(area) == []
    store.discard(area)
    assert step_of(restored(store)) == 1
    put(store, 2, 1, files[2])
    assert step_of(restored(store)) == 2


def test_a_full_disk_and_the_pointer(tiny_disk: Path, files: dict[int, dict[str, bytes]]) -> None:
    store = LocalStore(tiny_disk)
    put(store, 1, 1, files[1])
    with (tiny_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(OSError, match=r"No space left on device.*latest-00000002\.json"):
        claim(store)
    assert store.keys("latest-") == ["latest-00000001.json"]
    assert step_of(restored(store)) == 1


def test_a_read_only_disk(tiny_disk: Path, files: dict[int, dict[str, bytes]]) -> None:
    store = LocalStore(tiny_disk)
    put(store, 1, 1, files[1])
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(OSError, match=r"Read-only file system.*step-00000002"):
        store.begin(2, 1, "aa")
    with pytest.raises(OSError, match=r"Read-only file system.*latest-00000002\.json"):
        claim(store)
    assert step_of(restored(store)) == 1


LIMITED = """
import resource, signal, sys
from pathlib import Path
from phalanx.checkpoint.storage.folder_store import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = LocalStore(Path(sys.argv[1]))
area = store.begin(1, 1, "aa")
try:
    store.write(area, "__0_0.distcp", [bytes(70_000)] * 40)
except OSError as error:
    print(error, store.files(area))
"""


def test_the_system_refusing_in_the_middle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "File too large" in said
    assert "__0_0.distcp' []" in said
    store = LocalStore(tmp_path)
    store.clean(0)
    assert list(tmp_path.iterdir()) == [], "what the ended writer left"


def steps(store: Store) -> list[int]:
    return [int(name[5:13]) for name in store.names()]


@pytest.mark.campaign(
    but=(
        "s3-config0-left0",
        "folder-config0-left0",
        "folder-config1-left1",
        "folder-config2-left2",
        "folder-config3-left3",
    )
)
@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"keep_last": 2}, [5, 4]),
        ({"keep_last": 1, "keep_every": 3}, [5, 3]),
        ({"keep_last": 1, "keep_best": 2}, [5, 3, 2]),
        ({"keep_last": 5, "budget_bytes": 1}, [5]),
    ],
)
def test_pruning(place: Place, files: dict[int, dict[str, bytes]], config: dict[str, Any], left: list[int]) -> None:
    store = place.open()
    for step in range(1, 6):
        put(store, step, 1, files[step])
    for step in range(7, 11):
        store.quarantine(store.begin(step, 1, "aa"), "sick")
    deleted = prune(store, CheckpointConfig(**config), good_step=5)
    assert steps(store) == left
    assert [int(one.name[5:13]) for one in deleted] == [step for step in range(1, 6) if step not in left]
    assert [name[:18] for name in store.quarantined()] == ["sick-step-00000010", "sick-step-00000009"]
    assert step_of(restored(store)) == 5


def test_pruning_spares_the_pointers_and_the_newest_whole_one(place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = place.open()
    names = [put(store, step, 1, files[step], pointed=step == 1) for step in range(1, 6)]
    place.change(names[4], "__0_0.distcp", flipped)
    place.change(names[2], "__0_0.distcp", lambda content: content[:10])
    prune(store, CheckpointConfig(keep_last=1))
    assert steps(store) == [5, 4, 1]
    latest = read_latest(store)
    assert latest is not None
    assert latest.name == names[0]


def test_only_what_is_needed_is_fetched(s3_place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store = s3_place.open()
    put(store, 1, 1, files[1])
    found = newest(store, pytest.fail, verify=False)
    assert found is not None
    assert s3_place.gate is not None
    s3_place.gate.sent_bytes = 0
    found.read()
    listed = len(files[1]["manifest.json"]) + len(files[1]["SHA256SUMS"])
    assert s3_place.gate.sent_bytes <= len(files[1]["__0_0.distcp"]) + listed
