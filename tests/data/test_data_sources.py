import gzip
import json
import os
import random
import sys
import sysconfig
import uuid
from pathlib import Path

import numpy as np
import pytest
from data_helpers import documents, lines, make_config, stored, write_jsonl, write_text

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig, TokenizerConfig
from phalanx.data.prepare import prepare
from phalanx.data.sources import input_files, text_reader
from phalanx.data.sources.input_files import WorkUnit, list_files, plan_units
from phalanx.data.sources.text_reader import split_text


def run(folder: Path, source: SourceConfig, **settings: object) -> list[str]:
    return documents(prepare(make_config(folder, source, **settings), workers=1))


@pytest.fixture
def tiny_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units, pieces and searches so small that a few KiB are cut in many places."""
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 512)
    monkeypatch.setattr(text_reader, "PIECE_BYTES", 64)
    monkeypatch.setattr(text_reader, "SEARCH_BYTES", 40)


@pytest.mark.usefixtures("tiny_units")
class TestCutting:
    def test_a_text_file_is_one_document_however_often_it_is_cut(self, tmp_path: Path) -> None:
        path = write_text(tmp_path / "a.txt", lines(200))
        source = SourceConfig(kind="text", path=str(path))
        assert len(plan_units(source, list_files(source), 0.0)) > 5
        assert run(tmp_path, source) == [path.read_text()]

    @pytest.mark.parametrize("separator", ["\n", "<|end|>", "aa", "\n\n", "漢"])
    def test_separated_documents(self, tmp_path: Path, separator: str) -> None:
        wanted = [line * (1 + i % 7) for i, line in enumerate(lines(80))]
        path = write_text(tmp_path / "a.txt", wanted, separator)
        source = SourceConfig(kind="text", path=str(path), document_separator=separator)
        if separator != "漢":
            assert run(tmp_path, source) == wanted
        else:
            assert run(tmp_path, source) == [d for d in separator.join(wanted).split(separator) if d]

    def test_a_separator_that_overlaps_itself_is_found_from_the_start(self, tmp_path: Path) -> None:
        body = "x" + "a" * 3001 + "y" + "aa" * 400
        path = write_text(tmp_path / "a.txt", [body])
        source = SourceConfig(kind="text", path=str(path), document_separator="aa")
        assert run(tmp_path, source, sequence_length=2) == [d for d in body.split("aa") if d]

    def test_json_lines(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": line} for line in lines(150)])
        assert run(tmp_path, SourceConfig(kind="jsonl", path=str(path))) == lines(150)

    @pytest.mark.parametrize("kind", ["jsonl", "text", "directory", "separated", "packed"])
    def test_a_byte_order_mark_is_no_part_of_the_text(self, tmp_path: Path, kind: str) -> None:
        """Within a text it is a character like others."""
        path = tmp_path / ("a.txt.gz" if kind == "packed" else "a.txt")
        texts = lines(100) if kind in ("jsonl", "separated") else ["\n".join(lines(100)) + "\ufeff end"]
        content = "\ufeff" + "\n".join(json.dumps({"text": text}) if kind == "jsonl" else text for text in texts)
        path.write_bytes(gzip.compress(content.encode()) if kind == "packed" else content.encode())
        settings = {"separated": {"kind": "text", "document_separator": "\n"}, "packed": {"kind": "text"}}
        source = SourceConfig.model_validate({"kind": kind, **settings.get(kind, {}), "path": str(path)})
        assert run(tmp_path, source) == texts

    def test_text_without_a_space_is_cut_between_characters(self, tmp_path: Path) -> None:
        body = "漢字仮名" * 2000
        path = write_text(tmp_path / "a.txt", [body])
        assert run(tmp_path, SourceConfig(kind="text", path=str(path))) == [body]

    def test_pieces_of_a_text_in_memory(self) -> None:
        body = "words and 漢字 " * 500 + "x" * 1000 + "é" * 1000
        pieces = list(split_text(body))
        assert "".join(pieces) == body
        assert max(len(piece.encode()) for piece in pieces) <= 64

    def test_the_tail_of_a_text_is_held_out_to_the_byte(self, tmp_path: Path) -> None:
        body = "".join(chr(97 + i * i % 26) for i in range(5000))
        path = write_text(tmp_path / "a.txt", [body])
        config = make_config(
            tmp_path, SourceConfig(kind="text", path=str(path)), validation_fraction=0.1, validation_split="tail"
        )
        prepared = prepare(config, workers=1)
        assert documents(prepared) == [body[:4500]]
        assert documents(prepared, "validation") == [body[4500:]]


def test_packed_json_lines(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": line} for line in lines(50)])
    first, second = path.read_bytes()[:700], path.read_bytes()[700:]
    compressor = zstandard.ZstdCompressor()
    (tmp_path / "b.jsonl.zst").write_bytes(compressor.compress(first) + compressor.compress(second))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name in ("b.jsonl.zst", "c.jsonl.gz"):
        assert run(tmp_path, SourceConfig(kind="jsonl", path=str(tmp_path / name), field="body")) == lines(50)


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 512)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": lines(100), "n": list(range(100))}), path, row_group_size=10)
    source = SourceConfig(kind="parquet", path=str(path))
    assert len(plan_units(source, list_files(source), 0.0)) > 1
    assert run(tmp_path, source) == lines(100)
    with pytest.raises(UserError, match="row 0: field 'body' is absent; the record has"):
        run(tmp_path, SourceConfig(kind="parquet", path=str(path), field="body"))


def test_a_directory_by_extension_in_order_of_name(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.py", "a.md", "sub/c.py", "d.bin"):
        (folder / name).write_text(f"this is {name}, long enough for a sample")
    (folder / "empty.py").write_text("")
    found = run(tmp_path, SourceConfig(kind="directory", path=str(folder), extensions=(".py", ".md")))
    assert [d.split(",")[0] for d in found] == ["this is a.md", "this is b.py", "this is sub/c.py"]


def test_a_pattern(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b.txt"):
        (tmp_path / name).write_text(f"this is {name}, long enough for a sample")
    found = run(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "a*.txt")))
    assert [d.split(",")[0] for d in found] == ["this is a1.txt", "this is a2.txt"]


def test_the_standard_library_leaves_out_tests_and_installed_packages() -> None:
    listed = list_files(SourceConfig(kind="python-stdlib"))
    names = {file.name for file in listed}
    assert {"os.py", "json/decoder.py"} <= names
    assert not [n for n in names if n.startswith(("test/", "site-packages/")) or "/tests/" in n]
    assert sum(file.size for file in listed) > 5_000_000
    root = Path(sysconfig.get_path("stdlib"))
    assert next(f for f in listed if f.name == "os.py").path == str(root / "os.py")


def test_the_standard_librarys_tests_in_other_encodings_are_left_out_and_counted(tmp_path: Path) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    if not list(root.glob("**/bad*.py")):
        pytest.skip("this interpreter comes without its test packages")
    source = SourceConfig(kind="python-stdlib", include_tests=True)
    assert source.utf8_policy == "skip"
    bad = [f for f in list_files(source) if not _is_utf8(f.path)]
    assert bad
    config = make_config(tmp_path, SourceConfig(kind="directory", path=[f.path for f in bad] + [sys.executable + "x"]))
    with pytest.raises(UserError, match="no file found"):
        prepare(config, workers=1)
    with pytest.raises(UserError, match="is not UTF-8 text at byte"):
        run(tmp_path, SourceConfig(kind="directory", path=[f.path for f in bad]))


def _is_utf8(path: str) -> bool:
    try:
        Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


class TestBadText:
    def test_a_bad_byte_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"x" * 200_000 + b"\xff" + b"y" * 10)
        with pytest.raises(UserError, match=r"a.txt'.*is not UTF-8 text at byte 200000 \(0xff\).*bad_utf8"):
            run(tmp_path, SourceConfig(kind="text", path=str(path)))

    def test_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"some text that is \xff long enough")
        assert run(tmp_path, SourceConfig(kind="text", path=str(path), bad_utf8="replace")) == [
            "some text that is � long enough"
        ]

    def test_left_out(self, tmp_path: Path) -> None:
        for name, content in (("a.txt", b"good text, long enough for one sample"), ("b.txt", b"bad \xff")):
            (tmp_path / name).write_bytes(content)
        config = make_config(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "*.txt"), bad_utf8="skip"))
        prepared = prepare(config, workers=1)
        assert documents(prepared) == ["good text, long enough for one sample"]
        assert (prepared.sources[0].num_skipped, prepared.sources[0].skipped) == (1, ("b.txt",))

    def test_in_json_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "good text, long enough for one sample"}\n{"text": "\xff"}\n')
        with pytest.raises(UserError, match="is not UTF-8 text at byte 60"):
            run(tmp_path, SourceConfig(kind="jsonl", path=str(path)))
        assert len(run(tmp_path, SourceConfig(kind="jsonl", path=str(path), bad_utf8="skip"))) == 1

    def test_a_lone_surrogate_of_json_is_no_text(self, tmp_path: Path) -> None:
        r"""JSON may escape half a character, such as \\ud83d, which no UTF-8 text can have; a whole pair is fine."""
        path = tmp_path / "a.jsonl"
        path.write_text(r"""{"text": "a pair \ud83d\ude00 and text for a sample"}
{"text": "half of one: \ud83d, and more text after it"}
{"other": "half \ud83d", "text": "long enough for one more sample"}
""")
        source = {"kind": "jsonl", "path": str(path)}
        with pytest.raises(UserError, match=r"line 2: field 'text' has half a character \(\\ud83d\).*bad_utf8"):
            run(tmp_path, SourceConfig(**source))
        whole = ["a pair \U0001f600 and text for a sample", "long enough for one more sample"]
        assert run(tmp_path, SourceConfig(**source, bad_utf8="skip")) == whole
        replaced = run(tmp_path, SourceConfig(**source, bad_utf8="replace"))
        assert replaced == [whole[0], "half of one: \ufffd, and more text after it", whole[1]]

    def test_in_parquet(self, tmp_path: Path) -> None:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        raw = pyarrow.array([b"good text", b"bad \xff"], pyarrow.binary()).buffers()
        column = pyarrow.Array.from_buffers(pyarrow.string(), 2, raw)
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"a.parquet'.*from row 0 on cannot be read.*UTF-8|utf-8"):
            run(tmp_path, SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet")))


def _zstd(body: bytes) -> bytes:
    """As the command packs it, with a checksum."""
    packed: bytes = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(body)
    return packed


class TestDamagedFiles:
    """A packed file that was cut off, as a broken download is, or that has wrong bytes in it."""

    @pytest.fixture(params=["gz", "zst"])
    def packed(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        body = "".join(json.dumps({"text": line + " and more of it"}) + "\n" for line in lines(2000)).encode()
        path = tmp_path / f"a.jsonl.{request.param}"
        if request.param == "gz":
            path.write_bytes(gzip.compress(body))
        else:
            path.write_bytes(_zstd(body))
        return path

    def test_a_file_that_was_cut_off_is_named(self, tmp_path: Path, packed: Path) -> None:
        packed.write_bytes(packed.read_bytes()[:-100])
        with pytest.raises(UserError, match=rf"{packed.name}'.*is cut off after \d+ bytes of text.*again"):
            run(tmp_path, SourceConfig(kind="jsonl", path=str(packed)))

    def test_a_file_that_is_not_packed_at_all(self, tmp_path: Path, packed: Path) -> None:
        packed.write_bytes(b"some plain text instead")
        with pytest.raises(UserError, match=rf"{packed.name}'.*cannot be unpacked"):
            run(tmp_path, SourceConfig(kind="jsonl", path=str(packed)))

    def test_what_cannot_be_read_may_be_left_out(self, tmp_path: Path, packed: Path) -> None:
        packed.write_bytes(packed.read_bytes()[:-100])
        source = SourceConfig(kind="jsonl", path=str(packed), bad_utf8="skip")
        prepared = prepare(make_config(tmp_path, source), workers=1)
        found = documents(prepared)
        assert 0 < len(found) < 2000
        assert found == [line + " and more of it" for line in lines(2000)][: len(found)]
        assert prepared.sources[0].num_skipped == 1

    def _left(self, tmp_path: Path, packed: Path) -> tuple[list[str], tuple[str, ...]]:
        """Documents of a packed file beside a good one, and the names of what was left out."""
        write_jsonl(tmp_path / "b.jsonl", [{"text": "another file, long enough for a sample"}])
        source = SourceConfig(kind="jsonl", path=(str(packed), str(tmp_path / "b.jsonl")), bad_utf8="skip")
        prepared = prepare(make_config(tmp_path / uuid.uuid4().hex, source), workers=1)
        return documents(prepared)[:-1], prepared.sources[0].skipped

    def test_nothing_of_a_member_whose_check_fails_is_used(self, tmp_path: Path, packed: Path) -> None:
        """Text that was unpacked from a flipped bit on may be anything; only the check at its end tells."""
        good = [line + " and more of it" for line in lines(2000)]
        content, chance = packed.read_bytes(), random.Random(1)
        for _ in range(20):
            harmed = bytearray(content)
            harmed[chance.randrange(20, len(harmed))] ^= 1 << chance.randrange(8)
            packed.write_bytes(harmed)
            found, skipped = self._left(tmp_path, packed)
            assert found == [] and len(skipped) == 1
            with pytest.raises(UserError, match=rf"{packed.name}'.*(cannot be unpacked|is cut off)"):
                run(tmp_path, SourceConfig(kind="jsonl", path=str(packed)))
        packed.write_bytes(content)
        assert self._left(tmp_path, packed) == (good, ())

    @pytest.mark.parametrize("cut", [0, 7])
    def test_members_before_a_damaged_one_are_used(self, tmp_path: Path, packed: Path, cut: int) -> None:
        """A line that ends in the damaged one is not."""
        content = packed.read_bytes()
        first = b'{"text": "a line of the first member"}\n' * 3
        pack = gzip.compress if packed.suffix == ".gz" else _zstd
        damaged = bytearray(pack(first[len(first) - cut :]) + content if cut else content)
        damaged[-len(content) // 2] ^= 16
        packed.write_bytes(pack(first[: len(first) - cut]) + bytes(damaged))
        found, (skipped,) = self._left(tmp_path, packed)
        assert len(found) == 3
        assert skipped.startswith(f"{packed.name}:{len(first)} and all that follows")

    def test_a_tokenizer_cannot_be_made_of_it_either(self, tmp_path: Path, packed: Path) -> None:
        packed.write_bytes(packed.read_bytes()[:-100])
        config = make_config(
            tmp_path,
            SourceConfig(kind="jsonl", path=str(packed)),
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=300),
        )
        with pytest.raises(UserError, match="is cut off after"):
            prepare(config, workers=1)

    def test_a_damaged_parquet_file(self, tmp_path: Path) -> None:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"text": lines(5000)}), path, compression="zstd")
        content = bytearray(path.read_bytes())
        content[100:400] = bytes(300)
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a.parquet'.*from row 0 on cannot be read"):
            run(tmp_path, SourceConfig(kind="parquet", path=str(path)))


class TestBadRecords:
    def refusal(self, folder: Path, line: str, **settings: object) -> str:
        path = folder / "a.jsonl"
        path.write_text(json.dumps({"text": "good text, long enough for one sample"}) + f"\n\n{line}\n")
        with pytest.raises(UserError) as caught:
            run(folder, SourceConfig(kind="jsonl", path=str(path), **settings))
        return str(caught.value)

    def test_the_line_of_an_absent_field_is_named(self, tmp_path: Path) -> None:
        message = self.refusal(tmp_path, '{"body": "x"}')
        assert "line 3: field 'text' is absent; the record has ['body']" in message

    def test_a_field_that_is_no_text(self, tmp_path: Path) -> None:
        assert "line 3: field 'text' is int, no text" in self.refusal(tmp_path, '{"text": 3}')

    def test_no_json(self, tmp_path: Path) -> None:
        assert "line 3: is no JSON" in self.refusal(tmp_path, '{"text": ')
        assert "line 3: is no JSON" in self.refusal(tmp_path, '{"text": ' + "[" * 100_000)

    def test_no_object(self, tmp_path: Path) -> None:
        assert "line 3: is no JSON object" in self.refusal(tmp_path, '["text"]')

    def test_left_out(self, tmp_path: Path) -> None:
        records = [{"text": "good text, long enough for one sample"}, {"text": None}, {}]
        path = write_jsonl(tmp_path / "a.jsonl", records)
        assert len(run(tmp_path, SourceConfig(kind="jsonl", path=str(path), missing_field="skip"))) == 1


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.txt'.*no file found.*check the path"):
        run(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "nowhere.txt")))


def test_a_corpus_without_a_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="is empty: 1 files, none with a byte"):
        run(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "a.txt")))


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"is no regular file.*into a file first"):
        run(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "a.txt")))


def test_a_corpus_shorter_than_a_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(
        UserError, match=r"has 6 tokens to train on, a sample needs 17.*make data.sequence_length smaller"
    ):
        run(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "a.txt")))


def test_the_plan_does_not_depend_on_where_files_lie(tmp_path: Path) -> None:
    plans: list[list[WorkUnit]] = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_text(tmp_path / place / "a.txt", lines(10))
        source = SourceConfig(kind="text", path=str(tmp_path / place))
        plans.append(plan_units(source, list_files(source), 0.0))
    assert [u.signature for u in plans[0]] == [u.signature for u in plans[1]]


def test_prompts_are_masked(tmp_path: Path) -> None:
    records = [{"q": f"question {i}? ", "a": f"answer {i}."} for i in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    source = SourceConfig(kind="jsonl", path=str(path), field="a", prompt_field="q")
    prepared = prepare(make_config(tmp_path, source), workers=1)
    assert documents(prepared) == [r["q"] + r["a"] for r in records]
    shard = prepared.sources[0].splits["train"].shards[0]
    assert shard.mask is not None
    tokens, mask = stored(prepared), np.load(shard.mask)
    trained = bytes(tokens[(mask == 1) & (tokens < 256)].astype(np.uint8).tolist()).decode()
    assert trained == "".join(r["a"] for r in records)
    assert (mask[tokens == 256] == 1).all()
