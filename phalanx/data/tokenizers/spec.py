"""Which tokenizer a config means: open it, or make it once from the sources and keep it beside the prepared tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes, write_json
from phalanx.data.config import TOKEN_KINDS, DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.lock import folder_lock, friendly_os_errors
from phalanx.data.order import Permutation, derive_key
from phalanx.data.sources.documents import read_pieces, was_skipped
from phalanx.data.sources.files import Unit, list_files, listing_digest, plan_units
from phalanx.data.sources.held_out import Rule
from phalanx.data.tokenizers.bpe import train_bpe
from phalanx.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, IdTokenizer, LibraryTokenizer, Tokenizer

MIN_SAMPLE_BYTES = 1 << 18
Say = Callable[[str], None]


@dataclass(frozen=True)
class TokenizerSpec:
    """What a worker needs to open the same tokenizer. `key` is a hash of all that decides the ids."""

    kind: str
    key: str
    path: str = ""
    end_of_text: bool = True
    end_of_text_token: str = ""
    vocab_size: int = 0


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of a spec."""
    return _OPENERS[spec.kind](spec)


def _open_file(spec: TokenizerSpec) -> Tokenizer:
    return LibraryTokenizer(Path(spec.path).read_text(encoding="utf-8"), end_of_text=spec.end_of_text_token)


def _open_chars(spec: TokenizerSpec) -> Tokenizer:
    return CharTokenizer(Path(spec.path).read_text(encoding="utf-8"), end_of_text=spec.end_of_text)


_OPENERS: dict[str, Callable[[TokenizerSpec], Tokenizer]] = {
    "bytes": lambda spec: ByteTokenizer(end_of_text=spec.end_of_text),
    "chars": _open_chars,
    "bpe": _open_file,
    "file": _open_file,
    "none": lambda spec: IdTokenizer(spec.vocab_size),
}


def find_spec(config: DataConfig) -> TokenizerSpec:
    """The spec of the config's tokenizer, which must exist already.

    Raises:
        UserError: the file is missing, or the tokenizer has not been made yet.
    """
    tokenizer = config.tokenizer
    if tokenizer.kind == "bytes":
        return TokenizerSpec("bytes", f"bytes {tokenizer.end_of_text}", end_of_text=tokenizer.end_of_text)
    if tokenizer.kind == "none":
        return TokenizerSpec("none", f"none {tokenizer.vocab_size}", vocab_size=tokenizer.vocab_size)
    path = _given_file(tokenizer) if tokenizer.kind == "file" else _made_file(config)
    try:
        content = path.read_bytes()
    except OSError as error:
        made = tokenizer.kind != "file"
        raise UserError(
            "has not been made yet" if made else f"cannot be read ({error.strerror})",
            cure="run `phalanx data prepare` with this config" if made else "check the path",
            field=None if made else "data.tokenizer.path",
            value=str(path),
        ) from None
    parts = f"{tokenizer.kind} {tokenizer.end_of_text} {tokenizer.end_of_text_token} "
    key = hashlib.blake2b(parts.encode() + content, digest_size=16).hexdigest()
    return TokenizerSpec(tokenizer.kind, key, str(path), tokenizer.end_of_text, tokenizer.end_of_text_token)


def make_spec(config: DataConfig, say: Say) -> TokenizerSpec:
    """The spec of the config's tokenizer; one that is made of the sources is made if need be, or if they changed."""
    if config.tokenizer.kind in _MAKERS:
        path = _made_file(config)
        with folder_lock(path.parent, lambda: say("tokenizer: another process is making it, waiting")):
            _make(config, path, say)
    return find_spec(config)


def _make(config: DataConfig, path: Path, say: Say) -> None:
    """Write the tokenizer's file unless it is there and the inputs are as they were. The lock is held."""
    sources = _sources_of(config)
    listings = [listing_digest(list_files(source)) for source in sources]
    note = path.parent / "inputs.json"
    if path.exists() and note.exists() and json.loads(note.read_text()) == listings:
        return
    say(f"tokenizer: making one of kind {config.tokenizer.kind!r}")
    content = _MAKERS[config.tokenizer.kind](config, sources)
    with friendly_os_errors(path.parent):
        note.unlink(missing_ok=True)
        write_bytes(path, content.encode())
        write_json(note, listings)


def _make_bpe(config: DataConfig, sources: list[SourceConfig]) -> str:
    return train_bpe(training_texts(config, sources), config.tokenizer)


def _make_alphabet(config: DataConfig, sources: list[SourceConfig]) -> str:
    """Every character of all the sources, held-out text too, so that no text is without an id."""
    seen = np.zeros(0x110000, bool)
    for source in sources:
        for unit in plan_units(source, list_files(source), 0.0):
            for text in _texts(source, unit, None, 0):
                seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    return "".join(map(chr, np.flatnonzero(seen)))


_MAKERS: dict[str, Callable[[DataConfig, list[SourceConfig]], str]] = {"bpe": _make_bpe, "chars": _make_alphabet}


def training_texts(config: DataConfig, sources: list[SourceConfig]) -> Iterator[str]:
    """About `training_bytes` of training text (held-out documents left out), spread over all the sources.

    Units of work are taken in a keyed order, some of each, until there is enough; so the same text is chosen on every
    machine and a huge corpus is not read through.
    """
    tail = config.held_out if config.validation_split == "tail" else 0.0
    units = [(source, unit) for source in sources for unit in plan_units(source, list_files(source), tail)]
    share = max(config.tokenizer.training_bytes // len(units), MIN_SAMPLE_BYTES)
    rule = Rule(config.held_out, config.validation_seed)
    left = config.tokenizer.training_bytes
    for number in Permutation(derive_key("tokenizer"), len(units))(np.arange(len(units))).tolist():
        source, unit = units[number]
        for text in _texts(source, unit, rule, share):
            yield text
            left -= len(text.encode())
            if left <= 0:
                return


def _texts(source: SourceConfig, unit: Unit, rule: Rule | None, limit: int) -> Iterator[str]:
    """The text of a unit, the training split's alone when there is a `rule`, up to `limit` bytes (0: all)."""
    size = 0
    for part in unit.parts:
        split = rule.split(part.name, part) if rule else "train"
        for piece in read_pieces(source, part):
            if was_skipped(piece) is not None:
                continue
            if rule and piece.name is not None:
                split = rule.split(piece.name, part)
            if split == "train":
                yield piece.text
                size += len(piece.text.encode())
            if limit and size >= limit:
                return


def _sources_of(config: DataConfig) -> list[SourceConfig]:
    """The sources that a tokenizer is made of."""
    every = config.sources + (config.validation_sources if config.tokenizer.kind == "chars" else ())
    return [source for source in every if source.kind not in TOKEN_KINDS]


def _made_file(config: DataConfig) -> Path:
    """Where a tokenizer that is made of the sources lies: its folder is named by a hash of the settings that matter."""
    settings: dict[str, Any] = {
        "tokenizer": config.tokenizer.model_dump(exclude={"end_of_text", "end_of_text_token", "path"}),
        "sources": [s.model_dump(exclude={"name", "weight"}) for s in _sources_of(config)],
        "held_out": [config.held_out, config.validation_seed, config.validation_split],
    }
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
    name = "characters.txt" if config.tokenizer.kind == "chars" else "tokenizer.json"
    return Path(config.folder) / f"tokenizer-{key}" / name


def _given_file(config: TokenizerConfig) -> Path:
    path = Path(config.path).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path
