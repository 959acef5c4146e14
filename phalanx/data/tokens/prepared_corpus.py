"""A prepared corpus: token files on disk, described by a manifest per source."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, SourceConfig, Split
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.data.tokens.shards import TokenShard, cut_shard, trained_tokens

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PreparedSplit:
    """One split of one source. `num_bytes` is its UTF-8 text, 0 where the source has only tokens. `num_trained` are the
    tokens of text that are trained on (ends of documents do not count), `num_untrained` the documents without any."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    shards: tuple[TokenShard, ...]
    num_trained: int
    num_untrained: int = 0


@dataclass(frozen=True)
class PreparedSource:
    """A prepared source. `has_end_of_text`: documents begin with an end-of-text token (which ends the one before)."""

    name: str
    folder: Path
    weight: float
    splits: dict[Split, PreparedSplit]
    has_end_of_text: bool
    fingerprint: str
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """Everything a loader reads; `validation_sources` are corpora that are only held out, and `tokenizer_key` is a hash
    of all that decides the tokenizer's ids."""

    tokenizer: Tokenizer
    sources: tuple[PreparedSource, ...]
    validation_sources: tuple[PreparedSource, ...] = ()
    tokenizer_key: str = ""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id in the files is below it."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """A hash of every token: two corpora with equal fingerprints give equal batches for equal settings."""
        result = hashlib.blake2b(digest_size=16)
        for source in (*self.sources, *self.validation_sources):
            result.update(source.fingerprint.encode())
        return result.hexdigest()

    def split(self, split: Split) -> tuple[tuple[PreparedSource, PreparedSplit], ...]:
        """The sources that have tokens in `split`, with that split."""
        every = (*self.sources, *self.validation_sources)
        return tuple((s, s.splits[split]) for s in every if split in s.splits and s.splits[split].num_tokens)

    def num_tokens(self, split: Split) -> int:
        """Tokens of a split over all sources."""
        return sum(part.num_tokens for _, part in self.split(split))

    def num_bytes(self, split: Split) -> int:
        """UTF-8 bytes of a split over all sources."""
        return sum(part.num_bytes for _, part in self.split(split))


def source_name(source: SourceConfig, number: int) -> str:
    """The name of a source in reports."""
    return source.name or f"{source.kind}-{number}"


def dataset_folder(config: DataConfig, source: SourceConfig, tokenizer_key: str, held_out: float) -> Path:
    """Where a source's tokens lie: one folder for each way to prepare it. Names and weights do not matter to that."""
    settings = {
        "format": FORMAT,
        "source": source.model_dump(exclude={"name", "weight"}) | {"bad_utf8": source.utf8_policy},
        "tokenizer": tokenizer_key,
        "held_out": held_out,
        "validation_split": config.validation_split if held_out not in (0.0, 1.0) else "",
        "validation_seed": config.validation_seed if held_out not in (0.0, 1.0) else 0,
        "python": platform.python_version() if source.kind == "python-stdlib" else "",
    }
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(config.folder) / f"{source.kind}-{key}"


def write_splits(splits: dict[Split, PreparedSplit], folder: Path) -> dict[str, Any]:
    """Splits as JSON; files inside `folder` by name, others by absolute path."""
    return {
        name: {
            "num_tokens": part.num_tokens,
            "num_documents": part.num_documents,
            "num_bytes": part.num_bytes,
            "num_trained": part.num_trained,
            "num_untrained": part.num_untrained,
            "shards": [_shard_json(shard, folder) for shard in part.shards],
        }
        for name, part in splits.items()
    }


def read_source(folder: Path, name: str, weight: float) -> PreparedSource:
    """Open the manifest of a prepared source; UserError: it was not prepared, or by another version of the format."""
    manifest = read_manifest(folder)
    if manifest is None:
        cure = "run `phalanx data prepare` with this config"
        raise UserError(f"source {name!r} has not been prepared in {folder}", cure=cure, field="data.sources")
    splits: dict[Split, PreparedSplit] = {}
    for split, part in manifest["splits"].items():
        shards = []
        for value in part["shards"]:
            paths = {key: folder / value[key] if value[key] else None for key in ("tokens", "starts", "mask")}
            shards.append(TokenShard(**{**value, **paths}))
        splits[split] = PreparedSplit(**{**part, "shards": tuple(shards)})
    about = (manifest["has_end_of_text"], manifest["fingerprint"], manifest["num_skipped"], tuple(manifest["skipped"]))
    return PreparedSource(name, folder, weight, splits, *about)


def hold_out_tail(source: PreparedSource, share: float, least: int) -> PreparedSource:
    """`source` with the last `share` of its tokens held out, wherever that is in a document: two at least, which one
    target needs, and so few that `least` stay. How many bytes of text the parts have is not known."""
    total = sum(part.num_tokens for part in source.splits.values())
    place = min(max(total - round(total * share), least), total - 2)
    if place < 1:
        return source
    shards: dict[Split, list[TokenShard]] = {"train": [], "validation": []}
    for shard in [shard for split in shards if split in source.splits for shard in source.splits[split].shards]:
        both = cut_shard(shard, min(max(place, 0), shard.num_tokens))
        for parts, part in zip(shards.values(), both, strict=True):
            parts += [part] if part.num_tokens else []
        place -= shard.num_tokens
    splits = {split: split_of_tokens(parts, has_ends=source.has_end_of_text) for split, parts in shards.items()}
    untrained = sum(part.num_untrained for part in source.splits.values())  # mostly there
    splits["train"] = replace(splits["train"], num_untrained=untrained)
    return replace(source, splits=splits)


def split_of_tokens(shards: Sequence[TokenShard], *, has_ends: bool) -> PreparedSplit:
    """A split of which only the tokens are known, not how many bytes of text they are. `has_ends`: each document begins
    with an end-of-text token, which is not counted as trained on."""
    documents = sum(shard.starts_end - shard.starts_begin for shard in shards)
    trained = sum(map(trained_tokens, shards)) - documents * has_ends
    return PreparedSplit(sum(shard.num_tokens for shard in shards), documents, 0, tuple(shards), trained)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished source, or None when there is none of this format."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest if manifest.get("format") == FORMAT else None


def combined_digest(digests: Iterable[str]) -> str:
    """One hash of several, in order."""
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()


def _shard_json(shard: TokenShard, folder: Path) -> dict[str, Any]:
    def place(path: Path | None) -> str | None:
        if path is None:
            return None
        return path.name if path.parent == folder else str(path.absolute())

    return {**vars(shard), "tokens": place(shard.tokens), "starts": place(shard.starts), "mask": place(shard.mask)}
