"""Where checkpoints lie, as people write it (a path or a URL), and the store that is meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.registry import known_implementations

from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import claim
from phalanx.checkpoint.storage.object_store import ObjectStore
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points

_FIELD = "checkpoint.folder"
_HALF_URL = re.compile(r"(s3a?|gs|gcs|abfss?|az|https?|file|memory):")  # a folder of that name is never meant


def open_store(url: str | Path, options: Mapping[str, Any] | None = None, points: Points = NO_POINTS) -> Store:
    """The store at `url`; nothing is read or written yet.

    Args:
        url: a path, ``file://…``, or a URL of an object store that fsspec knows (``s3://bucket/run/checkpoints``).
        options: of the file system behind a URL, as fsspec names them (``endpoint_url`` …).

    Raises:
        UserError: the URL lacks its slashes, is of an unknown kind, or the package for it is missing.
    """
    protocol, separator, _ = str(url).partition("://")
    if isinstance(url, str) and not separator and _HALF_URL.match(url):
        cure = "give a URL such as s3://bucket/run, or a folder (one of such a name as ./…)"
        raise UserError("is a URL whose slashes are missing", cure=cure, field=_FIELD, value=url)
    if isinstance(url, Path) or not separator:
        return LocalStore(Path(url), points)
    if protocol in ("file", "local"):
        return LocalStore(Path(unquote(urlsplit(url).path)), points)
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        hint = known_implementations.get(protocol, {}).get("err", "install the fsspec package for it")
        cure = "pip install 'phalanx-train[s3]'" if protocol in ("s3", "s3a") else hint[:1].lower() + hint[1:]
        raise UserError(f"{protocol}:// needs a package that is not here", cure=cure, field=_FIELD, value=url) from None
    except ValueError:
        cure = "give a folder, or a URL such as s3://bucket/run"
        raise UserError(f"fsspec knows no {protocol}://", cure=cure, field=_FIELD, value=url) from None
    return ObjectStore(url, options, points)


def claimed(url: str, options: Mapping[str, Any], at_least: int, report: Callable[[str], None]) -> int:
    """Begin an attempt of a run at `url`, and return its number; UserError: checkpoints cannot be written there."""
    try:
        return claim(open_store(url, options), at_least, report)
    except OSError as error:
        mend = "see to bucket, credentials (in the environment) and network" if "://" in url else "make it writable"
        cure = f"{mend}, or set checkpoint.folder to another place"
        problem = f"checkpoints cannot be written there ({error})"
        raise UserError(problem, cure=cure, field=_FIELD, value=url) from error


def clean(store: Store, attempt: int) -> None:
    """Remove what dead writers have left, and put back what they took away; nothing, where this is forbidden."""
    with suppress(OSError):
        store.clean(attempt)


def has_names(url: str | Path, options: Mapping[str, Any] | None = None) -> bool:
    """Whether any checkpoint is published there, whole or damaged; no, where that cannot be found out."""
    try:
        return bool(open_store(url, options).names())
    except (OSError, UserError):
        return False
