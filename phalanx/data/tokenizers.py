"""Which tokenizer a config means: open it, or train it once and keep it beside the prepared tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.data.config import TokenizerConfig
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer


@dataclass(frozen=True)
class TokenizerSpec:
    """What a worker needs to open the same tokenizer: `key` is a hash of all that decides the ids."""

    kind: str
    key: str
    path: str = ""
    end_of_text: bool = True
    end_of_text_token: str = ""
    vocab_size: int = 0


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of a spec."""
    return OPENERS[spec.kind](spec)


OPENERS: dict[str, Callable[[TokenizerSpec], Tokenizer]] = {
    "bytes": lambda spec: ByteTokenizer(end_of_text=spec.end_of_text),
}


def find_spec(config: TokenizerConfig) -> TokenizerSpec:
    """The spec of a tokenizer that needs no training."""
    if config.kind == "bytes":
        return TokenizerSpec("bytes", f"bytes-{config.end_of_text}", end_of_text=config.end_of_text)
    raise UserError("not there yet", cure="use bytes", value=str(Path()))
