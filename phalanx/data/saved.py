"""A tokenizer kept in a folder of its own, so that a trained model can be used without its corpus."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes, write_json
from phalanx.data.config import DataConfig
from phalanx.data.tokenizer import Tokenizer
from phalanx.data.tokenizers import TokenizerSpec, find_spec, open_tokenizer

_SPEC = "spec.json"


def save_tokenizer(config: DataConfig, folder: Path) -> None:
    """Copy the tokenizer that `config` means, which must have been made, into `folder`."""
    spec = find_spec(config)
    folder.mkdir(parents=True, exist_ok=True)
    if spec.path:
        name = Path(spec.path).name
        write_bytes(folder / name, Path(spec.path).read_bytes())
        spec = replace(spec, path=name)
    write_json(folder / _SPEC, asdict(spec))


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that was saved in `folder`.

    Raises:
        UserError: there is none.
    """
    try:
        spec = TokenizerSpec(**json.loads((folder / _SPEC).read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise UserError(
            f"holds no tokenizer ({error})", cure="give a folder that `phalanx train` wrote", value=str(folder)
        ) from None
    return open_tokenizer(replace(spec, path=str(folder / spec.path)) if spec.path else spec)
