"""What the files of a Hugging Face folder hold, from their headers alone: no tensor is read here, none is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from phalanx.core.errors import UserError
from phalanx.core.files import read_regular

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_JSON_BYTES = 1 << 28
_AGAIN = "fetch the folder again"
_COMPLETE = "point to a complete Hugging Face folder"


@dataclass(frozen=True)
class Stored:
    """A tensor as the header of its file describes it; `dtype` is safetensors' word for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. `UserError`: it is missing, damaged, or something else."""
    try:
        value = json.loads(read_regular(path, _MOST_JSON_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError("is missing", cure=_COMPLETE, field=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"cannot be read: {problem}", cure=_AGAIN, field=str(path)) from None
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", cure=_AGAIN, field=str(path))
    return value


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors by the name it has there.

    Raises:
        UserError: there are none, a file is missing or damaged, files and index disagree, or there is an adapter.
    """
    if (folder / "adapter_config.json").exists():
        cure = "merge it first with peft: model.merge_and_unload().save_pretrained(folder)"
        raise UserError("has an adapter that is not merged", cure=cure, field=str(folder))
    index = _index(folder) if (folder / INDEX).exists() else None
    found: dict[str, Stored] = {}
    for file in [folder / WEIGHTS] if index is None else sorted({*index.values()}):
        with open_weights(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise UserError(f"is in {found[name].file.name} and in {file.name}", cure=_AGAIN, field=name)
                part = opened.get_slice(name)
                found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
    if index is not None:
        _require_as_indexed(index, found)
    return found


def _index(folder: Path) -> dict[str, Path]:
    """The file of each tensor, as the index says."""
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UserError("does not name a file for each tensor", cure=_AGAIN, field=f"{folder / INDEX}: weight_map")
    outside = [name for name in names.values() if Path(name).name != name]
    if outside:
        raise UserError("names a file outside the folder", cure="do not trust it", field=INDEX, value=outside[0])
    shards = {*names.values()}
    others = [folder / WEIGHTS, *sorted(folder.glob("model-*-of-*.safetensors"))]
    extra = next((file for file in others if file.name not in shards and file.exists()), None)
    if extra is not None:
        cure = "remove the one that is not of this model, or fetch the folder again"
        raise UserError(f"is not named by {INDEX}, which lies beside it", cure=cure, field=str(extra))
    return {tensor: folder / name for tensor, name in names.items()}


def _require_as_indexed(index: dict[str, Path], found: dict[str, Stored]) -> None:
    for name, file in index.items():
        if name not in found or found[name].file != file:
            raise UserError(f"is not in {file.name}, where {INDEX} has it", cure=_AGAIN, field=name)
    extra = next((name for name in found if name not in index), None)
    if extra is not None:
        raise UserError(f"is in {found[extra].file.name}, and {INDEX} does not name it", cure=_AGAIN, field=extra)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A safetensors file, opened. `UserError`: it is missing or damaged, or only pickled weights are there."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"is damaged: {error}", cure=_AGAIN, field=str(path)) from None


def _missing(path: Path) -> UserError:
    folder = path.parent
    if path.name != WEIGHTS or path.is_symlink():
        return UserError("is missing", cure=_AGAIN, field=str(path))
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        cure = "convert it with transformers: model.save_pretrained(folder, safe_serialization=True)"
        return UserError("has only pickled weights, which are never loaded", cure=cure, field=str(folder))
    return UserError(f"has no {WEIGHTS}", cure=_COMPLETE, field=str(folder))
