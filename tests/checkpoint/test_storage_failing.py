"""A store that fails says nothing about what it holds: no checkpoint counts as damaged for it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import s3fs
import torch
from checkpoint_helpers import make_tensors
from storage_helpers import (  # noqa: F401
    DENIED,
    SLOW_DOWN,
    Place,
    flipped,
    made,
    place_fixture,
    put,
    s3_place_fixture,
    s3_server_fixture,
)
from support.open_checkpoint import newest, open_checkpoint
from thread_ranks import ThreadPeers, succeed

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.checkpoint_files import EVALUATION, Evaluation, FolderFiles
from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.storage import latest as pointer
from phalanx.checkpoint.storage import object_streams
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import advance, claim, read_latest
from phalanx.checkpoint.storage.retention import prune
from phalanx.core.errors import UserError
from phalanx.core.files import StoreFailedError
from phalanx.core.layout import Shard

MB = 1 << 20

FILES = ("__0_0.distcp", "manifest.json", "SHA256SUMS", EVALUATION, "latest-00000002.json")


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the client library, whose waits are long."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


@pytest.fixture(name="files", scope="module")
def files_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("made")
    evaluation = {EVALUATION: Evaluation(2, {"validation_loss": 1.0}).to_bytes()}
    return {step: made(folder, step) | (evaluation if step == 2 else {}) for step in (1, 2)}


def two(place: Place, files: dict[int, dict[str, bytes]]) -> tuple[Store, list[str]]:
    store = place.open()
    return store, [put(store, step, 1, files[step]) for step in (1, 2)]


def filled(store: Store, report: Any) -> Any:
    target = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(2).items()}
    return restore(target, keeper=None, store=store, report=report)


@pytest.mark.campaign(but=("503-__0_0.distcp", "403-manifest.json", "503-latest-00000002.json"))
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("refusal", [SLOW_DOWN, DENIED], ids=["503", "403"])
def test_what_the_server_refuses_to_send_is_an_error_and_not_damage(
    s3_place: Place, files: dict[int, dict[str, bytes]], file: str, refusal: tuple[str, str, str]
) -> None:
    store, names = two(s3_place, files)
    gate = s3_place.gate
    assert gate is not None
    gate.refusal, gate.refused_methods = refusal, ("GET",)
    gate.refused_name = file if file.startswith("latest-") else f"{names[1]}/{file}"
    with pytest.raises(UserError) as refused:
        filled(store, pytest.fail)
    assert not isinstance(refused.value, DamagedCheckpointError)
    for words in (gate.refused_name, refusal[2], *([] if refusal is DENIED else ["503 SlowDown"])):
        assert words in str(refused.value)
    assert "begin anew" not in str(refused.value)
    gate.reset()
    assert filled(store, pytest.fail).step == 2


def large(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint whose archives are read in parts."""
    path = save(folder / "large", 2, {"w": torch.arange(3 << 20, dtype=torch.float32)}, {"step": 2})
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.campaign(but=("short",))
@pytest.mark.parametrize("how", ["refused", "short", "ignored"])
def test_the_reader_of_archives_does_not_hide_what_failed(
    s3_place: Place, files: dict[int, dict[str, bytes]], tmp_path: Path, how: Any
) -> None:
    store, gate = s3_place.open(), s3_place.gate
    assert gate is not None
    put(store, 1, 1, files[1])
    name = put(store, 2, 1, large(tmp_path))
    told: list[str] = []

    def fill() -> Any:
        return restore({"w": torch.zeros(3 << 20)}, keeper=None, store=store, report=told.append)

    def spoil(method: str, path: str) -> None:
        if "distcp" in path and how == "refused":
            gate.refusal, gate.refused_methods, gate.refused_name = SLOW_DOWN, ("GET",), "distcp"
        elif "distcp" in path:
            gate.ranges = how

    gate.watch = spoil
    words = {"refused": "503 SlowDown", "short": "bytes came", "ignored": "answers ranges with"}[how]
    with pytest.raises(UserError, match=rf"{name}/__0_0\.distcp.*{words}") as refused:
        fill()
    assert not isinstance(refused.value, DamagedCheckpointError) and "damaged" not in told
    assert told == []
    with pytest.raises(UserError, match=words) as refused:
        found = open_checkpoint(store.at(name), verify=False)
        found.read()
    assert not isinstance(refused.value, DamagedCheckpointError)
    gate.reset()
    assert fill().step == 2


def test_ranges_that_are_answered_with_all_are_an_error_that_names_the_store(
    s3_place: Place, files: dict[int, dict[str, bytes]]
) -> None:
    store, names = two(s3_place, files)
    assert s3_place.gate is not None
    s3_place.gate.ranges = "ignored"
    with store.at(names[1]).open("__0_0.distcp") as file:
        file.seek(100)
        with pytest.raises(StoreFailedError, match=r"answers ranges with all of an object.*__0_0\.distcp"):
            file.read(50)
    assert store.at(names[1]).read("manifest.json") == files[2]["manifest.json"], "all was asked for"


def test_an_object_that_is_shorter_than_it_was_is_damaged(s3_place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store, names = two(s3_place, files)
    found = newest(store, pytest.fail, verify=False)
    assert found is not None
    for left in (3000, 10):  # a range that ends beyond it, and one that begins there
        s3_place.change(names[1], "__0_0.distcp", lambda content, left=left: content[:left])
        with pytest.raises(DamagedCheckpointError, match=names[1]):
            found.read()


def test_pruning_stops_where_the_server_fails(s3_place: Place, files: dict[int, dict[str, bytes]]) -> None:
    store, names = two(s3_place, files)
    names.append(put(store, 3, 1, files[1] | {"x": b""}, pointed=False))
    gate = s3_place.gate
    assert gate is not None
    gate.refusal, gate.refused_methods = SLOW_DOWN, ("GET",)
    for refused in (f"{names[1]}/manifest.json", f"{names[1]}/{EVALUATION}"):
        gate.refused_name = refused
        with pytest.raises(OSError, match=refused):
            prune(store, CheckpointConfig(keep_last=1, keep_best=1))
    gate.reset()
    assert store.names() == names[::-1]


def test_a_pointer_that_comes_back_short_is_an_error_in_few_requests(s3_place: Place) -> None:
    store = s3_place.open()
    claim(store)
    gate = s3_place.gate
    assert gate is not None
    gate.ranges = "short"
    before = gate.requests
    acts: tuple[Callable[[], object], ...] = (
        partial(claim, store),
        partial(advance, store, 1, 1, "step-00000001", ""),
    )
    for act in acts:
        with pytest.raises(OSError, match=r"of \d+ bytes came.*latest-00000001\.json"):
            act()
    with pytest.raises(OSError, match="bytes came"):
        read_latest(store)
    assert gate.requests - before < 60
    assert store.keys("latest-") == ["latest-00000001.json"]
    gate.reset()
    assert claim(store) == 2


class Garbling:
    """A store that gives back other bytes than it took, as many."""

    def __init__(self, store: Store) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return flipped(self._store.get(key), 25)


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
def test_what_is_appended_and_never_read_back_ends_the_claim(place: Place) -> None:
    store, pauses = place.open(), list[float]()
    claim(store)
    garbling: Any = Garbling(store)
    acts: tuple[Callable[[], object], ...] = (
        partial(claim, garbling, pause=pauses.append),
        partial(advance, garbling, 1, 1, "step-00000001", "", pause=pauses.append),
    )
    for act in acts:
        before = len(store.keys("latest-"))
        with pytest.raises(UserError, match="or read back"):
            act()
        assert len(store.keys("latest-")) <= before + pointer._STILL_LOOKS
    assert garbling.requests < 1500
    assert 5 < sum(pauses) / 2 < 30
    assert claim(store) > 1


def test_a_shortened_object_says_so_where_its_archive_is_read(
    s3_place: Place, files: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    store = s3_place.open()
    name = put(store, 2, 1, large(tmp_path))
    found = newest(store, pytest.fail, verify=False)
    assert found is not None
    s3_place.change(name, "__0_0.distcp", lambda content: content[: 9 << 20])
    with pytest.raises(DamagedCheckpointError, match=rf"it has {9 << 20} bytes now"):
        found.read()


@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
def test_an_upload_whose_last_answer_the_server_loses_is_whole(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    store, gate, lost = s3_place.open(), s3_place.gate, list[str]()
    assert gate is not None

    def loses(method: str, path: str, query: str) -> bool:
        if method == "POST" and "uploadId" in query and len(lost) < times:
            lost.append(path)
            return True
        return False

    gate.loses = loses
    area = store.begin(1, 1, "aa")
    entry = store.write(area, "big", [bytes(range(256)) * (12 * MB // 256)])
    assert lost
    gate.reset()
    assert store.at(area).size_bytes("big") == entry.size_bytes == 12 * MB
    assert fsspec.filesystem("s3", **s3_place.options).list_multipart_uploads("bucket") == []


def test_a_server_that_asks_to_slow_down_while_a_checkpoint_is_written(
    s3_place: Place, files: dict[int, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then it costs time; for good it costs the checkpoint, with an error that names object and answer."""
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    store, gate, asked = s3_place.open(), s3_place.gate, Counter[str]()
    assert gate is not None
    put(store, 1, 1, files[1])
    lock = threading.Lock()

    def watch(method: str, path: str) -> None:
        with lock:
            asked[method] += 1
            gate.refusal = SLOW_DOWN if method in ("PUT", "POST") and asked[method] % 3 == 1 else ()

    gate.watch = watch
    name = put(store, 2, 1, files[2] | {"big": bytes(12 * MB)})
    gate.reset()
    assert store.at(name).size_bytes("big") == 12 * MB
    gate.refusal, gate.refused_methods = SLOW_DOWN, ("POST",)
    area = store.begin(3, 1, "aa")
    with pytest.raises(OSError, match=r"503 SlowDown: Please reduce your request rate\..*/big'"):
        store.write(area, "big", [bytes(12 * MB)])
    gate.reset()
    store.discard(area)
    assert store.files(area) == []
    assert filled(store, pytest.fail).step == 2


def test_an_entry_of_the_pointer_whose_answer_the_server_loses_is_made_once(s3_place: Place) -> None:
    store, gate = s3_place.open(), s3_place.gate
    assert gate is not None
    lost: list[str] = []

    def loses(method: str, path: str, query: str) -> bool:
        if method == "PUT" and "latest-" in path and path not in lost:
            lost.append(path)
            return True
        return False

    gate.loses = loses
    assert claim(store) == 1
    advance(store, 1, 1, "step-00000001", "")
    assert len(lost) == 2
    assert store.keys("latest-") == ["latest-00000001.json", "latest-00000002.json"]


KILLED = """
import json, sys
from phalanx.checkpoint.storage import object_streams
from phalanx.checkpoint.storage.location import open_store
object_streams.PARTS = ((10_000, 5 << 20),)
store = open_store(sys.argv[1], json.loads(sys.argv[2]))
store.write(store.begin(3, 1, "aa"), "big", [bytes(1 << 20)] * 40)
"""


def test_a_writer_that_is_killed_between_two_parts_leaves_nothing_for_long(
    s3_place: Place, files: dict[int, dict[str, bytes]]
) -> None:
    store, _ = two(s3_place, files)
    gate, parts = s3_place.gate, list[str]()
    assert gate is not None
    sent, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/big"):
            parts.append(path)
            if len(parts) >= 4:
                sent.set()
                killed.wait(60)

    gate.watch = hold
    with subprocess.Popen([sys.executable, "-c", KILLED, s3_place.url, json.dumps(s3_place.options)]) as writer:
        try:
            assert sent.wait(60)
        finally:
            writer.kill()
            killed.set()
    fs = fsspec.filesystem("s3", **s3_place.options)
    [left] = fs.list_multipart_uploads("bucket")
    assert left["Key"].endswith("step-00000003.a1-aa/big")
    assert filled(store, pytest.fail).step == 2
    attempt = claim(store)
    store.clean(attempt)
    assert fs.list_multipart_uploads("bucket") == []
    assert len(store.names()) == 2


@pytest.mark.campaign(but=("3",))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_number_of_ranks_restores_what_two_wrote(s3_place: Place, tmp_path: Path, world: int) -> None:
    """Although some answers fail."""
    rows = 24
    whole = torch.arange(rows * 256, dtype=torch.float32).view(rows, 256)

    def written(peers: ThreadPeers) -> Path:
        shard = Shard.whole((rows, 256)).rows(peers.rank * rows // 2, rows // 2, ("shard",))
        mine = {"w": whole[peers.rank * rows // 2 :][: rows // 2].clone()}
        return save(tmp_path / "two", 1, mine, {"step": 1}, shards={"w": shard}, peers=cast(Any, peers))

    path = succeed(2, written)[0]
    put(s3_place.open(), 1, 1, {file.name: file.read_bytes() for file in path.iterdir()})
    assert s3_place.gate is not None
    s3_place.gate.fail_every = 4

    def read(peers: ThreadPeers) -> torch.Tensor:
        share = rows // world
        shards = {"w": Shard.whole((rows, 256)).rows(peers.rank * share, share, ("shard",))}
        target = {"w": torch.zeros(share, 256)}
        store = s3_place.open()
        assert restore(target, keeper=None, store=store, report=pytest.fail, shards=shards, peers=cast(Any, peers))
        return target["w"]

    assert torch.equal(torch.cat(succeed(world, read)), whole)


def test_what_fails_on_a_local_disk_counts_as_damage_as_ever(
    tmp_path: Path, files: dict[int, dict[str, bytes]]
) -> None:
    class BadFiles(FolderFiles):
        def open(self, file: str) -> Any:
            if self.name == "step-00000002" and file.endswith("distcp"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), file)
            return super().open(file)

    class Bad(LocalStore):
        def at(self, name: str) -> FolderFiles:
            return BadFiles(self.path / name)

    store, told = Bad(tmp_path), list[str]()
    for step in (1, 2):
        put(store, step, 1, files[step])
    assert filled(store, told.append).step == 1
    assert "step-00000002 is damaged (__0_0.distcp cannot be read ([Errno 5] Input/output error" in told[0]
