"""Writing past the page cache: the same bytes, whatever the pieces are and whatever the file system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.storage import direct
from phalanx.checkpoint.storage.direct import BUFFER_BYTES, write_whole

SIZES = st.one_of(
    st.integers(0, 10_000), st.sampled_from([4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES])
)
FOLDERS = [pytest.param(None, id="disk"), pytest.param("/dev/shm", id="tmpfs")]


def written(path: Path, pieces: list[bytes]) -> bytes:
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
    write = direct._write_direct
    monkeypatch.setattr(direct, "_write_direct", lambda *args: written_bytes.append(write(*args)) or written_bytes[-1])
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

    monkeypatch.setattr(direct.os, "write", short)
    pieces = [os.urandom(BUFFER_BYTES), os.urandom(BUFFER_BYTES), b"end"]
    assert written(tmp_path / "file", pieces) == b"".join(pieces)
    assert lengths[0] == 5 * 512


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", [b"x" * (4 * BUFFER_BYTES)])


def test_a_device_that_refuses_is_written_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = os.write, []

    def refuse(descriptor: int, data: memoryview) -> int:
        if direct.fcntl.fcntl(descriptor, direct.fcntl.F_GETFL) & direct._DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data)

    monkeypatch.setattr(direct.os, "write", refuse)
    content = os.urandom(2 * BUFFER_BYTES + 1)
    assert written(tmp_path / "file", [content]) == content
