"""What every store promises, and what only some have to."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from storage_helpers import Place, place_fixture, s3_place_fixture, s3_server_fixture, tiny  # noqa: F401

from phalanx.checkpoint.format.manifest import MANIFEST, SUMS
from phalanx.checkpoint.storage import folder as folders
from phalanx.checkpoint.storage import location, object_streams
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import claim
from phalanx.checkpoint.storage.location import open_store
from phalanx.checkpoint.storage.object_streams import RangeFile
from phalanx.core.errors import UserError
from phalanx.core.fault_points import Points


def test_from_an_area_to_a_checkpoint(place: Place) -> None:
    store, other = place.open(), place.open()
    assert store.names() == other.names() == store.quarantined() == []
    area = store.begin(12, 3, "1f")
    assert other.join(12, 3, "1f", 1.0) == area
    content = random.Random(0).randbytes(3_000_000)
    pieces = [content[:5], bytearray(content[5:1_000_000]), memoryview(content[1_000_000:])]
    entry = other.write(area, "__1_0.distcp", pieces)
    assert (entry.name, entry.size_bytes, entry.sha256) == (
        "__1_0.distcp",
        len(content),
        hashlib.sha256(content).hexdigest(),
    )
    store.write(area, MANIFEST, [b"{}"])
    store.write(area, SUMS, [b"a", b"b"])
    assert store.files(area) == [SUMS, "__1_0.distcp", MANIFEST]
    assert store.names() == other.names() == []
    name = store.publish(area, 12)
    assert store.names() == other.names() == [name]
    assert other.files(name) == [SUMS, "__1_0.distcp", MANIFEST]
    assert other.at(name).read(SUMS) == b"ab"
    assert other.at(name).size_bytes("__1_0.distcp") == len(content)
    assert other.at(name).identity()
    reading_anywhere(other, name, content)
    other.delete(name)
    assert store.names() == store.files(name) == []
    assert not store.at(name).identity()


def reading_anywhere(store: Store, name: str, content: bytes) -> None:
    chance = random.Random(1)
    with store.at(name).open("__1_0.distcp") as file:
        for _ in range(30):
            start = chance.randrange(len(content))
            file.seek(start)
            buffer = bytearray(chance.choice([1, 100, 5000, 700_000, 2_000_000]))
            count = file.readinto(buffer)  # type: ignore[attr-defined]
            assert buffer[:count] == content[start : start + len(buffer)][:count]
            assert count == min(len(buffer), len(content) - start)
        file.seek(-10, os.SEEK_END)
        assert file.read() == content[-10:]
        assert file.read() == b""


def test_what_is_not_there(place: Place) -> None:
    store = place.open()
    name = tiny(store, 5)
    files = store.at(name)
    for read in (files.read, files.size_bytes, files.open):
        with pytest.raises(FileNotFoundError, match=r"absent\.distcp"):
            read("absent.distcp")
    with pytest.raises(FileNotFoundError, match="latest-1"):
        store.get("latest-1")
    store.remove("latest-1")
    assert store.files("step-00000099") == store.keys("latest-") == []


@pytest.mark.parametrize("file", ["../secret", "a/b", "..", "", ".", "a\0"])
def test_names_that_are_paths_are_refused(place: Place, file: str) -> None:
    store = place.open()
    area = store.begin(1, 1, "aa")
    for use in (
        lambda: store.write(area, file, [b""]),
        lambda: store.at(area).read(file),
        lambda: store.create(file, b""),
    ):
        with pytest.raises(ValueError, match="plain file name"):
            use()
    with pytest.raises(ValueError, match="letters and digits"):
        store.begin(1, 1, "a-b")
    store.discard(area)


def test_what_is_discarded_leaves_nothing(place: Place) -> None:
    store = place.open()
    area = store.begin(1, 1, "aa")
    store.write(area, "__0_0.distcp", [b"half"])
    store.write(area, SUMS, [b"held back"])
    store.discard(area)
    store.discard(area)
    assert store.files(area) == store.names() == []
    for use in (lambda: store.publish(area, 1), lambda: store.quarantine(area, "stale")):
        with pytest.raises(ValueError, match="was not begun here"):
            use()
    if place.kind == "folder":
        with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp"):
            store.write(area, "__0_0.distcp", [b"late"])
        assert list(Path(place.url).iterdir()) == []


def test_nothing_is_published_without_manifest_and_sums(place: Place) -> None:
    store = place.open()
    area = store.begin(1, 1, "aa")
    for missing, add in ((MANIFEST, SUMS), (SUMS, None)):
        if add:
            store.write(area, add, [b"x"])
        else:
            store.discard(area)
            area = store.begin(1, 1, "aa")
            store.write(area, MANIFEST, [b"x"])
        with pytest.raises(FileNotFoundError, match=missing):
            store.publish(area, 1)
    with pytest.raises(ValueError, match="of step 2"):
        store.publish(area, 2)
    assert store.names() == []
    store.discard(area)


def test_content_that_fails_half_way_leaves_no_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 << 20),))
    monkeypatch.setattr(object_streams, "FIXED_BYTES", 5 << 20)
    store = place.open()
    area = store.begin(1, 1, "aa")

    def content(pieces: int) -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * pieces
        raise RuntimeError("the memory does not match its sums")

    for pieces in (1, 12):
        with pytest.raises(RuntimeError, match="does not match its sums"):
            store.write(area, "__0_0.distcp", content(pieces))
        assert store.files(area) == []
    if place.kind == "s3":
        assert fsspec.filesystem("s3", **place.options).list_multipart_uploads("bucket") == []
    store.discard(area)


def test_in_many_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 << 20),))
    monkeypatch.setattr(object_streams, "FIXED_BYTES", 5 << 20)
    content = random.Random(2).randbytes(17 << 20)
    store = place.open()
    area = store.begin(1, 1, "aa")
    entry = store.write(area, "big", [content[:7], content[7 : 6 << 20], content[6 << 20 :]])
    assert entry.sha256 == hashlib.sha256(content).hexdigest()
    assert store.at(area).read("big") == content
    store.discard(area)


def test_one_of_many_makes_it(place: Place) -> None:
    stores = [place.open() for _ in range(6)]
    stores[0].create("warm", b"")
    for turn in range(5):
        together = threading.Barrier(6)

        def make(number: int, turn: int = turn, together: threading.Barrier = together) -> bool:
            together.wait(60)
            return stores[number].create(f"latest-{turn}", f"by {number}".encode())

        with ThreadPoolExecutor(6) as pool:
            was_made = list(pool.map(make, range(6)))
        assert was_made.count(True) == 1
        assert stores[0].get(f"latest-{turn}") == f"by {was_made.index(True)}".encode()
    assert stores[0].keys("latest-") == [f"latest-{turn}" for turn in range(5)]


def test_kept_aside(place: Place) -> None:
    store = place.open()
    kept = []
    for step, why in ((1, "stale"), (2, "sick"), (10, "stale")):
        area = store.begin(step, 1, "aa")
        store.write(area, "__0_0.distcp", [b"x" * step])
        kept.append(store.quarantine(area, why))
    tiny(store, 3)
    assert [name[:9] for name in kept] == ["stale-ste", "sick-step", "stale-ste"]
    assert store.quarantined() == [kept[2], kept[1], kept[0]]
    store.clean(99)
    assert len(store.names()) == 1
    assert store.at(kept[2]).read("__0_0.distcp") == b"x" * 10
    store.delete(kept[0])
    assert store.quarantined() == [kept[2], kept[1]]
    assert store.files(kept[0]) == []
    with pytest.raises(ValueError, match="stale, sick"):
        store.quarantine(store.begin(4, 1, "aa"), "odd")


@pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
def test_what_earlier_attempts_left_is_cleaned(place: Place) -> None:
    dead, living = place.open(), place.open()
    for attempt in (1, 2, 3):
        dead.write(dead.begin(7, attempt, "aa"), "__0_0.distcp", [b"half"])
    whole = tiny(dead, 5, attempt=1)
    living.clean(3)
    left = [dead.files(f"step-00000007.a{attempt}-aa") for attempt in (1, 2, 3)]
    assert left == [[], [], ["__0_0.distcp"]]
    assert living.names() == [whole]


def test_uploads_that_killed_writers_left_are_given_up(s3_place: Place) -> None:
    fs, root = fsspec.core.url_to_fs(s3_place.url, **s3_place.options)
    prefix = root.removeprefix("bucket/")
    keys = [f"{prefix}/step-00000007.a{attempt}-aa/__0_0.distcp" for attempt in (1, 3)]
    keys += [f"{prefix}/notes/step-00000007.a1-aa", f"other/{prefix}/step-00000007.a1-aa/__0_0.distcp"]
    for key in keys:
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    s3_place.open().clean(3)
    left = fs.list_multipart_uploads("bucket")
    assert sorted(one["Key"] for one in left) == sorted(keys[1:])
    for one in left:
        fs.abort_mpu("bucket", one["Key"], one["UploadId"])


@pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
def test_ended_while_deleting_it_has_no_name_and_goes(place: Place) -> None:
    def end(**_: object) -> None:
        raise KeyboardInterrupt

    store = place.open(Points({"checkpoint.deleting": end}))
    name = tiny(store, 5)
    with pytest.raises(KeyboardInterrupt):
        store.delete(name)
    assert store.names() == []
    assert store.files(name)
    place.open().clean(2)
    assert store.files(name) == []


def test_a_second_beginning_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first, second = LocalStore(tmp_path), LocalStore(tmp_path)
    area = first.begin(1, 1, "aa")
    first.write(area, "__0_0.distcp", [b"x"])
    with pytest.raises(FileExistsError):
        second.begin(1, 1, "aa")
    second.clean(9)
    assert first.files(area) == ["__0_0.distcp"]
    first.discard(area)
    second.discard(second.begin(1, 1, "aa"))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.fault_points import Points
kill = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
store = LocalStore(Path(sys.argv[1]), Points({sys.argv[2]: kill}))
area = store.begin(1, 1, "aa")
for file in ("__0_0.distcp", "manifest.json", "SHA256SUMS"):
    store.write(area, file, [b"new"])
if sys.argv[2] == "written":
    kill()
store.publish(area, 1)
"""


@pytest.mark.parametrize("stage", ["written", "checkpoint.before-rename", "checkpoint.after-rename"])
def test_killed_the_former_or_the_new_one_is_there(tmp_path: Path, stage: str) -> None:
    store = LocalStore(tmp_path)
    tiny(store, 1)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), stage], check=False).returncode
    assert ended == -signal.SIGKILL
    is_new = stage == "checkpoint.after-rename"
    assert (store.at("step-00000001").read(MANIFEST) == b"new") == is_new
    area = store.begin(1, 1, "aa")  # what is left of the same name is taken over
    assert store.files(area) == []
    store.discard(area)
    store.clean(0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("exchanging", [True, False], ids=["names exchanged", "renamed twice"])
def test_a_sleeper_gives_back_what_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    """A publisher is stopped just before its rename, while the next attempt claims and publishes the same step."""
    if not exchanging:
        monkeypatch.setattr(folders, "exchange", lambda *_: False)
    living = LocalStore(tmp_path)

    def overtake(**_: object) -> None:
        assert claim(living) == 1
        assert claim(living) == 2
        tiny(living, 1, attempt=2)

    sleeper = LocalStore(tmp_path, Points({"checkpoint.before-rename": overtake}))
    area = sleeper.begin(1, 1, "aa")
    for file in (MANIFEST, SUMS):
        sleeper.write(area, file, [b"late"])
    with pytest.raises(SupersededError, match="attempt 2 is in charge"):
        sleeper.publish(area, 1)
    sleeper.discard(area)
    assert living.at("step-00000001").read(MANIFEST) == b"manifest.json of 1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-00000001"]


def test_half_made_small_files_are_cleared_up(tmp_path: Path) -> None:
    (tmp_path / ".creating-latest-00000001.json-aa").write_bytes(b"half")
    store = LocalStore(tmp_path)
    store.clean(0)
    assert list(tmp_path.iterdir()) == []
    assert store.create("latest-00000001.json", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["latest-00000001.json"]


def test_waiting_for_an_area(tmp_path: Path) -> None:
    publisher, other = LocalStore(tmp_path), LocalStore(tmp_path)
    with pytest.raises(TimeoutError, match="step-00000001"):
        other.join(1, 1, "aa", 0.02)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(other.join, 1, 1, "aa", 60.0)
        area = publisher.begin(1, 1, "aa")
        assert joined.result(60) == area
    publisher.discard(area)


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(UserError, match=r"latest-1: cannot make a file only if there is none; put the run"):
        LocalStore(tmp_path).create("latest-1", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ignores_the_condition_is_refused(s3_place: Place) -> None:
    assert s3_place.gate is not None
    s3_place.gate.ignores_conditions = True
    with pytest.raises(UserError, match=r"s3://bucket/.*ignores the condition .*If-None-Match.*; use storage"):
        s3_place.open().create("latest-1", b"x")
    assert s3_place.open().keys("") == []


def test_every_third_request_fails(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 << 20),))
    monkeypatch.setattr(object_streams, "FIXED_BYTES", 5 << 20)
    assert s3_place.gate is not None
    s3_place.gate.fail_every = 3
    store = s3_place.open()
    content = random.Random(3).randbytes(22 << 20)
    area = store.begin(1, 1, "aa")
    assert store.write(area, "big", [content]).sha256 == hashlib.sha256(content).hexdigest()
    store.write(area, MANIFEST, [b"{}"])
    store.write(area, SUMS, [b"x"])
    name = store.publish(area, 1)
    assert store.at(name).read("big") == content
    assert store.create("latest-1", b"x")
    assert not store.create("latest-1", b"y")
    store.delete(name)
    assert store.names() == []


def test_a_server_that_always_fails_is_named(s3_place: Place) -> None:
    store = s3_place.open()
    name = tiny(store, 1)
    assert s3_place.gate is not None
    s3_place.gate.fail_every = 1
    with pytest.raises(OSError, match=r"Service Unavailable: .*/step-00000001\.a1-aa/manifest\.json'"):
        store.at(name).read(MANIFEST)
    with pytest.raises(OSError, match=r"/step-00000002\.a1-aa/part'"):
        store.write("step-00000002.a1-aa", "part", [b"x"])


def test_slow_storage_only_takes_longer(s3_place: Place) -> None:
    assert s3_place.gate is not None
    s3_place.gate.delay_s = 0.05
    store = s3_place.open()
    assert store.names() == []
    name = tiny(store, 1)
    assert store.names() == [name]


def test_little_more_is_read_than_asked_for(s3_place: Place) -> None:
    content = random.Random(4).randbytes(20 << 20)
    store = s3_place.open()
    area = store.begin(1, 1, "aa")
    store.write(area, "big", [content])
    assert s3_place.gate is not None
    s3_place.gate.sent_bytes = 0
    with store.at(area).open("big") as file:
        for start in range(0, 16 << 20, 4 << 20):  # as an archive is read: its end, its beginning, its elements
            for at, count in ((start + (4 << 20) - 300, 300), (start, 500), (start + 500, (4 << 20) - 800)):
                file.seek(at)
                assert file.read(count) == content[at : at + count]
    assert s3_place.gate.sent_bytes <= 1.05 * (16 << 20)
    store.discard(area)


def test_an_object_that_became_shorter_is_told() -> None:
    file = RangeFile(lambda start, end: b"short", 100, "bucket/part")
    with pytest.raises(OSError, match=r"5 of 100 bytes came.*bucket/part"):
        file.read(100)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (str(tmp_path / "a b"), tmp_path / "a b", f"file://{tmp_path}/a%20b"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "a b")
    with pytest.raises(UserError, match=r"checkpoint.folder = 'odd://x': fsspec knows no odd://; give a folder"):
        open_store("odd://x")
    for url in ("s3:/bucket/run", "s3:bucket/run", "gs:/bucket/run"):
        with pytest.raises(UserError, match=rf"checkpoint.folder = '{url}': is a URL whose slashes are missing; give"):
            open_store(url)
    assert isinstance(open_store("./s3:/bucket"), LocalStore)
    with pytest.raises(UserError, match=r"http:// has no conditional write; use storage that has"):
        open_store("http://127.0.0.1/run")

    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(location.fsspec, "get_filesystem_class", missing)
    with pytest.raises(UserError, match=r"s3:// needs a package that is not here; pip install 'phalanx-train\[s3\]'"):
        open_store("s3://bucket/run")
    with pytest.raises(UserError, match=r"gs:// needs a package .*gcsfs"):
        open_store("gs://bucket/run")


def test_a_reader_that_takes_a_fresh_lock_for_a_leftover_does_not_refuse_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has the lock before the writer has locked it, and removes the file while the writer tries again."""
    aside = tmp_path / f"{folders.WRITING}step-00000001-abc"
    real, readers = folders.try_lock, []

    def try_lock(descriptor: int) -> bool | None:
        if not readers:
            readers.append(os.open(f"{aside}.lock", os.O_RDWR))
            assert real(readers[0])
        return real(descriptor)

    def reader_goes_on(_seconds: float) -> None:
        Path(f"{aside}.lock").unlink()
        os.close(readers[0])

    monkeypatch.setattr(folders, "try_lock", try_lock)
    monkeypatch.setattr(folders.time, "sleep", reader_goes_on)
    held = folders.hold(aside)
    with pytest.raises(FileExistsError):
        folders.hold(aside)  # a living writer is refused as before
    folders.release(aside, held)
