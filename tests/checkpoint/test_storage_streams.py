"""Object stores are asked for much at a time and little in all: streams, parts, listings, requests that hang."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import torch
from checkpoint_helpers import rewrite
from hypothesis import given
from hypothesis import strategies as st
from persist_helpers import Job
from storage_helpers import Place, put, s3_place_fixture, s3_server_fixture  # noqa: F401
from support.open_checkpoint import newest
from thread_ranks import ThreadPeers, succeed

from phalanx.checkpoint.format.checkpoint_files import FolderFiles, Span, examine
from phalanx.checkpoint.format.run_sums import RUN_BYTES
from phalanx.checkpoint.keeper_contract import PersistOutcome
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.persist.publication import Endings, NotPublishedError, Writing, await_end
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.storage import object_streams
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.location import open_store
from phalanx.checkpoint.storage.object_streams import Ahead
from phalanx.core import object_requests
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS
from phalanx.core.layout import Shard

GUARD_S = 30.0
MB = 1 << 20


class Together:
    """Holds requests back until so many are under way at a time."""

    def __init__(self, wanted: int, belongs: Callable[[str, str], bool]) -> None:
        self._wanted, self._belongs = wanted, belongs
        self._changed = threading.Condition()
        self._under_way = self.most = 0

    def watch(self, method: str, path: str) -> None:
        if not self._belongs(method, path):
            return
        with self._changed:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._wanted, GUARD_S)
            self._under_way -= 1


def tensor_reads(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".distcp")


def checkpoint_of(folder: Path, ranks: int, rows: int, width: int = 256) -> dict[str, bytes]:
    """The files of a checkpoint of a matrix, of which each rank has some rows."""

    def body(peers: ThreadPeers) -> Path:
        shard = Shard.whole((rows * ranks, width)).rows(peers.rank * rows, rows, ("shard",))
        values = torch.arange(peers.rank * rows, (peers.rank + 1) * rows, dtype=torch.float32)[:, None]
        tensors = {"w": values.expand(-1, width).contiguous()}
        return save(folder / str(ranks), 1, tensors, {"step": 1}, shards={"w": shard}, peers=cast(Any, peers))

    path = succeed(ranks, body)[0]
    return {file.name: file.read_bytes() for file in path.iterdir()}


@contextmanager
def watched(place: Place, watch: Callable[[str, str], None]) -> Iterator[None]:
    assert place.gate is not None
    place.gate.watch = watch
    try:
        yield
    finally:
        place.gate.watch = lambda method, path: None


def test_one_large_object_is_read_by_several_streams(
    s3_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_streams, "SEGMENT_BYTES", RUN_BYTES)
    monkeypatch.setattr(object_streams, "ROOM_BYTES", 10 * RUN_BYTES)
    store, rows = s3_place.open(), 8 * RUN_BYTES // 1024
    put(store, 1, 1, checkpoint_of(tmp_path, 1, rows))
    target = {"w": torch.zeros(rows, 256)}
    together = Together(object_streams.STREAMS, tensor_reads)
    with watched(s3_place, together.watch):
        restored = restore(target, keeper=None, store=store, report=pytest.fail)
    assert restored is not None
    assert together.most == object_streams.STREAMS
    assert torch.equal(target["w"], torch.arange(rows, dtype=torch.float32)[:, None].expand(-1, 256))


def test_what_is_read_is_fetched_once_and_nothing_beside_it(s3_place: Place, tmp_path: Path) -> None:
    store, rows = s3_place.open(), 6 * RUN_BYTES // 1024
    name = put(store, 1, 1, checkpoint_of(tmp_path, 2, rows))
    assert s3_place.gate is not None
    small = sum(store.at(name).sizes()[file] for file in (".metadata", "manifest.json", "SHA256SUMS"))
    pointer = 2 * 4096
    for first, wanted in ((0, 2 * rows), (rows // 2, rows)):
        s3_place.gate.sent_bytes = 0
        shards = {"w": Shard.whole((2 * rows, 256)).rows(first, wanted, ("shard",))}
        target = {"w": torch.zeros(wanted, 256)}
        restore(target, keeper=None, store=store, report=pytest.fail, shards=shards)
        assert torch.equal(target["w"][:, 0], torch.arange(first, first + wanted, dtype=torch.float32))
        edges = 0 if wanted == 2 * rows else 4 * RUN_BYTES  # half a run, and the beginning or end, of each of two files
        assert s3_place.gate.sent_bytes <= wanted * 1024 + edges + small + pointer + 2 * 4096


def test_requests_before_the_first_weights_do_not_grow_with_the_ranks_that_wrote(
    s3_place: Place, tmp_path: Path
) -> None:
    def before(ranks: int) -> tuple[int, list[tuple[str, str]]]:
        """Requests of rank 0 until weights are read, and those of another rank."""
        place = Place("s3", f"{s3_place.url}/{ranks}", s3_place.options, s3_place.gate)
        put(place.open(), 1, 1, checkpoint_of(tmp_path, ranks, 4))
        seen: list[list[tuple[str, str]]] = [[], []]

        def body(peers: ThreadPeers) -> None:
            mine = place.open()
            asked = cast(Any, mine)._ask

            def ask(path: str, call: Any, *arguments: Any, **options: Any) -> Any:
                seen[peers.rank].append((call.__name__, path))
                return asked(path, call, *arguments, **options)

            cast(Any, mine)._ask = ask
            shards = {"w": Shard.whole((4 * ranks, 256)).rows(2 * ranks * peers.rank, 2 * ranks, ("shard",))}
            target = {"w": torch.zeros(2 * ranks, 256)}
            restore(target, keeper=None, store=mine, report=pytest.fail, shards=shards, peers=cast(Any, peers))

        succeed(2, body)
        first = next(number for number, (_, path) in enumerate(seen[0]) if path.endswith(".distcp"))
        return first, seen[1]

    few, many = before(2), before(12)
    assert few[0] == many[0] <= 20
    for _, others in (few, many):
        assert {path.rpartition("/")[2].rpartition(".")[2] for _, path in others} <= {"distcp", "metadata", "json"}
        assert {name for name, _ in others} == {"_cat_file"}, "lengths are known from the manifest"


def test_looking_into_a_checkpoint_is_a_listing(s3_place: Place, tmp_path: Path) -> None:
    store = s3_place.open()
    name = put(store, 1, 1, checkpoint_of(tmp_path, 12, 4))
    seen: list[tuple[str, str]] = []
    with watched(s3_place, lambda method, path: seen.append((method, path))):
        examine(store.at(name), checksums=False)
    assert len(seen) < 10
    with watched(s3_place, Together(object_streams.STREAMS, tensor_reads).watch):
        examine(store.at(name))


def test_parts_are_sent_several_at_a_time_and_no_more_is_in_memory(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    monkeypatch.setattr(object_streams, "MEMORY_BYTES", 3 * 5 * MB)
    content, given = random.Random(3).randbytes(28 * MB), []

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(content), MB):
            given.append(start)
            yield content[start : start + MB]

    together = Together(3, lambda method, path: method == "PUT" and path.endswith("big"))
    ahead: list[int] = []

    def watch(method: str, path: str) -> None:
        together.watch(method, path)
        if not ahead and together.most == 3:
            ahead.append(len(given))

    store = s3_place.open()
    area = store.begin(1, 1, "aa")
    with watched(s3_place, watch):
        entry = store.write(area, "big", pieces())
    assert together.most == 3
    assert ahead[0] <= 4 * 5 + 1, "three parts are sent and one is filled"
    assert entry.sha256 == hashlib.sha256(content).hexdigest()
    assert store.at(area).read("big") == content


def test_very_long_objects_have_longer_parts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((3, 5), (10_000, 20)))
    monkeypatch.setattr(object_streams, "FIXED_BYTES", 20)
    content = bytes(range(60))
    for fixed, lengths in ((False, [5, 5, 5, 20, 20, 5]), (True, [20, 20, 20])):
        parts = list(object_streams._parts(iter([memoryview(content[:7]), memoryview(content[7:])]), fixed=fixed))
        assert [len(part) for part in parts] == lengths
        assert b"".join(parts) == content


def test_each_part_has_its_own_tries(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    content, tries, lock = random.Random(4).randbytes(16 * MB), Counter[str](), threading.Lock()
    store = s3_place.open()
    assert s3_place.gate is not None
    gate = s3_place.gate

    def watch(method: str, path: str) -> None:
        with lock:
            tries[method] += 1
            gate.refusal = ("500 Internal Server Error", "InternalError", "try again")
            gate.refused_methods = ("PUT",) if tries["PUT"] % 3 == 1 else ()

    area = store.begin(1, 1, "aa")
    with watched(s3_place, watch):
        entry = store.write(area, "big", [content])
    gate.refusal = ()
    assert tries["PUT"] > 4
    assert entry.size_bytes == len(content)
    assert store.at(area).read("big") == content


def test_a_part_that_fails_for_good_leaves_nothing(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    store = s3_place.open()
    area = store.begin(1, 1, "aa")
    assert s3_place.gate is not None
    s3_place.gate.refusal, s3_place.gate.refused_methods = ("403 Forbidden", "AccessDenied", "no"), ("PUT",)
    with pytest.raises(PermissionError, match="big"):
        store.write(area, "big", [bytes(MB)] * 23)
    s3_place.gate.refusal = ()
    assert store.files(area) == []
    assert fsspec.filesystem("s3", **s3_place.options).list_multipart_uploads("bucket") == []


def test_an_upload_whose_last_answer_was_lost_is_whole(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "PARTS", ((10_000, 5 * MB),))
    store, lost = s3_place.open(), []
    fs = cast(Any, store)._fs
    call = fs.call_s3

    def losing(method: str, *arguments: Any, **options: Any) -> Any:
        answer = call(method, *arguments, **options)
        if method == "complete_multipart_upload" and not lost:
            lost.append(method)
            raise ConnectionResetError(errno.ECONNRESET, "the answer was lost")
        return answer

    monkeypatch.setattr(fs, "call_s3", losing)
    area = store.begin(1, 1, "aa")
    assert store.write(area, "big", [bytes(12 * MB)]).size_bytes == 12 * MB == store.at(area).size_bytes("big")
    assert lost


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_request_that_hangs_is_given_up_and_made_again(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    store = s3_place.open()
    area = store.begin(1, 1, "aa")
    store.write(area, "there", [b"content"])
    monkeypatch.setattr(object_requests, "PATIENCE_S", 0.3)
    monkeypatch.setattr(object_requests, "SLOWEST_BYTES_PER_S", MB)
    hung, answered = [], threading.Event()

    def watch(asked: str, path: str) -> None:
        if asked == method and path.endswith(("there", "new")) and not hung:
            hung.append(path)
            answered.wait(GUARD_S)

    began_s = time.monotonic()
    with watched(s3_place, watch):
        try:
            if method == "GET":
                assert store.at(area).read("there") == b"content"
            else:
                store.write(area, "new", [b"content"])
        finally:
            answered.set()
    assert hung
    assert time.monotonic() - began_s < GUARD_S  # which the first answer would take


def test_a_request_that_always_hangs_is_an_error_that_names_the_object(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s3_place.open()
    area = store.begin(1, 1, "aa")
    store.write(area, "there", [b"content"])
    monkeypatch.setattr(object_requests, "PATIENCE_S", 0.2)
    answered = threading.Event()
    with watched(s3_place, lambda method, path: None if method != "GET" else bool(answered.wait(GUARD_S)) and None):
        with pytest.raises(OSError, match=r"no answer within 0 s.*there"):
            store.at(area).read("there")
        answered.set()


spans = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 90), st.integers(0, 40)).map(
        lambda one: Span(one[0], one[1], min(one[1] + one[2], 100))
    ),
    max_size=12,
)


@given(
    spans=spans, reads=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 99), st.integers(1, 60)), max_size=30)
)
def test_what_comes_from_ahead_is_what_lies_there(spans: list[Span], reads: list[tuple[str, int, int]]) -> None:
    contents = {name: random.Random(name).randbytes(100) for name in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_streams, "SEGMENT_BYTES", 16)
        patch.setattr(object_streams, "_LEAST_BYTES", 4)
        patch.setattr(object_streams, "ROOM_BYTES", 40)
        patch.setattr(object_streams, "_GAP_BYTES", 3)
        with Ahead(lambda file, start, end: contents[file][start:end], spans) as ahead:
            for file, start, wanted in reads:
                part = ahead.take(file, start, wanted)
                assert part is None or 0 < len(part) <= wanted
                assert part is None or part == contents[file][start : start + len(part)]


def test_no_more_is_ahead_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "SEGMENT_BYTES", 10)
    monkeypatch.setattr(object_streams, "ROOM_BYTES", 50)
    fetched: list[int] = []

    def fetch(file: str, start: int, end: int) -> bytes:
        fetched.append(start)
        return bytes(end - start)

    with Ahead(fetch, [Span("a", 0, 1000)]) as ahead:
        for at in range(0, 1000, 10):
            part = ahead.take("a", at, 10)
            assert part is not None and len(part) == 10
            assert len(fetched) <= at // 10 + 6
    assert sorted(fetched) == list(range(0, 1000, 10))


def test_damage_that_is_fetched_ahead_is_seen(s3_place: Place, tmp_path: Path) -> None:
    store = s3_place.open()
    name = put(store, 1, 1, checkpoint_of(tmp_path, 4, 4))
    found = newest(store, pytest.fail)
    assert found is not None and found.read()["w"].shape == (16, 256)
    s3_place.change(name, "__2_0.distcp", lambda content: content[:900] + b"\0\1" + content[902:])
    with pytest.raises(UserError, match=r"__2_0\.distcp: bytes 0 and following, of w, do not match"):
        newest(store, lambda line: None)


def test_checkpoints_of_older_writers_come_back(s3_place: Place, tmp_path: Path) -> None:
    """Without sums of runs, files are hashed whole before any is believed."""
    store, old = s3_place.open(), tmp_path / "old"
    old.mkdir()
    for name, content in checkpoint_of(tmp_path, 4, 4).items():
        (old / name).write_bytes(content)
    rewrite(old, lambda tree: [entry.pop("sums", None) for entry in tree["files"]] and None)
    files = {file.name: file.read_bytes() for file in old.iterdir()}
    name = put(store, 1, 1, files)
    target = {"w": torch.zeros(16, 256)}
    assert restore(target, keeper=None, store=store, report=pytest.fail) is not None
    assert torch.equal(target["w"][:, 0], torch.arange(16, dtype=torch.float32))
    s3_place.change(name, "__2_0.distcp", lambda content: content[:900] + b"\0\1" + content[902:])
    with pytest.raises(UserError, match=r"__2_0\.distcp: does not match its checksum"):
        restore(target, keeper=None, store=store, report=lambda line: None)


def requests_of_a_save(place: Place, folder: Path, ranks: int) -> int:
    """Of the second one, by ranks of one host."""
    job, endings, requests = Job(folder, size=ranks), Endings(), 0
    store = open_store(f"{place.url}/{ranks}", place.options)

    def work(rank: int, step: int, outcomes: list[PersistOutcome]) -> None:
        with job.task(rank, step) as task:
            mine = replace(task, descriptor=os.dup(task.descriptor))
            PersistWork(mine, NO_POINTS, outcomes.append, open_storage=lambda _: store, endings=endings).run()

    assert place.gate is not None
    for step in (1, 2):
        before, outcomes = place.gate.requests, list[PersistOutcome]()
        threads = [threading.Thread(target=work, args=(rank, step, outcomes)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 2 * ranks and not any(outcome.problem for outcome in outcomes)
        requests = place.gate.requests - before
    return requests


def test_each_further_rank_of_a_save_asks_for_little(s3_place: Place, tmp_path: Path) -> None:
    """Its file, its part, and the pointer once; the publisher reads the part. Nobody else looks at it, and none of them
    look again and again."""
    few, many = (requests_of_a_save(s3_place, tmp_path, ranks) for ranks in (2, 5))
    assert (many - few) / 3 <= 12


class Listed(FolderFiles):
    """Counts looks at whole areas."""

    listings: list[Path] = []  # noqa: RUF012

    def sizes(self) -> Any:
        self.listings.append(self.path)
        return super().sizes()


class Looked(LocalStore):
    looks = 0

    def at(self, name: str) -> FolderFiles:
        return Listed(self.path / name)

    def keys(self, prefix: str) -> list[str]:
        self.looks += prefix == "latest-"
        return super().keys(prefix)


def test_who_waits_for_the_publisher_lists_nothing(tmp_path: Path) -> None:
    store = Looked(tmp_path)
    area = store.begin(1, 1, "aa")
    store.write(area, "part-3.json", [b"{}"])
    with pytest.raises(TimeoutError, match="was not published"):
        await_end(store, area, "part-3.json", Writing(1, 1, "set", "aa"), None, 0.1)
    assert not Listed.listings and store.looks
    store.discard(area)


def test_the_more_ranks_wait_the_more_rarely_each_looks(tmp_path: Path) -> None:
    looks = []
    for ranks in (8, 12_288):
        store = Looked(tmp_path)
        with pytest.raises(TimeoutError):
            await_end(store, "none", "", Writing(1, 1, "set", "aa"), None, 0.3, ranks=ranks)
        looks.append(store.looks)
    assert looks[0] > looks[1]


def test_of_the_tasks_of_a_host_one_looks_and_is_woken_when_the_publisher_is_done() -> None:
    endings, writing = Endings(), Writing(1, 1, "set", "aa")
    looking, looks = threading.Event(), []

    def look(worth_it: threading.Event) -> str:
        looks.append(1)
        looking.set()
        assert worth_it.wait(GUARD_S)
        return "step-00000001"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(endings.hear, writing, look)
        assert looking.wait(GUARD_S)
        others = [pool.submit(endings.hear, writing, look) for _ in range(3)]
        endings.settle(writing)
        assert {one.result(GUARD_S) for one in (first, *others)} == {"step-00000001"}
    assert 1 <= len(looks) <= 4  # one, but for those who came after the end

    def failing(worth_it: threading.Event) -> str:
        raise NotPublishedError("no")

    with pytest.raises(NotPublishedError):
        endings.hear(writing, failing)
    endings.settle(writing)
