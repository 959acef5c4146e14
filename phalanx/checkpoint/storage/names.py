"""Names of checkpoints, of what is being written, and of what is kept aside. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from phalanx.checkpoint.storage.folder import checkpoint_name

QUARANTINES = ("stale", "sick")
"""Why a checkpoint may be kept aside, the beginning of its name then."""

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_NONCE = re.compile(r"[A-Za-z0-9]+")
_NAME = re.compile(r"step-(\d{8,})(?:\.a(\d+)-([A-Za-z0-9]+))?")


class Parsed(NamedTuple):
    """What the name of a checkpoint says; attempt 0 and no nonce where it says only the step."""

    step: int
    attempt: int = 0
    nonce: str = ""


def parse(name: str) -> Parsed | None:
    """What `name` says; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    if match is None or not name.startswith(checkpoint_name(int(match[1]))):
        return None
    return Parsed(int(match[1]), int(match[2] or 0), match[3] or "")


def step_of(name: str) -> int:
    """The step that the name of a checkpoint says.

    Raises:
        ValueError: it is no checkpoint's name.
    """
    parsed = parse(name)
    if parsed is None:
        raise ValueError(f"{name!r} is no name of a checkpoint")
    return parsed.step


def full_name(step: int, attempt: int, nonce: str) -> str:
    """``step-00000012.a3-1f…``.

    Raises:
        ValueError: `nonce` is not made of letters and digits.
    """
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"nonce = {nonce!r}: must be letters and digits only")
    return f"{checkpoint_name(step)}.a{attempt}-{nonce}"


def quarantine_name(why: str, name: str) -> str:
    """``stale-step-00000012.a3-1f…``.

    Raises:
        ValueError: `why` is none of `QUARANTINES`.
    """
    if why not in QUARANTINES:
        raise ValueError(f"why = {why!r}: must be one of {', '.join(QUARANTINES)}")
    return f"{why}-{name}"


def quarantined(name: str) -> Parsed | None:
    """What the name of a checkpoint that is kept aside says; None if it is none."""
    why, _, rest = name.partition("-")
    return parse(rest) if why in QUARANTINES else None


def newest_first(names: list[str]) -> list[str]:
    """Names of checkpoints, kept aside or not, by step and attempt; others are left out."""
    parsed = {name: parse(name) or quarantined(name) for name in names}
    found = [(said, name) for name, said in parsed.items() if said is not None]
    return [name for _, name in sorted(found, reverse=True)]


def plain(file: str) -> str:
    """`file`, if it can be the name of a file.

    Raises:
        ValueError: it is a path, hidden by dots, or worse.
    """
    if not _PLAIN.fullmatch(file) or file in (".", ".."):
        raise ValueError(f"{file!r} is no plain file name")
    return file
