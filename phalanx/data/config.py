"""What to read, how to split it into tokens, what to hold out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.core.config import Config
from phalanx.core.errors import UserError

SourceKind = Literal["text", "jsonl", "parquet", "directory", "python-stdlib", "nanogpt", "megatron"]
Split = Literal["train", "validation"]
TOKEN_KINDS = frozenset({"nanogpt", "megatron"})

_APPLIES: dict[str, frozenset[str]] = {
    "field": frozenset({"jsonl", "parquet"}),
    "prompt_field": frozenset({"jsonl", "parquet"}),
    "missing_field": frozenset({"jsonl", "parquet"}),
    "extensions": frozenset({"directory"}),
    "document_separator": frozenset({"text"}),
    "include_tests": frozenset({"python-stdlib"}),
    "bad_utf8": frozenset({"text", "jsonl", "directory", "python-stdlib"}),
    "document_token": TOKEN_KINDS,
    "token_dtype": frozenset({"nanogpt"}),
}


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class TokenizerConfig(Config):
    """How text becomes token ids."""

    kind: Literal["bytes", "chars", "bpe", "file", "none"] = Field(
        "bpe",
        description="bytes: one token per UTF-8 byte; chars: one per character of the sources; bpe: byte-level BPE "
        "trained on the training split; file: a tokenizer.json; none: the sources are token files and ids have no text",
    )
    vocab_size: int = Field(
        4096, ge=1, le=2**31 - 1, description="kinds bpe and none: number of token ids, end-of-text included"
    )
    path: str = Field("", description="kind file: path of a tokenizer.json, or of a folder that holds one")
    pattern: Literal["gpt2", "gpt4"] = Field(
        "gpt2", description="kind bpe: the regular expression that cuts text into words before merging"
    )
    training_bytes: int = Field(
        64 * 2**20, ge=1, description="kind bpe: train on about this many bytes, spread over all sources"
    )
    end_of_text: bool = Field(
        True, description="kinds bytes and chars: have an end-of-text token, written before every document"
    )
    end_of_text_token: str = Field(
        "", description="kind file: the text of the end-of-text token; empty: look for the usual names"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TokenizerConfig:
        if self.kind == "file" and not self.path:
            raise ValueError("kind = 'file' does not fit path = '': give the path of a tokenizer.json")
        if self.kind != "file" and self.path:
            raise ValueError(f"path = {self.path!r} does not fit kind = {self.kind!r}: set kind = 'file'")
        if self.kind == "bpe" and self.vocab_size < 257:
            raise ValueError(
                f"vocab_size = {self.vocab_size} does not fit kind = 'bpe': 256 bytes and end-of-text need at least 257"
            )
        return self


class SourceConfig(Config):
    """One corpus."""

    kind: SourceKind = Field(
        description="text: plain text files; jsonl: one JSON object a line; parquet; directory: every file under a "
        "folder; python-stdlib: the .py files of the running Python; nanogpt, megatron: token files, used in place"
    )
    name: str = Field("", description="name in reports; empty: the kind and the number of the source")
    path: Strings = Field(
        (),
        description="files, folders or glob patterns; packed text is unpacked; python-stdlib: none",
    )
    weight: float = Field(
        0.0, ge=0, description="share of the samples relative to the other sources; 0: by number of tokens"
    )
    field: str = Field("text", min_length=1, description="jsonl, parquet: the field (column) that holds the text")
    prompt_field: str = Field(
        "",
        description="jsonl, parquet: a field that is put before the text and read, but not trained on (loss weight 0)",
    )
    missing_field: Literal["error", "skip"] = Field(
        "error", description="jsonl, parquet: what to do with a record whose field is absent, null or no string"
    )
    extensions: Strings = Field(
        (), description="directory: take only files whose name ends so, such as ['.py', '.md']; empty: every file"
    )
    document_separator: str = Field(
        "", description="text: the string between two documents of one file; empty: a file is one document"
    )
    include_tests: bool = Field(
        False, description="python-stdlib: also take the test packages (60 % of the bytes, repetitive)"
    )
    bad_utf8: Literal["error", "replace", "skip"] | None = Field(
        None,
        description="text that is not UTF-8: stop (error), put U+FFFD in its place, or leave that document out; "
        "empty: error, but skip for python-stdlib, which has a few files in other encodings",
    )
    document_token: int = Field(
        -1, ge=-1, description="nanogpt, megatron: the token id that ends every document; -1: there is none"
    )
    token_dtype: Literal["uint16", "uint32"] = Field("uint16", description="nanogpt: the type of the ids in the file")

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        for name in sorted(_APPLIES):
            # Compared with the default, not with what was given: a config read back from its full dump is the same.
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and self.kind not in _APPLIES[name]:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} does not fit kind = {self.kind!r}: remove it, "
                    f"it belongs to {', '.join(sorted(_APPLIES[name]))}"
                )
        if self.kind == "python-stdlib" and self.path:
            raise ValueError(f"path = {self.path!r} does not fit kind = 'python-stdlib': remove path")
        if self.kind != "python-stdlib" and not self.path:
            raise ValueError(f"path = () does not fit kind = {self.kind!r}: name a file, a folder or a pattern")
        if self.bad_utf8 == "skip" and self.document_separator:
            raise ValueError(
                f"bad_utf8 = 'skip' does not fit document_separator = {self.document_separator!r}: "
                "use 'replace' or 'error'"
            )
        return self

    @property
    def utf8_policy(self) -> Literal["error", "replace", "skip"]:
        """`bad_utf8`, resolved."""
        return self.bad_utf8 or ("skip" if self.kind == "python-stdlib" else "error")


class DataConfig(Config):
    """The corpus, its tokens, and how they become samples."""

    sequence_length: int = Field(256, ge=2, description="tokens in one sample")
    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(kind="python-stdlib"),), min_length=1, description="the corpora, mixed by weight"
    )
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="how text becomes token ids")
    folder: str = Field("prepared", min_length=1, description="where prepared tokens are kept, shared between runs")
    seed: int = Field(0, ge=0, lt=2**63, description="of the order of the samples")
    validation_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of every source that is held out, by whole documents; 0: none; empty: 0.05, or 0 where "
        "there are validation_sources",
    )
    validation_split: Literal["document", "tail"] = Field(
        "document",
        description="document: each document is held out or not by a hash of its name; tail: the last part of every "
        "text file is held out (for a corpus that is one file)",
    )
    validation_seed: int = Field(0, ge=0, lt=2**63, description="which documents are held out; not moved by `seed`")
    validation_sources: tuple[SourceConfig, ...] = Field(
        (), description="corpora that are only held out; then nothing is held out of `sources`"
    )
    document_mask: bool = Field(True, description="whether attention stops at the borders between documents")
    random_offset: bool = Field(
        True, description="whether each epoch cuts the text at other places, by a keyed shift below sequence_length"
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.validation_sources and self.validation_fraction:
            raise ValueError(
                f"validation_fraction = {self.validation_fraction} does not fit validation_sources: give one of the two"
            )
        weights = [source.weight for source in self.sources]
        if any(weights) and not all(weights):
            raise ValueError(f"sources have weights {weights}: give every source a weight above 0, or none")
        every = self.sources + self.validation_sources
        texts = [s for s in every if s.kind not in TOKEN_KINDS]
        if self.tokenizer.kind == "none" and texts:
            raise ValueError(
                f"tokenizer.kind = 'none' does not fit a source of kind {texts[0].kind!r}: choose a tokenizer"
            )
        if self.tokenizer.kind in ("chars", "bpe") and not texts:
            raise ValueError(
                f"tokenizer.kind = {self.tokenizer.kind!r} does not fit sources that are all token files: "
                "give the tokenizer they were made with (kind = 'file'), or kind = 'none' with its vocab_size"
            )
        others = [s for s in self.sources if s.kind != "text" or s.document_separator]
        if self.validation_split == "tail" and others and not self.validation_sources:
            raise ValueError(
                f"validation_split = 'tail' does not fit a source of kind {others[0].kind!r} "
                "(or one with document_separator): use 'document'"
            )
        return self

    @property
    def held_out(self) -> float:
        """The share of `sources` that is held out."""
        if self.validation_fraction is None:
            return 0.0 if self.validation_sources else 0.05
        return self.validation_fraction


def configured_vocab_size(config: TokenizerConfig) -> int:
    """Number of token ids, end-of-text included.

    Raises:
        UserError: the tokenizer is yet to be made of the sources, or its file cannot be read.
    """
    if config.kind == "bytes":
        return 256 + config.end_of_text
    if config.kind in ("bpe", "none"):
        return config.vocab_size
    if config.kind == "file":
        return _size_of_file(Path(config.path).expanduser())
    raise UserError(
        "its vocabulary is made of the sources",
        cure="run `phalanx data prepare` to see it, or set model.vocab_size",
        field="data.tokenizer.kind",
        value=config.kind,
    )


def _size_of_file(path: Path) -> int:
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content.get("added_tokens", ())]
        if size := max(max(ids, default=-1), max(added, default=-1)) + 1:
            return size
        problem = "has no token in it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "is no tokenizer.json"
    raise UserError(problem, cure="give a tokenizer.json", field="data.tokenizer.path", value=str(path))
