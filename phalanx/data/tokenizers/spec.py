"""Which tokenizer a config means: opened, or made once from the sources and kept beside the prepared tokens.

A run folder has a copy of it, so that a run can be sampled from wherever it is moved to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import folder_lock, friendly_os_errors, write_bytes, write_json
from phalanx.data.config import DataConfig, TokenizerConfig
from phalanx.data.sources.input_files import list_files, listing_digest
from phalanx.data.tokenizers.bpe_training import MAKERS, sources_of
from phalanx.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, IdTokenizer, LibraryTokenizer, Tokenizer

_SPEC = "tokenizer_spec.json"


def save_tokenizer(config: DataConfig, folder: Path) -> None:
    """Put what the config's tokenizer needs into `folder`; one of kind bpe or file as ``tokenizer.json``. UserError: it
    has not been made yet."""
    spec = find_spec(config)
    folder.mkdir(parents=True, exist_ok=True)
    if spec.path:
        name = "tokenizer.json" if spec.kind in ("bpe", "file") else Path(spec.path).name
        write_bytes(folder / name, Path(spec.path).read_bytes())
        spec = replace(spec, path=name)
    write_json(folder / _SPEC, asdict(spec))


def saved_tokenizer_config(folder: Path) -> TokenizerConfig | None:
    """Settings that mean the tokenizer in `folder` for other text; None where they cannot (kinds chars and none).
    UserError: there is none."""
    spec = _read_spec(folder)
    if spec.kind == "bytes":
        return TokenizerConfig(kind="bytes", end_of_text=spec.end_of_text)
    if spec.kind in ("bpe", "file"):
        return TokenizerConfig(kind="file", path=str(folder / spec.path), end_of_text_token=spec.end_of_text_token)
    return None


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` put into `folder`; UserError: there is none."""
    spec = _read_spec(folder)
    try:
        return open_tokenizer(replace(spec, path=str(folder / spec.path)) if spec.path else spec)
    except OSError as error:
        raise _unreadable(folder, error) from None


def _read_spec(folder: Path) -> TokenizerSpec:
    try:
        return TokenizerSpec(**json.loads((folder / _SPEC).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: Exception) -> UserError:
    cure = "check that this is the folder of a run"
    return UserError(f"holds no readable tokenizer ({error})", cure=cure, value=str(folder))


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
    if spec.kind == "bytes":
        return ByteTokenizer(end_of_text=spec.end_of_text)
    if spec.kind == "none":
        return IdTokenizer(spec.vocab_size)
    content = Path(spec.path).read_bytes()  # as text, "\r" would become "\n"
    if spec.kind == "chars":
        return CharTokenizer(content.decode(), end_of_text=spec.end_of_text)
    try:
        return LibraryTokenizer(content.decode(), end_of_text=spec.end_of_text_token)
    except UnicodeDecodeError:
        problem, cure = "is no tokenizer.json (it is not UTF-8 text)", "save it as UTF-8"
        raise UserError(problem, cure=cure, field="data.tokenizer.path", value=spec.path) from None


def find_spec(config: DataConfig) -> TokenizerSpec:
    """The spec of the config's tokenizer; UserError: its file is missing, or it has not been made yet."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "bytes":
        return TokenizerSpec("bytes", f"bytes {tokenizer.end_of_text}", end_of_text=tokenizer.end_of_text)
    if tokenizer.kind == "none":
        return TokenizerSpec("none", f"none {tokenizer.vocab_size}", vocab_size=tokenizer.vocab_size)
    if tokenizer.kind == "file":
        path = Path(tokenizer.path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
    else:
        path = _made_file(config)
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


def make_spec(config: DataConfig, report: Callable[[str], None]) -> TokenizerSpec:
    """The spec of the config's tokenizer; one that is made of the sources is made if need be, or if they changed."""
    if config.tokenizer.kind in MAKERS:
        path = _made_file(config)
        with folder_lock(path.parent, lambda: report("tokenizer: another process is making it, waiting")):
            _make(config, path, report)
    return find_spec(config)


def _make(config: DataConfig, path: Path, report: Callable[[str], None]) -> None:
    """Write the tokenizer's file unless it is there and the inputs are as they were. The lock is held."""
    sources = sources_of(config)
    listings = [listing_digest(list_files(source)) for source in sources]
    note = path.parent / "inputs.json"
    if path.exists() and note.exists() and json.loads(note.read_text()) == listings:
        return
    report(f"tokenizer: making one of kind {config.tokenizer.kind!r}")
    content = MAKERS[config.tokenizer.kind](config, sources)
    with friendly_os_errors(path.parent):
        note.unlink(missing_ok=True)
        write_bytes(path, content.encode())
        write_json(note, listings)


def _made_file(config: DataConfig) -> Path:
    """Where a tokenizer that is made of the sources lies: its folder is named by a hash of the settings that matter."""
    settings: dict[str, Any] = {
        "tokenizer": config.tokenizer.model_dump(exclude={"end_of_text", "end_of_text_token", "path"}),
        "sources": [s.model_dump(exclude={"name", "weight"}) for s in sources_of(config)],
        "held_out": [config.held_out, config.validation_seed, config.validation_split],
    }
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
    name = "characters.txt" if config.tokenizer.kind == "chars" else "tokenizer.json"
    return Path(config.folder) / f"tokenizer-{key}" / name
