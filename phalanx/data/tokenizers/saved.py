"""A copy of the tokenizer inside a run folder, so that a run can be sampled from wherever it is moved to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes, write_json
from phalanx.data.config import DataConfig, TokenizerConfig
from phalanx.data.tokenizers.spec import TokenizerSpec, find_spec, open_tokenizer
from phalanx.data.tokenizers.tokenizer import Tokenizer

_SPEC = "tokenizer_spec.json"


def save_tokenizer(config: DataConfig, folder: Path) -> None:
    """Put what the config's tokenizer needs into `folder`; one of kind bpe or file as ``tokenizer.json``.

    Raises:
        UserError: the tokenizer has not been made yet.
    """
    spec = find_spec(config)
    folder.mkdir(parents=True, exist_ok=True)
    if spec.path:
        name = "tokenizer.json" if spec.kind in ("bpe", "file") else Path(spec.path).name
        write_bytes(folder / name, Path(spec.path).read_bytes())
        spec = replace(spec, path=name)
    write_json(folder / _SPEC, asdict(spec))


def saved_tokenizer_config(folder: Path) -> TokenizerConfig | None:
    """Settings that mean the tokenizer in `folder` for other text; None where they cannot (kinds chars and none).

    Raises:
        UserError: there is none.
    """
    spec = _read_spec(folder)
    if spec.kind == "bytes":
        return TokenizerConfig(kind="bytes", end_of_text=spec.end_of_text)
    if spec.kind in ("bpe", "file"):
        return TokenizerConfig(kind="file", path=str(folder / spec.path), end_of_text_token=spec.end_of_text_token)
    return None


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` put into `folder`.

    Raises:
        UserError: there is none.
    """
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
