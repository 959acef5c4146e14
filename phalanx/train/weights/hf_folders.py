"""Runs to Hugging Face folders, and configs of runs that start from such folders."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from phalanx.core.config import walk
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.model.config import ModelConfig
from phalanx.model.huggingface import export_folder, parity
from phalanx.train.weights.initial import weights_of_folder, weights_of_run

Say = Callable[[str], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SEQUENCE = 256


def export_run(run: Path, folder: Path, say: Say, *, dtype: str = "float32", check: bool = True) -> None:
    """Write the newest good checkpoint of `run` as a folder that transformers loads, with its tokenizer.json.

    Args:
        dtype: of the written weights: float32, bfloat16 or float16.
        check: compare logits with transformers' afterwards (in float32, both models in memory at once).

    Raises:
        UserError: there is no checkpoint, the architecture has no counterpart, or `folder` exists.
    """
    weights = weights_of_run(run, say)
    tokenizer_json = run / "tokenizer" / "tokenizer.json"
    has_json = tokenizer_json.exists()
    end_of_text = None if weights.tokenizer is None else weights.tokenizer.end_of_text
    export_folder(
        weights.model,
        weights.tensors,
        tokenizer_json if has_json else None,
        folder,
        end_of_text=end_of_text,
        dtype=_DTYPES[dtype],
    )
    say(f"{weights.origin} is now {folder}")
    if not has_json:
        say("without tokenizer.json: a tokenizer of bytes or characters has no such file")
    _say_parity(folder, say, check)


def import_config(folder: Path, config: Path, say: Say, *, check: bool = True) -> None:
    """Write a config file of a run that starts from the weights of a Hugging Face folder (train.init_from).

    Args:
        check: compare logits with transformers' first.

    Raises:
        UserError: the folder cannot be imported, or `config` exists.
    """
    if config.exists():
        raise UserError("exists already", cure="name a new file, or remove it", value=str(config))
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        problem = "its path is not UTF-8 text, and no config can name it"
        raise UserError(problem, cure="rename the folder", value=str(folder)) from None
    weights = weights_of_folder(folder)
    _say_parity(folder, say, check)
    text = config_text(weights.model, folder.absolute(), has_tokenizer=weights.tokenizer is not None)
    try:
        write_bytes(config, text.encode())
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", cure="name another file", value=str(config)) from None
    say(f"config written; name your text in it, then: phalanx train {quote(str(config))}")


def config_text(model: ModelConfig, folder: Path, *, has_tokenizer: bool) -> str:
    """TOML of a run that starts from `folder`: every setting of the model that is not a default, and a beginning."""
    default = {key: value for key, value, _ in walk(ModelConfig())}
    given = {key: value for key, value, _ in walk(model) if value != default[key] or key == "vocab_multiple"}
    lines = [f"{key} = {_toml(value)}" for key, value in given.items()]
    tokenizer = ["# The folder has no tokenizer.json: give the tokenizer of these weights as [data.tokenizer]."]
    if has_tokenizer:
        tokenizer = ["[data.tokenizer]", 'kind = "file"', f"path = {_toml(str(folder / 'tokenizer.json'))}"]
    parts = [
        f"# A run that starts from the weights of {folder}",
        "",
        "[model]",
        *lines,
        "",
        "[data]",
        f"sequence_length = {min(_SEQUENCE, model.max_sequence)}",
        "",
        "[[data.sources]]  # your text goes here: phalanx explain --describe says what can be given",
        'kind = "python-stdlib"',
        "",
        *tokenizer,
        "",
        "[train]",
        f"init_from = {_toml(str(folder))}",
        "steps = 100",
        "global_batch = 8",
        "",
        "[optim]",
        "lr = 1e-5",
        "",
    ]
    return "\n".join(parts)


def _say_parity(folder: Path, say: Say, check: bool) -> None:
    if not check:
        return
    if importlib.util.find_spec("transformers") is None:
        say("parity with transformers: not checked, transformers is not installed")
        return
    say(f"parity with transformers: logits of random tokens differ by at most {parity(folder):.1e} (float32)")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
