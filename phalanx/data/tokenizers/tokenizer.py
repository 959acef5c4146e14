"""Text to token ids and back, behind one protocol."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from phalanx.core.errors import UserError

IntArray = NDArray[Any]
END_OF_TEXT = "<|endoftext|>"
_USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WHITE = " \t\r\n"
_TRIED = ("a", "1", ".", " ", "\n")  # what patterns of words tell apart
_NO_TEXT = "\0\uffff"  # U+FFFF is no character


@dataclass(frozen=True)
class Cuts:
    """Where a text can be cut, so that the tokens of its parts put together are those of the whole.

    Attributes:
        anywhere: between any two characters.
        before: behind an ASCII letter or digit, before one of these characters of white space.
        after_line: behind a line's end that has no other white space beside it.
    """

    anywhere: bool = False
    before: str = ""
    after_line: bool = False

    @property
    def at_all_words(self) -> bool:
        """Whether that is so before all of `WHITE`, and behind lines."""
        return self.anywhere or (set(WHITE) <= set(self.before) and self.after_line)

    def fit(self, left: str, right: str) -> bool:
        """Whether a text can be cut into `left` and `right`."""
        if self.anywhere or not left or not right:
            return True
        if right[0].isspace():
            return right[0] in self.before and left[-1].isascii() and left[-1].isalnum()
        return self.after_line and left[-1] == "\n" and bool(left[-2:-1].strip())


class Tokenizer(Protocol):
    """What preparing, training and sampling need of a tokenizer.

    `end_of_text` is written before every document, so it both ends a document (as a target) and begins the next (as an
    input); a prompt starts with it too. None where there is no such token.
    """

    vocab_size: int
    end_of_text: int | None

    @property
    def cuts(self) -> Cuts:
        """Where a text can be cut into parts."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. The names of special tokens in it are taken as plain text."""

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Token ids of several texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, special tokens become nothing."""

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, (V,); 0 for special tokens. Their sum over a text is its length."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; 256 is end-of-text when there is one."""

    cuts = Cuts(anywhere=True)

    def __init__(self, *, end_of_text: bool = True) -> None:
        self.vocab_size = 257 if end_of_text else 256
        self.end_of_text = 256 if end_of_text else None

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes; end-of-text becomes nothing."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self) -> NDArray[np.int64]:
        """1 for each byte, 0 for end-of-text."""
        return (np.arange(self.vocab_size) < 256).astype(np.int64)


class CharTokenizer:
    """One id per character of `alphabet` (ascending code points), then end-of-text when there is one."""

    cuts = Cuts(anywhere=True)

    def __init__(self, alphabet: str, *, end_of_text: bool = True) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.end_of_text = len(self.alphabet) if end_of_text else None
        self.vocab_size = len(self.alphabet) + end_of_text
        self._points = _code_points(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One id per character; UserError: one is not in the alphabet."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """One id per character of each text; see `encode`."""
        points = [_code_points(text) for text in texts]
        every = np.concatenate([np.empty(0, np.uint32), *points])
        ids = np.searchsorted(self._points, every)
        unknown = every[self._points[np.minimum(ids, len(self._points) - 1)] != every]
        if len(unknown):
            raise UserError(
                f"{chr(unknown[0])!r} is none of the tokenizer's {len(self.alphabet)} characters",
                cure="leave it out, or use tokenizer.kind = 'bytes' or 'bpe', which know every text",
            )
        return np.split(ids, np.cumsum([len(p) for p in points])[:-1]) if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of `ids`; end-of-text becomes nothing."""
        return "".join(self.alphabet[i] for i in ids if i < len(self.alphabet))

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each character, 0 for end-of-text."""
        sizes = [len(c.encode()) for c in self.alphabet] + [0] * (self.end_of_text is not None)
        return np.array(sizes, np.int64)


class LibraryTokenizer:
    """A ``tokenizer.json`` of the package `tokenizers`, with the end-of-text token of that name (empty: the first of
    the usual names that it has). UserError: the content cannot be read, or has no such token."""

    def __init__(self, text: str, *, end_of_text: str = "") -> None:
        text = text.removeprefix("\ufeff")  # a byte order mark
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception
            raise UserError(f"is no tokenizer.json ({error})", cure="check tokenizer.path", field="tokenizer") from None
        self.json = text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("has no token in it", cure="check tokenizer.path", field="tokenizer")
        self.vocab_size = max(vocabulary.values()) + 1
        ids = [self._tokenizer.token_to_id(name) for name in ([end_of_text] if end_of_text else _USUAL_ENDS)]
        self.end_of_text: int | None = next((i for i in ids if i is not None), None)
        if end_of_text and self.end_of_text is None:
            raise UserError(
                "the tokenizer has no such token",
                cure="name one of its special tokens",
                field="tokenizer.end_of_text_token",
                value=end_of_text,
            )
        end = None if self.end_of_text is None else self._tokenizer.id_to_token(self.end_of_text)
        self._encoder = self._tokenizer
        if (hidden := _without_names(self._tree(), end)) is not None:
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(hidden))
        self._encoder.encode_special_tokens = True

    @cached_property
    def cuts(self) -> Cuts:
        """Found by trying: what comes before a model cuts short texts around such a place, and longer ones alike."""
        return _find_cuts(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any that the file's template would add."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Ids of each text."""
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each id, from the token's own text.

        Exact for byte-level BPE (GPT-2, Llama 3, Qwen and those trained here). For SentencePiece-like files, a leading
        blank that the normaliser adds to a text is counted. Text that a normaliser changes is counted as changed.

        Raises:
            UserError: another kind of tokenizer (WordPiece, for one), whose tokens do not say which bytes they are.
        """
        sizes = np.zeros(self.vocab_size, np.int64)
        measure = _measure(self._tree())
        for token, index in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[index] = measure(token)
        for index, added in self._tokenizer.get_added_tokens_decoder().items():
            sizes[index] = 0 if added.special else len(added.content.encode())
        return sizes

    def _tree(self) -> dict[str, Any]:
        """The ``tokenizer.json`` as the library writes it, but for files that say what they are themselves."""
        tree: dict[str, Any] = json.loads(self.json)
        return tree if "type" in tree["model"] else dict(json.loads(self._tokenizer.to_str()))


class IdTokenizer:
    """For token files alone: ids below `vocab_size`, without text."""

    cuts = Cuts(anywhere=True)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end_of_text: int | None = None

    def encode(self, text: str) -> list[int]:
        """Not possible; raises UserError."""
        raise self._refusal()

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Not possible; raises UserError."""
        raise self._refusal()

    def decode(self, ids: Sequence[int]) -> str:
        """Not possible; raises UserError."""
        raise self._refusal()

    def token_bytes(self) -> NDArray[np.int64]:
        """Not possible; raises UserError."""
        raise self._refusal()

    def _refusal(self) -> UserError:
        cure = "give the tokenizer that the token files were made with: kind = 'file' and its path"
        return UserError("token ids have no text", cure=cure, field="tokenizer.kind", value="none")


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _find_cuts(tokenizer: tokenizers.Tokenizer) -> Cuts:
    """Where the words of two parts, which a model takes one by one, are those of the whole text.

    A prefix that is added to a text, words that reach over white space, and white space that is stripped show here.
    """
    words, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    if words is None or any(token.rstrip or re.search(r"\S\s", token.content) for token in added):
        return Cuts()

    @cache
    def cut(text: str) -> list[str]:
        plain = text if normalizer is None else normalizer.normalize_str(text)
        return [word for word, _ in words.pre_tokenize_str(plain)]

    def fit(ends: Sequence[str], begins: Sequence[str]) -> bool:
        lefts = [more + end for more in ("", *_TRIED) for end in ends]
        rights = [begin + more for begin in begins for more in ("", *_TRIED, *pairs)]
        return all(cut(left + right) == cut(left) + cut(right) for left in lefts for right in rights)

    pairs = ["".join(pair) for pair in itertools.product(_TRIED, repeat=2)]
    before = "".join(space for space in WHITE if fit(("a", "A", "1"), (space,)))
    if any(token.lstrip or re.search(r"\n\S", token.content) for token in added):
        return Cuts(before=before)
    return Cuts(before=before, after_line=fit(("a\n", "A\n", "1\n", ".\n"), ("a", "A", "1", ".")))


def _without_names(tree: dict[str, Any], end_of_text: str | None) -> dict[str, Any] | None:
    """A ``tokenizer.json`` of the same ids that takes names of special tokens for text; None: `tree` does so already.

    The library's `encode_special_tokens` only keeps added tokens from being looked for. A model finds those that are in
    its vocabulary all the same: Unigram everywhere, others as whole words, BPE where merges make them. So special
    tokens, the end of text and the unknown token get names here that no text has.

    Args:
        tree: of a tokenizer that could be opened; it is changed.
    """
    model, added = tree["model"], tree.get("added_tokens") or []
    special = {token["content"] for token in added if token["special"]}
    unknown = model.get("unk_token")
    if model["type"] == "Unigram" and model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    names = (special | {end_of_text, unknown}) - {None}
    if model["type"] == "BPE":
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        kept = [pair for pair in pairs if "".join(pair) not in names and names.isdisjoint(pair)]
        is_made = len(kept) < len(pairs) or any(len(name) == 1 for name in names)
        if not is_made and not model.get("ignore_merges") and end_of_text in special | {None}:
            return None
        model["merges"] = kept

    def hidden(name: str) -> str:
        return _NO_TEXT + name if name in names else name

    if model["type"] == "Unigram":
        model["vocab"] = [[hidden(name), score] for name, score in model["vocab"]]
    else:
        model["vocab"] = {hidden(name): index for name, index in model["vocab"].items()}
        if unknown is not None:
            model["unk_token"] = hidden(unknown)
    for token in added:
        token["special"] = token["content"] in names
        token["content"] = hidden(token["content"])
    return tree | {"truncation": None, "padding": None}


def _measure(description: dict[str, Any]) -> Callable[[str], int]:
    """How many UTF-8 bytes the text of a token stands for, given the ``tokenizer.json`` as a tree."""
    kinds = {
        step["type"] for key in ("pre_tokenizer", "decoder", "normalizer") for step in _steps(description.get(key))
    }
    if "ByteLevel" in kinds:
        return len
    if description["model"]["type"] in ("BPE", "Unigram") and kinds & {"Metaspace", "Replace", "ByteFallback"}:
        return lambda token: 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())
    raise UserError(
        f"bytes per token are not known for a tokenizer of type {description['model']['type']!r}",
        cure="use a byte-level BPE or a SentencePiece-like tokenizer",
        field="tokenizer.path",
    )


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps within a component of a ``tokenizer.json``, which may be a sequence of them."""
    if step is None:
        return
    inner = [value for key in ("pretokenizers", "decoders", "normalizers") for value in step.get(key, ())]
    if step["type"] != "Sequence":
        yield step
    for value in inner:
        yield from _steps(value)
