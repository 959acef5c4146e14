"""Writing past the page cache: the same bytes, whatever the pieces are and whatever the file system can."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.storage import folder_store
from phalanx.checkpoint.storage.folder_store import BUFFER_BYTES, LocalStore, write_whole

SIZES = st.one_of(
    st.integers(0, 10_000), st.sampled_from([4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES])
)
FOLDERS = [pytest.param(None, id="disk"), pytest.param("/dev/shm", id="tmpfs")]


def written(path: Path, pieces: Iterable[bytes]) -> bytes:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        write_whole(descriptor, pieces)
    finally:
        os.close(descriptor)
    return path.read_bytes()


@pytest.mark.parametrize("folder", FOLDERS)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(SIZES, max_size=6), seed=st.integers(0, 255))
def test_the_file_is_what_was_given(
    folder: str | None, tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    pieces = [bytes([(seed + number) % 256]) * size for number, size in enumerate(sizes)]
    path = tmp_path_factory.getbasetemp() / "file" if folder is None else Path(folder) / f"phalanx-test-{os.getpid()}"
    try:
        assert written(path, pieces) == b"".join(pieces)
    finally:
        path.unlink()


def test_large_files_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_bytes: list[int] = []
    write = folder_store._write_direct
    monkeypatch.setattr(
        folder_store, "_write_direct", lambda *args: written_bytes.append(write(*args)) or written_bytes[-1]
    )
    written(tmp_path / "file", [b"x" * (3 * BUFFER_BYTES + 5)])
    if not sum(written_bytes):
        pytest.skip("the file system of the temporary folder knows no O_DIRECT")
    assert written_bytes == [BUFFER_BYTES] * 3


def test_a_write_cut_short_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    lengths: list[int] = []

    def short(descriptor: int, data: memoryview) -> int:
        lengths.append(write(descriptor, data[: 5 * 512] if not lengths else data))
        return lengths[-1]

    monkeypatch.setattr(folder_store.os, "write", short)
    pieces = [os.urandom(BUFFER_BYTES), os.urandom(BUFFER_BYTES), b"end"]
    assert written(tmp_path / "file", pieces) == b"".join(pieces)
    assert lengths[0] == 5 * 512


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("turn", [0, 2, 3])
def test_what_the_disk_refuses_is_said_whoever_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, turn: int
) -> None:
    """In the thread, in the last of it when all has been handed over, and for what is left at the end; nothing of it is
    tried again through the cache."""
    write, turns = os.write, 0

    def refuse(descriptor: int, data: memoryview) -> int:
        nonlocal turns
        turns += 1
        if turns > turn:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(folder_store.os, "write", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        written(tmp_path / "file", [b"x" * (3 * BUFFER_BYTES + 7)])
    assert turns == turn + 1


@pytest.fixture(name="direct_folder")
def direct_folder_fixture(tmp_path: Path) -> Path:
    """On a file system that knows O_DIRECT."""
    descriptor = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY)
    try:
        if not folder_store._set_direct(descriptor, wanted=True):
            pytest.skip("the file system of the temporary folder knows no O_DIRECT")
    finally:
        os.close(descriptor)
    return tmp_path


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & folder_store._DIRECT)


@pytest.mark.parametrize("refused", [(0, 1, 2), (1,), (2,)], ids=["always", "half way", "at last"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_device_that_refuses_is_written_through_the_cache(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...], number: int
) -> None:
    """The flag may be set, and yet some write or all are refused."""
    write = os.write
    tries: list[bool] = []

    def refuse(descriptor: int, data: memoryview) -> int:
        if is_direct(descriptor):
            tries.append(len(tries) in refused)
            if tries[-1]:
                raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(folder_store.os, "write", refuse)
    content = os.urandom(3 * BUFFER_BYTES + 1)
    assert written(direct_folder / "file", [content]) == content
    assert tries == [turn in refused for turn in range(3)]


def test_a_file_system_that_refuses_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & folder_store._DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(descriptor, command, flags)

    monkeypatch.setattr(folder_store.fcntl, "fcntl", refuse)
    content = os.urandom(2 * BUFFER_BYTES + 4096)
    assert written(tmp_path / "file", [content]) == content


def test_the_tail_is_written_through_the_cache_whatever_its_length(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_DIRECT would refuse a length that is no multiple of a block."""
    write = os.write
    calls: list[tuple[bool, int]] = []

    def noted(descriptor: int, data: memoryview) -> int:
        calls.append((is_direct(descriptor), len(data)))
        return write(descriptor, data)

    monkeypatch.setattr(folder_store.os, "write", noted)
    for tail in (1, 511, 4095, 4096, 4097):
        calls.clear()
        content = os.urandom(BUFFER_BYTES + tail)
        assert written(direct_folder / "file", [content]) == content
        assert calls == [(True, BUFFER_BYTES), (False, tail)]


def test_all_is_synced_when_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(folder_store.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    for size in (0, 5, 2 * BUFFER_BYTES, 2 * BUFFER_BYTES + 5):
        written(tmp_path / "file", [bytes(size)])
        assert synced.pop() == size
        assert not synced


def test_no_more_is_in_memory_than_two_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    mapped = folder_store.mmap.mmap
    monkeypatch.setattr(folder_store.mmap, "mmap", lambda *args: made.append(args[1]) or mapped(*args))
    asked = 0

    def content() -> Iterator[bytes]:
        nonlocal asked
        for _ in range(40):
            asked += 1
            written_bytes = (tmp_path / "file").stat().st_size
            assert (asked - 1) * (BUFFER_BYTES // 4) - written_bytes <= 2 * BUFFER_BYTES
            yield bytes(BUFFER_BYTES // 4)

    assert len(written(tmp_path / "file", content())) == 10 * BUFFER_BYTES
    assert made == [BUFFER_BYTES] * 2


def failing_content(pieces: int) -> Iterator[bytes]:
    yield from [bytes(BUFFER_BYTES)] * pieces
    raise RuntimeError("the memory does not match its sums")


def test_what_fails_while_a_buffer_is_being_written_ends_the_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="does not match"):
        written(tmp_path / "file", failing_content(3))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_store_keeps_nothing_of_a_file_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    store = LocalStore(tmp_path)
    area = store.begin(1, 1, "aa")
    given, turns = getattr(os, call), 0

    def refuse(descriptor: int, *data: memoryview) -> Any:
        nonlocal turns
        turns += 1
        if turns == (3 if call == "write" else 1):
            raise OSError(number, os.strerror(number))
        return given(descriptor, *data)

    with monkeypatch.context() as patch:
        patch.setattr(folder_store.os, call, refuse)
        with pytest.raises(OSError, match=rf"{os.strerror(number)}.*__0_0\.distcp") as refused:
            store.write(area, "__0_0.distcp", [bytes(BUFFER_BYTES)] * 5)
    assert refused.value.errno == number
    assert list((tmp_path / area).iterdir()) == []
    assert store.write(area, "__0_0.distcp", [bytes(BUFFER_BYTES)] * 2).size_bytes == 2 * BUFFER_BYTES
    store.discard(area)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from phalanx.checkpoint.storage.folder_store import BUFFER_BYTES
from phalanx.checkpoint.storage.folder_store import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = BUFFER_BYTES + BUFFER_BYTES // 2 + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = LocalStore(Path(sys.argv[1]))
area = store.begin(1, 1, "aa")
try:
    store.write(area, "__0_0.distcp", [bytes(BUFFER_BYTES)] * 4)
except OSError as error:
    print(error, sorted(path.name for path in (store.path / area).iterdir()))
"""


def test_the_system_cutting_a_large_write_short_and_then_refusing(tmp_path: Path) -> None:
    """Nothing is injected here: the second buffer is written in part, and what is left of it is refused."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "File too large" in said
    assert "__0_0.distcp' []" in said
