"""Text to token ids and back, behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[Any]
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What preparing, training and sampling need of a tokenizer.

    `end_of_text` is written before every document, so it both ends a document (as a target) and begins the next (as an
    input); a prompt starts with it too. None where there is no such token.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. The names of special tokens in it are taken as plain text."""

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Token ids of several texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, special tokens become nothing."""

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, (V,); 0 for special tokens. Their sum over a text is its length."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; 256 is end-of-text when there is one."""

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
