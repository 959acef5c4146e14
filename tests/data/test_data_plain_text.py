"""Text is text with every kind of tokenizer that the library has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.core.errors import UserError
from phalanx.data.tokenizers.tokenizer import LibraryTokenizer

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


def test_a_file_without_a_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no token in it; check tokenizer\.path"):
        LibraryTokenizer(Tokenizer(models.BPE()).to_str())
