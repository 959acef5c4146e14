"""Which files hold the lines of a job, whose they are, and reading them as one bounded stream.

Known layouts: a run of `phalanx train` (``logs/rank-3.HOST.log``), a job of `phalanx run`
(``rank-3/attempt-0002.0001.log``, in folders of hosts where there are several), torchrun's ``--log-dir``
(``…/attempt_0/3/stderr.log``), and plain files with rank or host in their names (``node-3_rank12.log``,
``gpu03.kern.log``) or on their lines (``[rank12]:``, ``12: `` of ``srun --label``, ``gpu03: `` of pdsh, a syslog
prefix). Compressed files (``.gz``) are read as they are.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from phalanx.core.errors import UserError
from phalanx.detect.logs.line_heads import LineHeads, LogLine
from phalanx.detect.logs.log_rules import Source

MOST_FILES = 100_000
LONGEST_BYTES = 16 << 10  # of a line: the rest of it is skipped

_NAMES = (".log", ".txt", ".out", ".err", ".stdout", ".stderr", ".kmsg", ".dmesg", ".gz")
_TRAIN = re.compile(r"(?:train|rank-(\d+)\.([A-Za-z0-9_-]+))\.log(?:\.(\d+))?")
_DRIVER = re.compile(r"attempt-(\d+)\.(\d+)\.log")
_RANK = re.compile(r"(?:global[-_]?)?(?:\brank|(?<=[_.-])rank|worker|proc|task)[-_=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_HOST = re.compile(
    r"(?:^|[_.-])((?:node|host|gpu|h|worker-?node|instance|server|dgx|cn|gn|hgx)[-_]?\d{1,6}"
    r"|ip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}|\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})(?=$|[_.-])",
    re.IGNORECASE,
)
_KERNEL = re.compile(r"kern|dmesg|kmsg|messages|syslog|journal", re.IGNORECASE)
_ATTEMPT = re.compile(r"attempt_(\d+)")


@dataclass(frozen=True)
class LogFile:
    """A file, or one of the pieces of a log that was rotated.

    Attributes:
        order: among the pieces of one log; the oldest first.
        stream: of the same writer: pieces share it.
    """

    path: Path
    stream: str
    rank: int | None
    host: str
    source: Source = "output"
    attempt: int = 0
    order: int = 0


def find_log_files(places: Sequence[Path]) -> list[LogFile]:
    """The log files of a job below these folders, or these files themselves; of `phalanx run`, of its newest attempt.

    Raises:
        UserError: a place is not there.
    """
    found: list[LogFile] = []
    for place in places:
        if place.is_file():
            found.append(_of_name(place, place.parent, named=True) or LogFile(place, str(place), None, ""))
        elif place.is_dir():
            found += _below(place)
        else:
            raise UserError("is neither a file nor a folder", cure="give log files or folders", value=str(place))
    newest: dict[str, int] = {}
    for file in found:
        newest[file.stream] = max(newest.get(file.stream, 0), file.attempt)
    last = max(newest.values(), default=0)
    kept = [file for file in found if file.source == "kernel" or file.attempt == last]
    # What a rank writes to stderr last is why it ends: without times, that is after all that it wrote to stdout.
    return sorted(
        kept, key=lambda file: ("stderr" in file.path.name or file.path.suffix == ".err", file.stream, file.order)
    )


def read_lines(files: Sequence[LogFile], year: int | None = None) -> Iterator[tuple[LogFile, LogLine]]:
    """All lines, file after file; one is in memory at a time.

    Args:
        year: of stamps that have none; None: that of the file's last change.

    Raises:
        UserError: a file cannot be read.
    """
    heads: dict[str, LineHeads] = {}
    for file in files:
        try:
            its_year = year or _year(file.path)
            reader = heads.setdefault(file.stream, LineHeads(file.host, file.rank, file.source, its_year))
            with _opened(file.path) as handle:
                while raw := handle.readline(LONGEST_BYTES):
                    if len(raw) == LONGEST_BYTES and not raw.endswith(b"\n"):
                        while (rest := handle.readline(LONGEST_BYTES)) and not rest.endswith(b"\n"):
                            continue
                    yield file, reader.parse(raw.decode(errors="replace").rstrip("\r\n"))
        except (OSError, EOFError) as error:
            problem = f"cannot be read ({error})"
            raise UserError(problem, cure="check the path and its mode", value=str(file.path)) from None


def _below(folder: Path) -> list[LogFile]:
    root = _log_folder(folder)
    found = []
    for number, path in enumerate(sorted(root.rglob("*"))):
        if number > MOST_FILES:
            cure = "give the folder of one job"
            raise UserError(f"has more than {MOST_FILES:,} files", cure=cure, value=str(folder))
        if path.is_file() and (file := _of_name(path, root, named=False)):
            found.append(file)
    return found


def _log_folder(folder: Path) -> Path:
    """Of a job of `phalanx run`, as its card says; of a run, its ``logs``."""
    try:
        card = json.loads((folder / "job.json").read_bytes())
    except (OSError, ValueError):
        card = {}
    logs = card.get("logs") if isinstance(card, dict) else None
    if isinstance(logs, str) and (folder / logs).is_dir():
        return folder / logs
    own = folder / "logs"
    return own if own.is_dir() and (folder / "telemetry").exists() else folder


def _of_name(path: Path, root: Path, *, named: bool) -> LogFile | None:
    """Whose file it is; None: not a log."""
    name = path.name
    if match := _TRAIN.fullmatch(name):
        stream = str(path.with_name(name.partition(".log")[0]))
        return LogFile(path, stream, int(match[1] or 0), match[2] or "", order=-int(match[3] or 0))
    folders = path.relative_to(root).parts[:-1] if path.is_relative_to(root) else ()
    if (match := _DRIVER.fullmatch(name)) and (whose := re.fullmatch(r"rank-(\d+)", path.parent.name)):
        host = path.parent.parent.name if len(folders) > 1 else ""
        return LogFile(path, str(path.parent), int(whose[1]), host, attempt=int(match[1]), order=int(match[2]))
    ends = "".join(path.suffixes[-2:]).lower()
    if not named and not ends.endswith(_NAMES) and not re.search(r"\.log\.\d+$|^(?:stdout|stderr|dmesg|kmsg)$", name):
        return None
    bare = re.sub(r"(?:\.(?:log|txt|out|err|stdout|stderr|gz|kmsg|dmesg)|\.\d{1,3})+$", "", name)
    joined = "/".join((*folders, bare))
    rank: str | None = next(iter(_RANK.findall(joined)[-1:]), None)
    if name.startswith(("stdout", "stderr")) and path.parent.name.isdigit():  # torchrun's folder of a local rank
        attempt = next((int(one[1]) for part in folders if (one := _ATTEMPT.fullmatch(part))), 0)
        is_local = True
    else:
        attempt, is_local = 0, False
    host = _host_of(folders[:-1] if is_local else folders, "" if is_local else bare)
    if is_local and not host:  # of one host: local ranks are ranks; of several, lines say it
        rank = path.parent.name
    kernel = bool(_KERNEL.search(name)) and rank is None
    order = -int(number[1]) if (number := re.search(r"\.log\.(\d+)", name)) else 0
    stream = str(path.with_name(bare)) if order else str(path)
    file = LogFile(path, stream, None if rank is None else int(rank), host, order=order, attempt=attempt)
    return replace(file, source="kernel") if kernel else file


def _host_of(folders: Sequence[str], bare: str) -> str:
    for part in (bare, *reversed(folders)):
        if match := _HOST.search(_RANK.sub("", part)):
            return match[1]
    return ""


def _year(path: Path) -> int:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).year


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
