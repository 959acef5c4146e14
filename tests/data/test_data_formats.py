"""What is in a file decides how it is read, whatever it is called; what is no text is named as what it is."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from data_helpers import documents, lines, make_config, write_text

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig
from phalanx.data.prepare import prepare
from phalanx.data.sources import documents as documents_of
from phalanx.data.sources import input_files, text_reader
from phalanx.data.sources.documents import read_pieces
from phalanx.data.sources.input_files import list_files, plan_units
from phalanx.data.sources.text_reader import split_text

TEXTS = lines(300)
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def pack(how: str, content: bytes) -> bytes:
    """`content`, in two members where the format has some."""
    if how == "plain":
        return content
    compress = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}.get(how)
    compress = compress or pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress
    return b"".join(compress(part) for part in (content[:700], content[700:]))


def read(path: Path, **settings: object) -> list[str]:
    source = SourceConfig.model_validate({"kind": "jsonl", "path": str(path), **settings})
    return documents(prepare(make_config(path.parent, source), workers=1))


@pytest.mark.parametrize("how", ["plain", "gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("name", ["a.jsonl", "a", "A.JSONL.GZ", "a.json.zst", "a.jsonl.bz2", "a.xz"])
def test_a_format_is_known_by_its_content(tmp_path: Path, how: str, name: str) -> None:
    (tmp_path / name).write_bytes(pack(how, JSONL))
    if how == "plain" and name.lower().endswith((".gz", ".zst", ".bz2", ".xz")):
        with pytest.raises(UserError, match=r"cannot be unpacked after 0 bytes of text"):
            read(tmp_path / name)
        return
    assert read(tmp_path / name) == TEXTS


@pytest.mark.parametrize("how", ["gzip", "bzip2", "xz", "zstd"])
def test_what_is_packed_and_damaged_is_said_so_under_any_name(tmp_path: Path, how: str) -> None:
    path, content = tmp_path / "a.jsonl", pack(how, JSONL)
    path.write_bytes(content[:-30])
    with pytest.raises(UserError, match=r"is cut off after \d+ bytes of text"):
        read(path)
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 16]) + content[-2:])
    with pytest.raises(UserError, match=r"cannot be unpacked after \d+ bytes of text"):
        read(path)
    found = read(path, bad_utf8="skip")
    assert found and found == TEXTS[: len(found)], "what is whole of it is used"


def test_a_folder_is_searched_for_all_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, name in enumerate(["a.jsonl", "b.JSONL", "c.jsonl.gz", "d.Jsonl.GZ", "e.json.bz2", "f.jsonl.xz"]):
        how = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}.get(Path(name).suffix.lower(), "plain")
        (folder / name).write_bytes(pack(how, json.dumps({"text": f"document {number}, long enough"}).encode()))
    (folder / "readme.md").write_text("not one of them")
    assert read(folder) == [f"document {number}, long enough" for number in range(6)]


def _zip(content: bytes) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


def _tar(content: bytes) -> bytes:
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as archive:
        about = tarfile.TarInfo("a.jsonl")
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return file.getvalue()


OTHERS = {
    "a file of zip;": _zip(JSONL),
    "a file of tar;": _tar(JSONL),
    "a file of tar within one of gzip;": gzip.compress(_tar(JSONL)),
    "a file of gzip within one of xz;": lzma.compress(gzip.compress(JSONL)),
    "text in UTF-16LE, not in UTF-8;": "\ufeff".encode("utf-16-le") + JSONL.decode().encode("utf-16-le"),
    "text in UTF-16BE, not in UTF-8;": JSONL.decode().encode("utf-16-be"),
    "text in UTF-32LE, not in UTF-8;": JSONL.decode().encode("utf-32-le"),
    "text in UTF-16LE, not in UTF-8 within one of bzip2;": bz2.compress(JSONL.decode().encode("utf-16-le")),
    "text in UTF-16LE, not in UTF-8; convert it: iconv": "".join(
        json.dumps({"text": f"строка {i} этого текста"}, ensure_ascii=False) + "\n" for i in range(99)
    ).encode("utf-16-le"),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("policy", ["error", "replace"])
@pytest.mark.parametrize("kind", ["jsonl", "text", "directory"])
def test_what_is_no_text_is_named(tmp_path: Path, what: str, policy: str, kind: str) -> None:
    """Whether or not wrong bytes are to be replaced: that is never the cure."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(OTHERS[what])
    with pytest.raises(UserError, match=f"a.jsonl'.*is (no text but )?{what}") as caught:
        read(path, kind=kind, bad_utf8=policy)
    assert "bad_utf8" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "line", ["строка этого текста", "这是一个很长的句子,里面没有空格" * 9, "日本語の文章です。" * 9]
)
def test_other_scripts_without_a_mark(tmp_path: Path, encoding: str, line: str) -> None:
    """All bytes of Cyrillic are letters of ASCII, so that it passes as UTF-8, with zeros at blanks and line ends."""
    (tmp_path / "a.txt").write_bytes(f"{line}\n".encode(encoding) * 200)
    with pytest.raises(UserError, match=f"is text in {encoding.upper().replace('-', '').replace('UTF', 'UTF-')}"):
        read(tmp_path / "a.txt", kind="text")


@pytest.mark.parametrize(
    "content", ["naïve café\n".encode("latin-1") * 99, "这是\n".encode("gbk") * 99, bytes(range(256)) * 9]
)
def test_other_encodings_of_one_byte_are_not_taken_for_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match="is not UTF-8 text at byte"):
        read(tmp_path / "a.txt", kind="text")


def test_text_with_some_zeros_is_text(tmp_path: Path) -> None:
    body = "a\0 b and more of it, with one zero\0 now and then\0" + "and then no more of them" * 20
    assert read(write_text(tmp_path / "a.txt", [body]), kind="text") == [body]


def test_what_is_left_out_for_its_bytes_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(_zip(b"a"))
    write_text(tmp_path / "b.txt", ["text that is long enough for a sample"])
    source = SourceConfig(kind="text", path=str(tmp_path / "*.txt"), bad_utf8="skip")
    prepared = prepare(make_config(tmp_path, source), workers=1)
    assert (len(documents(prepared)), prepared.sources[0].skipped) == (1, ("a.txt",))


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_document_longer_than_many_units_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    count = 0

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            nonlocal count
            found = super().readinto(buffer)
            count += found or 0
            return found

    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 512)
    monkeypatch.setattr(text_reader, "PIECE_BYTES", 512)
    monkeypatch.setattr(documents_of, "open_bytes", lambda path, _=None: io.BufferedReader(Counted(path), 512))
    body, path = "some words of text " * 5000, tmp_path / "a.txt"
    texts = [json.dumps({"text": text}) + "\n" if kind == "jsonl" else text + "\0" for text in (body, "end")]
    path.write_text("".join(texts))
    settings = {"document_separator": "\0"} if kind == "text" else {}
    source = SourceConfig.model_validate({"kind": kind, "path": str(path), **settings})
    units = plan_units(source, list_files(source), 0.0)
    assert len(units) > 50
    texts = [piece.text for unit in units for part in unit.parts for piece in read_pieces(source, part)]
    assert "".join(texts) == body + "end"
    assert count < 5 * path.stat().st_size, "with each unit reading all that follows it would be 30 times as much"


class _Counted(bytes):
    """Bytes whose slices count what they copy."""

    copied = 0

    def __getitem__(self, key: object) -> bytes:
        part = super().__getitem__(key)  # type: ignore[call-overload]
        type(self).copied += len(part) if isinstance(part, bytes) else 0
        return _Counted(part) if isinstance(part, bytes) else part


class _Text(str):
    def encode(self, *_: object) -> bytes:  # type: ignore[override]
        return _Counted(str(self).encode())


def test_a_long_text_is_cut_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "PIECE_BYTES", 64)
    monkeypatch.setattr(_Counted, "copied", 0)
    text = _Text("some words " * 2000)
    assert "".join(split_text(text)) == text
    assert _Counted.copied < 5 * len(text)
