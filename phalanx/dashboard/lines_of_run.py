"""Lines of the logs of a run: what training said of itself, what ranks printed under `phalanx run`, or what its driver
knows; searched from the newest on, for a bounded time.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow.compute

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import DataSource, Run
from phalanx.run.api.api_client import Client
from phalanx.run.logs import log_files as of_jobs
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.telemetry import run_log_lines as of_training

Source = Literal["training", "job", "driver"]
SOURCES: dict[Source, str] = {
    "training": "what training said",
    "job": "what ranks printed",
    "driver": "what the driver knows",
}

LEVELS = ("INFO", "WARNING", "ERROR")
MOST_RANKS = 64
"""Together; of more, one is chosen."""
_DRIVER_LINES = 10_000
_SEARCH_S = 2.0
_LOOK_AT_CLOCK = 2000
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_AGO_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Traceback|Segmentation fault)\b|\b\w*(?:Error|Exception)\b:")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning\b:")


@dataclass(frozen=True)
class Line:
    """A line of a rank.

    Attributes:
        level: of `LEVELS`; what ranks print has none, so that it is told by words such as ``Error:``.
        attempt: of the job, or start of the run; 0: not known.
        key: stands in links.
    """

    rank: int
    unix_s: float
    level: str
    attempt: int
    text: str
    key: str = ""


@dataclass(frozen=True)
class LogSearch:
    """Which lines are wanted.

    Attributes:
        q: a text, or a pattern where `is_pattern`; neither looks at the case of letters.
        level: that or above; empty: all.
        since_unix_s, before_unix_s: 0: without a bound.
        at_unix_s: not a search: the lines around this moment; 0: none.
    """

    source: Source
    rank: int | None = None
    level: str = ""
    q: str = ""
    is_pattern: bool = False
    since_unix_s: float = 0.0
    before_unix_s: float = 0.0
    at_unix_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """Lines, the oldest first.

    Attributes:
        has_more: there are older ones.
        searched_to_unix_s: the search ended there since it took long; 0: it did not.
        ranks_left_out: lines of so many ranks were not looked at.
    """

    lines: tuple[Line, ...]
    has_more: bool = False
    searched_to_unix_s: float = 0.0
    ranks_left_out: int = 0


def sources_of(run: Run) -> list[Source]:
    """Where lines of a run come from, the most telling first."""
    if run.folder is None:
        return ["driver"]
    found: list[Source] = []
    if run.card is not None and of_jobs.rank_folders(run.card.log_folder(run.folder)):
        found.append("job")
    if of_training.log_files(run.folder):
        found.append("training")
    return found


def ranks_of(run: Run, source: Source) -> list[int]:
    """Ranks that have a log."""
    if run.folder is None:
        return []
    if source == "training":
        return sorted({file.rank for file in of_training.log_files(run.folder)})
    return sorted({rank for rank, _ in of_jobs.rank_folders(_job_folder(run))})


def find_lines(frame_source: DataSource, run: Run, search: LogSearch, count: int) -> Found:
    """The newest `count` lines that are wanted.

    Raises:
        UserError: the pattern is none.
        ConnectionError: the driver that is to be asked does not answer.
    """
    takes = _filter(search)
    newest, left_out = _newest_first(frame_source, run, search)
    if search.at_unix_s:
        return replace(_around(newest, search.at_unix_s, count), ranks_left_out=left_out)
    kept: list[Line] = []
    has_more, searched_to_s, until_s = False, 0.0, time.monotonic() + _SEARCH_S
    for number, line in enumerate(newest):
        if line.unix_s and line.unix_s < search.since_unix_s:
            break
        if takes(line):
            if len(kept) == count:
                has_more = True
                break
            kept.append(line)
        if number % _LOOK_AT_CLOCK == _LOOK_AT_CLOCK - 1 and time.monotonic() > until_s:
            has_more, searched_to_s = True, line.unix_s
            break
    return Found(_with_keys(kept[::-1]), has_more, searched_to_s, left_out)


def moment_of(text: str, now_unix_s: float) -> float:
    """``10m`` ago, ``2026-11-25 19:00`` UTC, or seconds since 1970; empty: 0.

    Raises:
        UserError: it is none of them.
    """
    text = text.strip()
    if not text:
        return 0.0
    if match := _AGO.fullmatch(text):
        return now_unix_s - float(match[1]) * _AGO_S[match[2]]
    with suppress(ValueError):
        return float(text)
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    raise UserError("is no time", cure="write 10m, 2h or 2026-11-25 19:00", field="since", value=text)


def _filter(search: LogSearch) -> Callable[[Line], bool]:
    # Patterns come from whoever looks at the page: RE2, which pyarrow has, takes time in proportion to the line for any
    # of them, where Python's `re` may never end.
    wanted = partial(
        pyarrow.compute.match_substring_regex if search.is_pattern else pyarrow.compute.match_substring,
        pattern=search.q,
        ignore_case=True,
    )
    try:
        wanted(pyarrow.scalar(""))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"is not a pattern ({error})", cure="correct it, or untick pattern", value=search.q) from None
    least = LEVELS.index(search.level) if search.level in LEVELS else 0
    before_s = search.before_unix_s or float("inf")

    def takes(line: Line) -> bool:
        if line.unix_s >= before_s or (least and LEVELS.index(line.level) < least):
            return False
        return not search.q or wanted(pyarrow.scalar(line.text)).as_py() is True

    return takes


def _newest_first(frame_source: DataSource, run: Run, search: LogSearch) -> tuple[Iterator[Line], int]:
    """Lines from the newest on, and how many ranks were left out."""
    if search.source == "driver" or run.folder is None:

        async def ask(client: Client) -> list[Line]:
            found = await client.logs(search.rank, _DRIVER_LINES)
            return [_of_job(line.rank, line.unix_s, line.attempt, line.text) for line in found]

        return reversed(frame_source.ask(run, ask)), 0
    if search.source == "training":
        files = of_training.log_files(run.folder, search.rank)
        lines = of_training.newest_first(files[:MOST_RANKS])
        return map(_of_training, lines), max(len(files) - MOST_RANKS, 0)
    folders = of_jobs.rank_folders(_job_folder(run), search.rank)
    of_job = of_jobs.newest_first(folders[:MOST_RANKS])
    each = (_of_job(line.rank, line.unix_s, line.attempt, line.text) for line in of_job)
    return each, max(len(folders) - MOST_RANKS, 0)


def _around(newest: Iterator[Line], at_unix_s: float, count: int) -> Found:
    """As many lines before a moment as after it."""
    after: deque[Line] = deque(maxlen=count // 2)
    before: list[Line] = []
    for line in newest:
        if line.unix_s > at_unix_s:
            after.append(line)
        else:
            before.append(line)
            if len(before) > count // 2:
                break
    return Found(_with_keys([*before[::-1], *list(after)[::-1]]), len(before) > count // 2)


def _with_keys(lines: Sequence[Line]) -> tuple[Line, ...]:
    """A line has the same key whatever else is shown beside it."""
    seen: Counter[str] = Counter()
    found = []
    for line in lines:
        key = f"L{line.rank}-{round(line.unix_s * 1000)}-{zlib.crc32(line.text.encode()):x}"
        seen[key] += 1
        found.append(replace(line, key=key if seen[key] == 1 else f"{key}-{seen[key]}"))
    return tuple(found)


def _of_training(line: of_training.LogLine) -> Line:
    level = line.level or _told(line.text)
    known = level if level in LEVELS else {"CRITICAL": "ERROR", "STDERR": "WARNING"}.get(level, "INFO")
    return Line(line.rank, line.unix_s, known, line.start, strip_ansi(line.text))


def _of_job(rank: int, unix_s: float, attempt: int, text: str) -> Line:
    clean = strip_ansi(text)
    return Line(rank, unix_s, _told(clean), attempt, clean)


def _told(text: str) -> str:
    if _ERROR.search(text):
        return "ERROR"
    return "WARNING" if _WARNING.search(text) else "INFO"


def _job_folder(run: Run) -> Path:
    if run.folder is None or run.card is None:
        raise UserError("is no job of `phalanx run`", cure="choose the log of its training", value=run.name)
    return run.card.log_folder(run.folder)
