"""What a model made of a prompt at each evaluation of a run: ``RUN/samples.jsonl``.

``{"step": 500, "prompt": "Once", "text": " upon a time …", "at_unix_s": 1795304148.59}``, a line each. A run that goes
on from an earlier step says it again: of several lines of one step and prompt the newest counts. A start that was asked
for samples and can make none says why: ``{"why": "no rank holds the whole model"}``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.files import open_regular

NAME = "samples.jsonl"
_MOST_BYTES = 16 << 20
"""Of a longer file the end is read."""


@dataclass(frozen=True)
class Sample:
    """What a model made of a prompt after a step; `at_unix_s`: when."""

    step: int
    prompt: str
    text: str
    at_unix_s: float


def keep_sample(run: Path, step: int, prompt: str, text: str) -> None:
    """Append a sample of the run in `run`; what a full disk refuses is left out: training goes on."""
    _append(run, asdict(Sample(step, prompt, text, time.time())))


def keep_why_none(run: Path, why: str) -> None:
    """Append why this start of the run in `run` makes no samples; what a full disk refuses is left out."""
    _append(run, {"why": why, "at_unix_s": time.time()})


def _append(run: Path, entry: Mapping[str, Any]) -> None:
    line = json.dumps(entry, ensure_ascii=False) + "\n"
    with suppress(OSError):
        descriptor = os.open(run / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode(errors="replace"))
        finally:
            os.close(descriptor)


def read_samples(run: Path) -> list[Sample]:
    """The samples of a run by step, each prompt of a step once; torn and foreign lines are left out."""
    found: dict[tuple[int, str], Sample] = {}
    for line in _lines(run):
        if (sample := _parsed(line)) is not None:
            found[sample.step, sample.prompt] = sample
    return [found[key] for key in sorted(found)]


def read_why_none(run: Path) -> str:
    """Why the newest start of a run makes no samples; empty: it does, or was not asked to."""
    why = ""
    for line in _lines(run):
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            why = str(json.loads(line).get("why", ""))
    return why


def _lines(run: Path) -> list[bytes]:
    try:
        with open_regular(run / NAME) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _MOST_BYTES, 0))
            return file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []


def _parsed(line: bytes) -> Sample | None:
    try:
        entry: Mapping[str, Any] = json.loads(line)
        sample = Sample(entry["step"], entry["prompt"], entry["text"], float(entry.get("at_unix_s", 0)))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_ours = type(sample.step) is int and isinstance(sample.prompt, str) and isinstance(sample.text, str)
    return sample if is_ours else None
