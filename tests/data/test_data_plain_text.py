"""Text is text, and long text is encoded as if at once, with every kind of tokenizer that the library has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from data_helpers import make_config, stored, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig, TokenizerConfig, configured_vocab_size
from phalanx.data.prepare import prepare
from phalanx.data.sources import input_files, text_reader
from phalanx.data.sources.text_reader import cut_after
from phalanx.data.tokenizers.tokenizer import WHITE, Cuts, LibraryTokenizer

LETTERS = "abcdeu nk<>/s.|\n漢é▁"
NAMES = ("<unk>", "</s>", "<|user|>")
WORDS = ("ab", "abc", "<s", "de")


def _vocabulary(*more: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys((*NAMES, *LETTERS, *WORDS, *more)))}


def _unigram(**about: Any) -> Tokenizer:
    pieces = [(name, 0.0 if name in NAMES else -(len(name) ** 0.5)) for name in _vocabulary("▁ab", "▁<")]
    return Tokenizer(models.Unigram(pieces, unk_id=0, **about))


def _bpe(*more: str, **about: Any) -> Tokenizer:
    pairs = [("a", "b"), ("ab", "c"), ("<", "s"), ("d", "e")]
    return Tokenizer(models.BPE(_vocabulary(*more), pairs, unk_token="<unk>", **about))


def _made_by_merges() -> Tokenizer:
    """Such as are trained on text with the names in it."""
    pairs = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a"), ("a", "b")]
    return Tokenizer(models.BPE(_vocabulary("</", "s>", "</s>a"), pairs, unk_token="<unk>"))


def _piped(made: Tokenizer, normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None) -> Tokenizer:
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(["</s>", AddedToken("<|user|>", normalized=False)])
    return made


def _llama() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "unigram, metaspace": lambda: _piped(_unigram(), None, pre_tokenizers.Metaspace()),
    "unigram, t5": lambda: _piped(
        _unigram(), None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ),
    "unigram, no words": lambda: _piped(_unigram()),
    "unigram, first": lambda: _piped(_unigram(), None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "bpe, llama 2": lambda: _piped(_bpe(), _llama()),
    "bpe, metaspace first": lambda: _piped(_bpe(), None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "bpe, whole words": lambda: _piped(_bpe(ignore_merges=True), None, pre_tokenizers.WhitespaceSplit()),
    "bpe, by merges": lambda: _piped(_made_by_merges(), None, pre_tokenizers.WhitespaceSplit()),
    "bpe, gpt 2": lambda: _piped(
        Tokenizer(models.BPE(_byte_level(), [("a", "b"), ("Ġ", "a")])),
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    ),
    "bpe, prefix space": lambda: _piped(
        Tokenizer(models.BPE(_byte_level(), [("a", "b"), ("Ġ", "a")])), None, pre_tokenizers.ByteLevel()
    ),
    "word level": lambda: _piped(
        Tokenizer(models.WordLevel(_vocabulary(), unk_token="<unk>")), None, pre_tokenizers.WhitespaceSplit()
    ),
    "word piece": lambda: _piped(
        Tokenizer(models.WordPiece(_vocabulary("##a", "##b", "##c"), unk_token="<unk>", max_input_chars_per_word=9)),
        normalizers.BertNormalizer(),
        pre_tokenizers.WhitespaceSplit(),
    ),
}


def _byte_level() -> dict[str, int]:
    return {
        name: index for index, name in enumerate([*NAMES, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"])
    }


@cache
def _both(kind: str) -> tuple[LibraryTokenizer, Tokenizer]:
    made = KINDS[kind]()
    return LibraryTokenizer(made.to_str()), made


texts = st.lists(st.one_of(st.sampled_from([*NAMES, *WORDS]), st.text(alphabet=LETTERS, max_size=6))).map("".join)


@pytest.mark.parametrize("kind", KINDS)
class TestNames:
    def test_text_never_becomes_a_special_token(self, kind: str) -> None:
        ours, theirs = _both(kind)
        special = {theirs.token_to_id(name) for name in ("</s>", "<|user|>")}
        assert ours.end_of_text in special
        for text in ("</s>", "ab</s>ab", " </s> <|user|> ", "a <|user|></s>\n</s>"):
            assert special.isdisjoint(ours.encode(text)), text
            assert ours.encode_batch([text])[0].tolist() == ours.encode(text)

    @given(text=st.text(alphabet=LETTERS.replace(">", ""), max_size=30))
    def test_other_text_has_the_ids_of_the_library(self, kind: str, text: str) -> None:
        ours, theirs = _both(kind)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_the_end_of_text_is_no_text_where_the_file_does_not_call_it_special() -> None:
    made = _bpe()
    made.add_tokens(["</s>", "abc ab"])
    ours = LibraryTokenizer(made.to_str())
    assert ours.end_of_text not in ours.encode("ab</s>")
    assert ours.encode("abc ab") == [made.token_to_id("abc ab")], "other added tokens stay"
    assert ours.vocab_size == made.get_vocab_size()


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer(models.BPE()).to_str(), encoding="utf-8")
    with pytest.raises(UserError, match=r"has no token in it; check tokenizer\.path"):
        LibraryTokenizer(path.read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=r"has no token in it; give a tokenizer\.json"):
        configured_vocab_size(TokenizerConfig(kind="file", path=str(path)))


def _long(kind: str) -> str:
    """Words, lines, white space in a row, a paragraph of Chinese, and words without an end."""
    chosen = random.Random(kind)
    parts = [*WORDS, "a", "nk.", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "é", "</s>", "1"]
    parts += ["漢漢.\n漢", "漢\u3000\n漢", "k\n\u3000a"]
    return "".join(chosen.choices(parts, k=200)) + "abcde" * 60 + " \nab" + "漢" * 200


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "PIECE_BYTES", 64)
    monkeypatch.setattr(text_reader, "SEARCH_BYTES", 40)
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 900)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_has_the_tokens_of_the_whole(kind: str, tmp_path: Path) -> None:
    """As a file, which is cut into units of work, too, between separators, and as a record with its prompt."""
    ours, body = _both(kind)[0], _long(kind)
    (tmp_path / "tokenizer.json").write_text(ours.json, encoding="utf-8")
    (tmp_path / "a.txt").write_text(body + "\0" + body[::-1], encoding="utf-8", newline="")
    write_jsonl(tmp_path / "a.jsonl", [{"q": body, "text": body[::-1]}] * 2)
    end = ours.end_of_text
    for source, parts in (
        (SourceConfig(kind="text", path=str(tmp_path / "a.txt")), [[body + "\0" + body[::-1]]]),
        (SourceConfig(kind="text", path=str(tmp_path / "a.txt"), document_separator="\0"), [[body], [body[::-1]]]),
        (SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"), prompt_field="q"), [[body, body[::-1]]] * 2),
    ):
        tokenizer = TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"))
        prepared = prepare(make_config(tmp_path, source, tokenizer=tokenizer), workers=1)
        expected = [[end, *itertools.chain.from_iterable(map(ours.encode, part))] for part in parts]
        assert stored(prepared).tolist() == list(itertools.chain.from_iterable(expected))


CUTS = {
    "unigram, metaspace": Cuts(before=" "),
    "unigram, t5": Cuts(before=WHITE, after_line=True),
    "unigram, no words": Cuts(),
    "unigram, first": Cuts(before=" "),
    "bpe, llama 2": Cuts(),
    "bpe, metaspace first": Cuts(),
    "bpe, whole words": Cuts(before=WHITE, after_line=True),
    "bpe, by merges": Cuts(before=WHITE, after_line=True),
    "bpe, gpt 2": Cuts(before=WHITE, after_line=True),
    "bpe, prefix space": Cuts(before=" "),
    "word level": Cuts(before=WHITE, after_line=True),
    "word piece": Cuts(before=WHITE, after_line=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_tokenizer_lets_text_be_cut(kind: str) -> None:
    assert _both(kind)[0].cuts == CUTS[kind]


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("words", "added", "expected"),
    [
        (pre_tokenizers.Split(Regex(GPT4), "isolated"), [], Cuts(before=WHITE, after_line=True)),
        (pre_tokenizers.Split(Regex(r"\S+\s*"), "isolated"), [], Cuts(after_line=True)),
        (pre_tokenizers.Split(Regex(r"\w+( \w+)*"), "isolated"), [], Cuts(before="\t\r\n")),
        (pre_tokenizers.FixedLength(4), [], Cuts()),
        (pre_tokenizers.Whitespace(), [AddedToken("ab cd")], Cuts()),
        (pre_tokenizers.Whitespace(), [AddedToken("ab", rstrip=True)], Cuts()),
        (pre_tokenizers.Whitespace(), [AddedToken("ab", lstrip=True)], Cuts(before=WHITE)),
        (pre_tokenizers.Whitespace(), [AddedToken("\nab")], Cuts(before=WHITE)),
        (pre_tokenizers.Whitespace(), [AddedToken("  ")], Cuts(before=WHITE, after_line=True)),
    ],
)
def test_patterns_and_added_tokens_that_reach_over_white_space(words: Any, added: list[Any], expected: Cuts) -> None:
    made = _piped(_bpe(), None, words)
    made.add_tokens(added)
    assert LibraryTokenizer(made.to_str()).cuts == expected


def test_the_next_cut_is_found_wherever_the_search_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "SEARCH_BYTES", 16)
    raw = ("ab cd.\n漢漢\u3000\n漢" + "漢" * 30 + "z\u00a0\nend of\n").encode()
    (tmp_path / "a.txt").write_bytes(raw)
    good = sorted({raw.index(b" cd"), raw.index("漢".encode()), raw.index(b" of"), len(raw) - 1, len(raw)})
    for place in range(len(raw) + 1):
        assert cut_after(str(tmp_path / "a.txt"), place, words=True) == next(cut for cut in good if cut >= place)
