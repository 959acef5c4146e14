import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import lines, make_config, stored, write_jsonl, write_text
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig, configured_vocab_size
from phalanx.data.prepare import open_prepared, prepare
from phalanx.data.sources import text_reader
from phalanx.data.sources.text_reader import split_text
from phalanx.data.tokenizers import bpe_training
from phalanx.data.tokenizers.spec import open_saved_tokenizer, save_tokenizer
from phalanx.data.tokenizers.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    LibraryTokenizer,
)
from phalanx.ipc.processes import start_helper

GPT2 = Path(__file__).parents[2] / ".." / "shared" / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
SAMPLE = "def f(x):\n    return 'naïve' + \"漢字 🎉\"  # <|endoftext|>\n\n\n\tif x:\n        pass\n"


@pytest.fixture(scope="module")
def gpt2() -> LibraryTokenizer:
    if not GPT2.exists():
        pytest.skip(f"{GPT2} is not there")
    return LibraryTokenizer(GPT2.read_text(encoding="utf-8"))


def bpe_config(folder: Path, **settings: object) -> DataConfig:
    path = write_text(folder / "corpus.txt", lines(300))
    source = SourceConfig(kind="text", path=str(path), document_separator="\n")
    return make_config(folder, source, tokenizer=TokenizerConfig(kind="bpe", vocab_size=300), **settings)


@given(st.text())
def test_bytes_round_trip(sample: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(sample)
    assert tokenizer.decode([256, *ids, 256]) == sample
    assert tokenizer.token_bytes()[ids].sum() == len(sample.encode())
    assert tokenizer.encode_batch([sample])[0].tolist() == ids


@given(st.text(alphabet="abcé漢🎉 \n", min_size=1))
def test_characters_round_trip(sample: str) -> None:
    tokenizer = CharTokenizer("abcé漢🎉 \n")
    ids = tokenizer.encode(sample)
    assert len(ids) == len(sample)
    assert tokenizer.decode([*ids, 8]) == sample
    assert tokenizer.token_bytes()[ids].sum() == len(sample.encode())


def test_an_unknown_character_is_refused() -> None:
    with pytest.raises(UserError, match="'x' is none of the tokenizer's 2 characters"):
        CharTokenizer("ab").encode("abx")


def test_characters_are_those_of_all_the_text_as_nanogpt_counts_them(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", ["First Citizen:\nBefore we proceed any further, zß"])
    tokenizer = TokenizerConfig(kind="chars", end_of_text=False)
    source = SourceConfig(kind="text", path=str(path))
    config = make_config(tmp_path, source, tokenizer=tokenizer, validation_split="tail", validation_fraction=0.1)
    prepared = prepare(config, workers=1)
    assert prepared.tokenizer.decode(range(prepared.vocab_size)) == "".join(sorted(set(path.read_text())))
    assert prepared.tokenizer.decode(stored(prepared, "train").tolist()) == path.read_text()[: len(stored(prepared))]


class TestTrained:
    def test_round_trip_and_exact_bytes(self, tmp_path: Path) -> None:
        tokenizer = prepare(bpe_config(tmp_path), workers=1).tokenizer
        assert tokenizer.vocab_size == 300
        ids = tokenizer.encode(SAMPLE)
        assert tokenizer.decode(ids) == SAMPLE
        assert tokenizer.end_of_text not in ids
        assert tokenizer.token_bytes()[ids].sum() == len(SAMPLE.encode())
        assert tokenizer.token_bytes()[tokenizer.end_of_text] == 0

    def test_training_is_the_same_in_another_process(self, tmp_path: Path) -> None:
        config = bpe_config(tmp_path)
        code = "import sys; from phalanx.data.config import DataConfig; from phalanx.data.prepare import prepare\n"
        code += "print(prepare(DataConfig.model_validate_json(sys.argv[1]), workers=1).fingerprint)"
        found = set()
        for number in ("1", "2"):
            moved = config.model_dump(exclude_unset=True) | {"folder": str(tmp_path / number)}
            argument = DataConfig.model_validate(moved).model_dump_json(exclude_unset=True)
            environment = {**os.environ, "PYTHONHASHSEED": number, "RAYON_NUM_THREADS": number}
            command = [sys.executable, "-c", code, argument]
            found.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        assert len(found) == 1

    def test_much_text_is_trained_on_in_a_process_of_its_own_with_the_same_result(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = bpe_config(tmp_path)
        here = prepare(config, workers=1).fingerprint
        monkeypatch.setattr(bpe_training, "LITTLE_BYTES", 0)
        monkeypatch.setattr(bpe_training, "train_bpe", None)
        there = config.model_copy(update={"folder": str(tmp_path / "there")})
        assert prepare(there, workers=1).fingerprint == here

    def test_its_errors_arrive_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bpe_training, "LITTLE_BYTES", 0)
        config = bpe_config(tmp_path)
        write_text(tmp_path / "corpus.txt", lines(300)).write_bytes(b"bad \xff text")
        with pytest.raises(UserError, match=r"is not UTF-8 text at byte 4 \(0xff\); convert the file, or set bad_utf8"):
            prepare(config, workers=1)

    def test_an_end_without_an_answer_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bpe_training, "LITTLE_BYTES", 0)
        monkeypatch.setattr(bpe_training, "start_helper", lambda _name: start_helper("phalanx.no_such_module"))
        with pytest.raises(UserError, match=r"ended with code \d+; look above"):
            prepare(bpe_config(tmp_path), workers=1)

    def test_held_out_text_is_not_trained_on(self, tmp_path: Path) -> None:
        records = [{"text": "aa bb cc dd " * 20} for _ in range(60)]
        records += [{"text": "xyzzyxyzzy " * 400}]
        path = write_jsonl(tmp_path / "a.jsonl", records)
        held = write_jsonl(tmp_path / "v.jsonl", records[-1:])
        tokenizer = TokenizerConfig(kind="bpe", vocab_size=280)
        validation = (SourceConfig(kind="jsonl", path=str(held)),)
        train = SourceConfig(kind="jsonl", path=str(write_jsonl(path, records[:-1])))
        config = DataConfig(
            sequence_length=16,
            sources=(train,),
            validation_sources=validation,
            tokenizer=tokenizer,
            folder=str(tmp_path),
        )
        prepared = prepare(config, workers=1)
        assert len(prepared.tokenizer.encode("xyzzy")) == 5
        assert prepared.num_tokens("validation") > 4000

    def test_it_is_made_again_only_when_the_text_changed(self, tmp_path: Path) -> None:
        config = bpe_config(tmp_path)
        first = prepare(config, workers=1)
        file = next((tmp_path / "prepared").glob("tokenizer-*/tokenizer.json"))
        stamp = file.stat().st_mtime_ns
        assert prepare(config, workers=1).fingerprint == first.fingerprint
        assert file.stat().st_mtime_ns == stamp
        write_text(tmp_path / "corpus.txt", [line.upper() for line in lines(300)])
        again = prepare(config, workers=1)
        assert file.stat().st_mtime_ns != stamp
        assert again.fingerprint != first.fingerprint


class TestGpt2:
    def test_known_ids(self, gpt2: LibraryTokenizer) -> None:
        assert gpt2.encode("Hello world") == [15496, 995]
        assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)

    def test_special_tokens_in_text_are_text(self, gpt2: LibraryTokenizer) -> None:
        ids = gpt2.encode(SAMPLE)
        assert 50256 not in ids
        assert gpt2.decode(ids) == SAMPLE
        assert gpt2.token_bytes()[ids].sum() == len(SAMPLE.encode())

    def test_cutting_into_pieces_does_not_change_a_token(
        self, gpt2: LibraryTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text_reader, "PIECE_BYTES", 3000)
        for module in (os, subprocess):
            body = Path(str(module.__file__)).read_text()[:60_000]
            pieces = list(split_text(body))
            assert len(pieces) > 10
            assert np.concatenate(gpt2.encode_batch(pieces)).tolist() == gpt2.encode(body)

    def test_a_saved_tokenizer_opens_without_the_original(self, gpt2: LibraryTokenizer, tmp_path: Path) -> None:
        copy = tmp_path / "tokenizer.json"
        copy.write_text(gpt2.json)
        config = DataConfig(tokenizer=TokenizerConfig(kind="file", path=str(tmp_path)))
        save_tokenizer(config, tmp_path / "run" / "tokenizer")
        copy.unlink()
        assert open_saved_tokenizer(tmp_path / "run" / "tokenizer").encode("Hello world") == [15496, 995]

    def test_the_vocabulary_is_known_before_preparing(self, gpt2: LibraryTokenizer) -> None:
        assert configured_vocab_size(TokenizerConfig(kind="file", path=str(GPT2))) == 50257


def test_sizes_of_vocabularies() -> None:
    assert configured_vocab_size(TokenizerConfig(kind="bytes")) == 257
    assert configured_vocab_size(TokenizerConfig(kind="bytes", end_of_text=False)) == 256
    assert configured_vocab_size(TokenizerConfig(kind="none", vocab_size=77)) == 77
    assert configured_vocab_size(TokenizerConfig(vocab_size=5000)) == 5000
    with pytest.raises(UserError, match="its vocabulary is made of the sources"):
        configured_vocab_size(TokenizerConfig(kind="chars"))


def test_every_character_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Line ends of other systems too, in the tokenizer that is kept and in its copy in a run folder."""
    path = tmp_path / "a.txt"
    text = "one\r\ntwo\rthree\x85\u2028\x0b four \ufeff and enough"
    path.write_bytes(("\ufeff" + text).encode())
    config = make_config(
        tmp_path, SourceConfig(kind="text", path=str(path)), tokenizer=TokenizerConfig(kind="chars", end_of_text=False)
    )
    prepared = prepare(config, workers=1)
    assert prepared.tokenizer.decode(stored(prepared).tolist()) == text
    save_tokenizer(config, tmp_path / "run")
    copy = open_saved_tokenizer(tmp_path / "run")
    assert copy.decode(copy.encode(text)) == text


def test_every_kind_of_tokenizer_can_be_saved(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", lines(100))
    source = SourceConfig(kind="text", path=str(path))
    for kind in ("bytes", "chars", "bpe"):
        config = make_config(tmp_path, source, tokenizer=TokenizerConfig(kind=kind, vocab_size=260))
        original = prepare(config, workers=1).tokenizer
        save_tokenizer(config, tmp_path / kind)
        copy = open_saved_tokenizer(tmp_path / kind)
        assert copy.encode("line 3") == original.encode("line 3")
        assert copy.vocab_size == original.vocab_size
    with pytest.raises(UserError, match="holds no readable tokenizer"):
        open_saved_tokenizer(tmp_path / "nowhere")


def test_bad_tokenizer_files(tmp_path: Path) -> None:
    source = SourceConfig(kind="text", path=str(write_text(tmp_path / "a.txt", lines(10))))

    def run(**settings: object) -> None:
        prepare(make_config(tmp_path, source, tokenizer=TokenizerConfig(kind="file", **settings)), workers=1)

    with pytest.raises(UserError, match=r"cannot be read \(No such file.*check the path"):
        run(path=str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"is no tokenizer.json"):
        run(path=str(tmp_path / "bad.json"))
    good = prepare(bpe_config(tmp_path), workers=1).tokenizer
    assert isinstance(good, LibraryTokenizer)
    (tmp_path / "marked.json").write_text(good.json, encoding="utf-8-sig")
    assert configured_vocab_size(TokenizerConfig(kind="file", path=str(tmp_path / "marked.json"))) == good.vocab_size
    run(path=str(tmp_path / "marked.json"))
    (tmp_path / "wide.json").write_text(good.json, encoding="utf-16")
    with pytest.raises(UserError, match=r"wide.json'.*is no tokenizer.json \(it is not UTF-8 text\); save it as UTF-8"):
        run(path=str(tmp_path / "wide.json"))
    if GPT2.exists():
        with pytest.raises(UserError, match="has no such token"):
            run(path=str(GPT2), end_of_text_token="<nothing>")


def test_ids_without_text_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"token ids have no text.*kind = 'file'"):
        IdTokenizer(10).decode([1])


def test_opening_before_preparing(tmp_path: Path) -> None:
    config = bpe_config(tmp_path)
    with pytest.raises(UserError, match=r"has not been made yet.*phalanx data prepare"):
        open_prepared(config)
    prepare(config, workers=1)
    assert open_prepared(config).num_tokens("train") > 0
