"""How many token ids a config will have, as far as the config and a tokenizer.json alone can tell. Loads no library."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.data.config import TokenizerConfig


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
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content.get("added_tokens", ())]
        return max(max(ids, default=-1), max(added, default=-1)) + 1
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "is no tokenizer.json"
    raise UserError(problem, cure="give a tokenizer.json", field="data.tokenizer.path", value=str(path))
