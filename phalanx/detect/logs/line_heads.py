"""The head of a line: when it was written, by which rank, on which host, at which level; and the text after it.

    2026-11-21T20:53:18.123Z INFO [rank 3 start 1] text          a run, and a job's log without the level
    [rank3]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] text          PyTorch
    2026-11-25 10:00:00,123 - megatron - WARNING - text          Python's logging
    12: text · gpu03: text · [default3]:text          srun --label, pdsh, torchrun --tee
    Nov 25 10:00:00 gpu03 kernel: [123.4] text · [Fri May 15 09:36:23 2026] text          syslog, dmesg -T

Times without a zone are taken as UTC: what counts is the order of lines.
"""

from __future__ import annotations

import re
from calendar import timegm
from dataclasses import dataclass
from typing import Literal

from phalanx.detect.logs.log_rules import Source

Level = Literal["", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_ISO = re.compile(
    r"[\[(]?(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?P<part>[.,]\d{1,9})?(?P<zone>Z|[+-]\d\d:?\d\d)?[\])]?"
)
_GLOG = re.compile(
    r"\[?(?P<level>[IWEFD])(?P<month>\d?\d)(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?P<part>\.\d{1,9})(?: {1,4}\d+)? (?=[\w/.-]+:\d+\])"
)
_SYSLOG = re.compile(
    r"(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?P<part>\.\d+)? "
    r"(?P<host>[\w.-]{1,64}) (?P<tag>[\w/.-]{1,40}(?:\[\d+\])?): "
)
_DMESG = re.compile(
    r"\[[A-Z][a-z]{2} (?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) "
    r"(?P<year>\d{4})\] "
)
_FACILITY = re.compile(r"<\d{1,3}>|[a-z]{3,8} {0,4}:[a-z]{3,8} {0,4}: ")  # of dmesg --raw and --decode
_STAMPS = (_ISO, _GLOG, _SYSLOG, _DMESG)
_WHO = re.compile(
    r"\[?(?:rank[ =:]?|default)(?P<rank>\d{1,6})(?: start \d+)?\](?:: ?|:?(?=\[)| )?"
    r"|\(?rank[ =]?(?P<plain>\d{1,6})\)?[:|] ?"
)
_WRAPPED = re.compile(
    r"\[\d+,(?P<rank>\d{1,6})\]<std(?:out|err)>:"
    r"|\((?P<actor>[\w.:-]{1,60} )?pid=\d{1,9}(?:, ip=(?P<host>[\w.:]{3,60}))?\) "
)
_LABEL = re.compile(
    r"(?P<rank>\d{1,6}): (?!\d)"
    # Names of hosts have a digit before the first dot; modules of Python and programs may have one, too.
    r"|(?P<host>(?!(?:boto3|cv2|oss2|python\d?|pip3|urllib3|sqlite3|psycopg2|jinja2|h5py|s3fs|s3cmd|bz2|lz4|py4j|tf2|av\d)\b)"
    r"(?=[a-z_-]{0,40}\d)[a-z][a-z0-9_-]{1,62}"
    r"(?:\.(?!error\b|exceptions\b|py\b|so\b|sh\b)[a-z0-9_-]{1,62}){0,6}): (?=\S)"
)
_LEVEL = re.compile(
    r"[\s\[(<|:-]{0,4}(?P<level>DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|STDERR|CRITICAL|FATAL(?! Python error))\b"
    r"[\])>|:-]{0,3} ?",
    re.IGNORECASE,
)
_LEVELS: dict[str, Level] = {
    "D": "DEBUG", "DEBUG": "DEBUG", "I": "INFO", "INFO": "INFO", "NOTICE": "INFO", "W": "WARNING", "WARN": "WARNING",
    "WARNING": "WARNING", "STDERR": "", "E": "ERROR", "ERROR": "ERROR", "F": "CRITICAL", "FATAL": "CRITICAL",
    "CRITICAL": "CRITICAL",
}  # fmt: skip
_WORDS_OF_LEVELS = re.compile(r"(?<![\w=.-])(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b")  # not of NCCL_DEBUG=INFO
_LOOKED_AT = 160  # characters in which a level may stand
_WARNS = re.compile(r"^(?:\S{1,200}:\d{1,6}: )?[\w.]{0,60}Warning: |^[\w.+-]{1,40}: [Ww]arning: |\] Warning: ")
"""Python's warnings, a library's, and torch's beside a place in its source."""


@dataclass(slots=True)
class LogLine:
    """A line without its head. `unix_s`: None where it has no time; `rank`: None, `host`: empty where not known."""

    text: str
    unix_s: float | None
    rank: int | None
    host: str
    level: Level
    source: Source


class LineHeads:
    """Parses the lines of one writer, in order; a line without a time has that of the line before it.

    Args:
        host, rank: whose log it is, where the file's name says it; lines may say it, too.
        year: of stamps that have none.
    """

    def __init__(self, host: str = "", rank: int | None = None, source: Source = "output", year: int = 1970) -> None:
        self.host, self.rank, self._source, self._year = host, rank, source, year
        self._stamp: re.Pattern[str] | None = None
        self._unix_s: float | None = None
        self._day: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._line_rank, self._line_host = rank, host

    def parse(self, raw: str) -> LogLine:
        """The line; wild ones come as they are."""
        text, source = raw, self._source
        level: Level = ""
        if source == "kernel" and (match := _FACILITY.match(text)):
            text = text[match.end() :]
        rank, host = None, ""
        is_stamped = False
        # At most: a label, a time, a rank, another time (of a library's own line), a level.
        for _ in range(3):
            before = text
            if text[:1] in "[(" and (match := _WRAPPED.match(text)):  # of mpirun and Ray
                rank = rank if match["rank"] is None else int(match["rank"])
                host = match["host"] or host
                text = text[match.end() :]
            if match := _WHO.match(text):
                rank = int(match["rank"] or match["plain"])
                text = text[match.end() :]
            elif not host and rank is None and (match := _LABEL.match(text)):
                rank = rank if match["rank"] is None else int(match["rank"])
                host = match["host"] or ""
                text = text[match.end() :]
            if (stamped := self._stamped(text)) is not None:
                match, at_s = stamped
                if not is_stamped:  # the outer one is of whoever wrote the file
                    self._unix_s, is_stamped = at_s, True
                groups = match.groupdict()
                level = _LEVELS.get(groups.get("level") or "", "") or level
                if groups.get("host"):
                    host = groups["host"]
                    source = "kernel" if groups["tag"] == "kernel" else source
                text = text[match.end() :].lstrip(" -|")
            if not level and (match := _LEVEL.match(text)):
                level = _LEVELS[match["level"].upper()]
                text = text[match.end() :].lstrip()
            if text is before or len(text) == len(before):
                break
        if not level and (match := _WORDS_OF_LEVELS.search(text, 0, _LOOKED_AT)):
            level = _LEVELS[match[1]]
        if not level and (match := _WARNS.search(text, 0, 300)):
            level = "WARNING"
        # Continuations, as of tracebacks, belong to whoever wrote the head above them.
        if rank is not None or host:
            self._line_rank, self._line_host = rank, host
        elif _is_bare(raw, text) and self.rank is None:
            rank, host = self._line_rank, self._line_host
        rank = self.rank if rank is None else rank
        return LogLine(text, self._unix_s, rank, host or self.host, level, source)

    def _stamped(self, text: str) -> tuple[re.Match[str], float] | None:
        first = text[:1]
        if not (first.isdigit() or first in "[(" or first.isupper()):
            return None
        if self._stamp is not None and (match := self._stamp.match(text)):
            return match, self._seconds(match)
        for stamp in _STAMPS:
            if stamp is not self._stamp and (match := stamp.match(text)):
                self._stamp = stamp
                return match, self._seconds(match)
        return None

    def _seconds(self, match: re.Match[str]) -> float:
        groups = match.groupdict()
        month = int(groups["month"]) if groups.get("month") else _MONTHS.get(groups["name"].lower(), 1)
        day = (int(groups.get("year") or self._year), month, int(groups["day"]))
        if self._day[:3] != day:
            self._day = (*day, timegm((*day, 0, 0, 0)))
        second = int(groups["hour"]) * 3600 + int(groups["minute"]) * 60 + int(groups["second"])
        part = groups.get("part")
        zone = groups.get("zone")
        shift = 0 if zone in (None, "Z") else (int(zone[:3]) * 3600 + int(zone[0] + zone[-2:]) * 60)
        return self._day[3] + second - shift + (float(f"0.{part[1:]}") if part else 0.0)


def _is_bare(raw: str, text: str) -> bool:
    """Whether the line has no head of its own."""
    return len(raw) == len(text)
