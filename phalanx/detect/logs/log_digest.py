"""One pass over the lines of a job: what a judge of logs needs of them, in bounded memory.

Kept are: lines that a rule explains or that are errors of a kind that was not seen before (the first of a kind since
its writer last made progress), how far each writer came, which addresses hosts have, when hosts logged the same step
(their clocks differ), and counts by template.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from phalanx.detect.logs.guessed_rules import GuessedRules
from phalanx.detect.logs.killed_processes import process_of
from phalanx.detect.logs.line_heads import Level, LogLine
from phalanx.detect.logs.line_templates import LONGEST, TemplateLimits, Templates, masked
from phalanx.detect.logs.log_ends import is_end, says_calmly
from phalanx.detect.logs.log_rules import LogRule, Matcher, Source, load_rules, shorten
from phalanx.detect.logs.log_sources import LogFile, find_log_files, read_lines
from phalanx.detect.logs.negations import without_negations
from phalanx.detect.logs.progress_lines import ProgressLine, may_be_of_step, progress_of

_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{1,80}(?:$|: )")
_LONGEST_TRACEBACK = 200  # lines
_ADDRESS = re.compile(
    r"(?:Bootstrap ?: Using|NET/Socket ?: Using|OOB|local address|listening on) .{0,40}?((?:\d{1,3}\.){3}\d{1,3})"
)
_NAMES = re.compile(r"\brank[ =:]{0,2}(\d{1,6})\b|(?<![\w.])((?:\d{1,3}\.){3}\d{1,3})(?![\w.])", re.IGNORECASE)
_WORK = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,12})", re.IGNORECASE)
_SEQUENCE = re.compile(r"\bSeqNum=(\d{1,12})")
_ROOT = re.compile(r"^\s*Root Cause \(first observed failure\)")
_ROOT_FIELD = re.compile(r"^\s*(?:\[\d+\]:)?\s*(host|rank|exitcode)\s*: (\S{1,120})(?: \(pid: (\d{1,9})\))?")
_WELL = re.compile(
    r"^\s*(?:\{['\"]train_runtime['\"]: \d|ended: all was done|successfully completed|Training completed\.|"
    r"training (?:has )?(?:finished|completed?|is done|done)\b|"
    r"`Trainer\.fit` stopped: `max_(?:steps|epochs)|exiting program at iteration|"
    r"job (?:finished|completed) successfully)", re.IGNORECASE,
)  # fmt: skip
_DONE = re.compile(r"^\s*(?:(?:all )?done|finished)\s?[.!]?\s*$", re.IGNORECASE)  # scripts say so of anything
_ERROR_WORDS = re.compile(
    r"^(?:Traceback \(most recent call last\)|.{0,80}\b(?:error|failed|failure|fatal|exception|abort(?:ed|ing)?)\b)",
    re.I,
)

_TROUBLE = re.compile(
    r"err|fail|fatal|xid|signal|status|code|exit|except|time|kill|warn|abort|lost|down|memory|\bnan\b|\binf\b|refused|closed|reset",
    re.IGNORECASE,
)
_MOST_CALM = 100_000
_MOST_CALM_ASKED = 10_000  # templates of harmless lines are only counted: where all of them differ, not without end
_STEPS = 256  # steps of which it is remembered when hosts logged them
_KEPT_PER_WRITER = 64
_MOST_WRITERS = 200_000
_SAMPLES = 64
_SERIES = 64  # of one writer: bars, words before steps, templates of lines without steps


StepKey = int | tuple[str, ...]
"""A step, or what a line without one says of the moment."""


@dataclass(frozen=True)
class LogEvent:
    """A line that says that something is wrong.

    Attributes:
        unix_s: by the clock of its host; None: not known.
        rank, host: whose line it is; None and empty: not known.
        number: of the line among its writer's.
        progress: how many steps its writer had logged.
        rule: that explains it; None: an error that no rule explains.
        named_host, named_ranks, addresses: of which others it speaks.
        template: of the line.
        raised: the exception that ends the traceback which this line begins.
        calm: how many lines its writer had written that show that it goes on.
        ends: whether the line says that something ended badly: an exception, an exit code, a signal.
        process: the id of the process of which it speaks, where its rule finds one.
    """

    text: str
    unix_s: float | None
    rank: int | None
    host: str
    source: Source
    level: Level
    writer: str
    number: int
    progress: int
    rule: LogRule | None
    template: int
    named_host: str = ""
    named_ranks: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    raised: str = ""
    calm: int = 0
    ends: bool = False
    process: int | None = None

    @property
    def writer_key(self) -> str:
        """Of whoever wrote it."""
        return _key(self.writer, self.source, self.rank, self.host)

    @property
    def place(self) -> str:
        """Such as ``rank 5 on gpu03``."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        return f"{rank} on {self.host}" if rank and self.host else rank or self.host or Path(self.writer).name


@dataclass
class Writer:
    """What is known of who wrote one log."""

    name: str
    source: Source
    rank: int | None
    host: str
    lines: int = 0
    first_s: float | None = None
    last_s: float | None = None
    progress: int = 0
    step: int = -1
    of_steps: int | None = None  # how many it is to make, as its last step says
    made_all: bool = False  # whether its last step was the last of all
    from_zero: bool = False  # whether its first step is 0
    garbled: int = 0  # lines that are no text
    progress_s: float | None = None
    enqueued: int | None = None
    ended_well: bool = False
    is_done: bool = False  # it ended well by no more than the word "done"
    calm: int = 0  # lines that show that it goes on
    end_number: int = -1  # of its last line that says that something ended badly
    end_progress: int = 0
    end_calm: int = 0
    at: dict[str, int] = field(default_factory=dict)  # the last step of each series of steps
    seen: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by template: the last mark of lines without steps
    ignores_next: bool = False
    traceback: str = ""  # the key of the event whose exception is still to come
    events: OrderedDict[str, LogEvent] = field(default_factory=OrderedDict)
    tail: deque[LogLine] | None = None

    @property
    def key(self) -> str:
        """That tells writers apart."""
        return _key(self.name, self.source, self.rank, self.host)

    def ends_badly(self, steps_after: int) -> bool:
        """Whether a line says so, and fewer than so many steps follow it."""
        return self.end_number >= 0 and not self.ended_well and self.progress - self.end_progress < steps_after


def _key(name: str, source: Source, rank: int | None, host: str) -> str:
    return f"{source} {host} {rank if rank is not None else name}"


@dataclass(frozen=True)
class RootCauseNote:
    """What torchrun writes at its end of the process that failed first."""

    host: str = ""
    rank: int | None = None
    exit_code: str = ""
    process: int | None = None


@dataclass(frozen=True)
class LogDigest:
    """What a job's lines say.

    Attributes:
        writers: by rank and host, or by file.
        progress_s: when the job logged a step that it had not logged before, the newest `_SAMPLES`.
        ahead_s: seconds that the clock of a host is ahead of the others', where that could be seen.
        addresses: hosts by address.
        templates, lines: how many.
        baseline: templates (masked texts) that healthy jobs have, too.
    """

    writers: tuple[Writer, ...]
    progress_s: tuple[float, ...]
    ahead_s: dict[str, float]
    addresses: dict[str, str]
    root_cause: RootCauseNote
    template_texts: dict[int, str]
    templates: int
    lines: int
    compressed_by: str
    known: frozenset[int] = frozenset()
    gone_on: int = 0

    @property
    def events(self) -> Iterator[LogEvent]:
        """All of all writers."""
        return (event for writer in self.writers for event in writer.events.values())

    @cached_property
    def by_key(self) -> dict[str, Writer]:
        """Writers by their keys."""
        return {writer.key: writer for writer in self.writers}

    @cached_property
    def made_all_steps(self) -> bool:
        """Whether all who log steps of a known number have made them, so that what follows is the job's end."""
        writers = [writer for writer in self.writers if writer.source == "output" and writer.progress]
        return bool(writers) and all(writer.made_all or writer.ended_well for writer in writers)

    @cached_property
    def _host_of_rank(self) -> dict[int, str]:
        return {writer.rank: writer.host for writer in self.writers if writer.rank is not None and writer.host}

    def host_of(self, rank: int) -> str:
        """Where a rank runs; empty: not known."""
        return self._host_of_rank.get(rank, "")

    def ranks_of(self, host: str) -> tuple[int, ...]:
        """Ranks of a host."""
        return tuple(sorted({w.rank for w in self.writers if w.host == host and w.rank is not None}))

    @cached_property
    def timed_hosts(self) -> frozenset[str]:
        """Hosts whose clocks are known against the steps of the job."""
        return frozenset({*self.ahead_s, *(writer.host for writer in self.writers if writer.progress)})

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """All that are named."""
        return tuple(sorted({writer.host for writer in self.writers if writer.host}))


def read_job(
    places: Iterable[Path],
    matcher: Matcher | None = None,
    *,
    healthy: Iterable[Path] = (),
    limits: TemplateLimits | None = None,
) -> LogDigest:
    """Read the logs of a job, and before them those of healthy jobs, whose lines are then no news.

    Raises:
        UserError: a place is not there, or a file cannot be read.
    """
    collector = DigestCollector(matcher or Matcher(load_rules(of_failed_jobs=True)), limits)
    for place in healthy:
        for _, line in read_lines(find_log_files([place])):
            collector.learn(line)
    for file, line in read_lines(find_log_files(list(places))):
        collector.add(file, line)
    return collector.digest()


class DigestCollector:
    """Takes lines, of each writer in order, and gives the digest.

    Args:
        tail_lines: of each writer since its last step that are kept as they are (`Writer.tail`), for learning.
    """

    def __init__(
        self,
        matcher: Matcher,
        limits: TemplateLimits | None = None,
        *,
        tail_lines: int = 0,
        guessed: GuessedRules | None = None,
    ) -> None:
        self._matcher, self._templates, self._tail_lines = matcher, Templates(limits), tail_lines
        self._guessed = guessed or GuessedRules()
        self._writers: dict[tuple[str, int | None, str], Writer] = {}
        self._known: set[int] = set()
        self._calm: set[str] = set()
        self._steps: OrderedDict[StepKey, dict[str, float]] = OrderedDict()
        self._step_first: OrderedDict[StepKey, float] = OrderedDict()
        self._addresses: dict[str, str] = {}
        self._root: dict[str, str] | None = None
        self._gone_on = 0
        self._lines = 0

    def learn(self, line: LogLine) -> None:
        """A line of a healthy job."""
        self._known.add(self._templates.add(line.text))

    def add(self, file: LogFile, line: LogLine) -> None:
        """A line of the job."""
        if line.host in self._addresses:  # Ray's lines name a process's host by its address
            line.host = self._addresses[line.host]
        self._lines += 1
        writer = self._writer(file, line)
        writer.lines += 1
        if line.unix_s is not None:
            writer.first_s = line.unix_s if writer.first_s is None else writer.first_s
            writer.last_s = line.unix_s
        text = line.text
        if not text or text.isspace():
            return
        if "\0" in text or "\ufffd" in text:
            writer.garbled += 1
        if writer.tail is not None:
            writer.tail.append(line)
        if writer.traceback:
            _follow_traceback(writer, text)
        if line.source == "output" and is_end(line) and not writer.ignores_next:
            writer.end_number, writer.end_progress, writer.end_calm = writer.lines, writer.progress, writer.calm
        key = masked(text)
        found = None if key in self._calm else self._find(text, key, line.source)
        is_calm = key in self._calm and line.level not in ("ERROR", "CRITICAL")
        template = self._templates.add_masked(key, most_asked=_MOST_CALM_ASKED if is_calm else None)
        if (found is None or (found[0].general and may_be_of_step(text))) and self._read_facts(writer, line, template):
            return
        rule = found[0] if found else None
        if rule is None and not self._is_error(line, template):
            writer.calm += says_calmly(line) and not writer.traceback
            return
        rule = self._guessed.better(rule, without_negations(text), line.level)
        if rule is None and not self._is_error(line, template):
            return
        if rule is not None and writer.ignores_next:  # an exception in a destructor, which Python only prints
            writer.ignores_next = False
            return
        event = _event(writer, line, rule, template, found[1].groupdict() if found else {})
        self._keep(writer, event)

    def _find(self, text: str, key: str, source: Source) -> tuple[LogRule, re.Match[str]] | None:
        """The rule of a line. Without a rule and a word of trouble it is not looked at again, whatever its numbers."""
        found = self._matcher.find_match(text, source)
        if found is not None and (said := without_negations(shorten(text))) != shorten(text):
            found = self._matcher.find_match(said, source)
        if found is None and len(text) <= LONGEST and not _TROUBLE.search(text):
            if len(self._calm) >= _MOST_CALM:
                self._calm.clear()
            self._calm.add(key)
        return found

    def digest(self) -> LogDigest:
        """Of the lines so far."""
        self._name_hosts()
        root = self._root or {}
        ahead_s = _clocks(self._steps)
        rank = root.get("rank", "")
        return LogDigest(
            writers=tuple(self._writers.values()),
            progress_s=self._progress_times(ahead_s),
            ahead_s=ahead_s,
            addresses=dict(self._addresses),
            root_cause=RootCauseNote(
                root.get("host", ""),
                int(rank) if rank.isdigit() else None,
                root.get("exitcode", ""),
                int(root["pid"]) if "pid" in root else None,
            ),
            template_texts={
                event.template: self._templates.text(event.template)
                for writer in self._writers.values()
                for event in writer.events.values()
            },
            templates=len(self._templates),
            lines=self._lines,
            compressed_by=self._templates.compressed_by,
            known=frozenset(self._known),
            gone_on=self._gone_on,
        )

    def _name_hosts(self) -> None:
        """Hosts that were known by their address when they wrote have the names that other lines gave them since."""
        for writer in self._writers.values():
            if name := self._addresses.get(writer.host):
                writer.host = name
                writer.events = OrderedDict((key, replace(one, host=name)) for key, one in writer.events.items())

    def _progress_times(self, ahead_s: dict[str, float]) -> tuple[float, ...]:
        """When the newest steps were logged first, by the job's clock."""
        times = []
        for step, first_s in self._step_first.items():
            known = [at_s - ahead_s[host] for host, at_s in self._steps.get(step, {}).items() if host in ahead_s]
            times.append(min(known, default=first_s))
        return tuple(sorted(times)[-_SAMPLES:])

    def _writer(self, file: LogFile, line: LogLine) -> Writer:
        key = (file.stream if line.rank is None else "", line.rank, line.host)
        if line.source == "kernel":
            key = ("kernel", None, line.host or file.stream)
        writer = self._writers.get(key)
        if writer is None:
            if len(self._writers) >= _MOST_WRITERS:
                return next(iter(self._writers.values()))
            writer = self._writers[key] = Writer(file.stream, line.source, line.rank, line.host)
            writer.tail = deque(maxlen=self._tail_lines) if self._tail_lines else None
        return writer

    def _read_facts(self, writer: Writer, line: LogLine, template: int) -> bool:
        """Steps, addresses, how far collectives came, torchrun's summary; whether the line was a step."""
        text = line.text
        if "ended" in text or "rain" in text or "uccess" in text or "xiting" in text:
            writer.ended_well |= bool(_WELL.match(text))
        elif _DONE.match(text) and not writer.ended_well:
            writer.is_done = all(event.progress < writer.progress for event in writer.events.values())
            writer.ended_well = writer.is_done
        if line.level not in ("ERROR", "CRITICAL") and (progress := progress_of(text)):
            if progress.step is not None:
                _see_end(writer, progress.step, progress)
                self._step(writer, line, progress.step, progress)
                return True
            if template in writer.seen and writer.seen[template] != progress.mark and not _WELL.match(text):
                self._moved(writer, line, progress.key or ("line", writer.key, str(writer.progress)))
                writer.calm += 1
            if len(writer.seen) < _SERIES or template in writer.seen:
                writer.seen[template] = progress.mark
        if writer.host and "sing" in text and (match := _ADDRESS.search(text)):
            self._addresses.setdefault(match[1], writer.host)
        if text.startswith(("Exception ignored in", "Exception in thread")):
            writer.ignores_next = text.startswith("Exception ignored")
        elif _ROOT.match(text):
            self._root = {}
        elif self._root is not None and len(self._root) < 4 and (match := _ROOT_FIELD.match(text)):
            self._root.setdefault(match[1], match[2])
            if match[3]:
                self._root.setdefault("pid", match[3])
        return False

    def _step(self, writer: Writer, line: LogLine, step: int, progress: ProgressLine) -> None:
        before = writer.at.get(progress.series, -1)
        if len(writer.at) < _SERIES or progress.series in writer.at:
            writer.at[progress.series] = step
        if step > before:
            is_full = progress.is_bar and step == progress.total
            writer.calm += 1
            self._moved(writer, line, step, has_ended=writer.ended_well and is_full)
            if not progress.is_other:
                writer.step = step

    def _moved(self, writer: Writer, line: LogLine, key: StepKey, *, has_ended: bool = False) -> None:
        """The writer made progress."""
        writer.progress += 1
        writer.progress_s = line.unix_s
        writer.ended_well, writer.is_done = has_ended, False
        if writer.tail is not None:
            writer.tail.clear()
        if line.unix_s is None:
            return
        if key not in self._step_first:
            self._step_first[key] = line.unix_s
            if len(self._step_first) > _STEPS:
                self._step_first.popitem(last=False)
        if line.host:
            at = self._steps.setdefault(key, {})
            at.setdefault(line.host, line.unix_s)
            if len(self._steps) > _STEPS:
                self._steps.popitem(last=False)

    def _is_error(self, line: LogLine, template: int) -> bool:
        if template in self._known:
            return False
        if line.level in ("ERROR", "CRITICAL"):
            return True
        return (
            line.level == ""
            and bool(_ERROR_WORDS.match(line.text))
            and (line.text.startswith("Traceback") or bool(_ERROR_WORDS.match(without_negations(shorten(line.text)))))
        )

    def _keep(self, writer: Writer, event: LogEvent) -> None:
        """The first of its kind since its writer last made progress stays."""
        if found := _WORK.search(event.text) or _SEQUENCE.search(event.text):
            number = int(found[1])
            writer.enqueued = number if writer.enqueued is None else min(writer.enqueued, number)
        process = event.process if event.source == "kernel" else None  # a kernel may kill several
        key = f"{event.rule.name if event.rule else event.template} {event.named_host} {process}"
        old = writer.events.get(key)
        if old is not None and old.progress == event.progress:
            return
        self._gone_on += old is not None
        if writer.is_done:
            writer.ended_well = writer.is_done = False
        writer.events[key] = event
        if event.text.startswith("Traceback"):
            writer.traceback = key
        writer.events.move_to_end(key)
        if len(writer.events) > _KEPT_PER_WRITER:
            writer.events.popitem(last=False)


def _see_end(writer: Writer, step: int, progress: ProgressLine) -> None:
    """How many steps a line says there are to be, and whether this is the last; steps of an evaluation are others."""
    if progress.is_other:
        return
    total = progress.total
    if total is None:
        if step > writer.step or not writer.made_all:
            writer.of_steps, writer.made_all = None, False
        return
    writer.of_steps = total
    writer.from_zero |= step == 0
    is_last = step >= writer.step and step + writer.from_zero >= total > 1
    writer.made_all = is_last and progress.is_last_epoch and not progress.is_bar


def _follow_traceback(writer: Writer, text: str) -> None:
    """Find the exception of a traceback: the first line that names one, else the first that is not of its frames."""
    event = writer.events.get(writer.traceback)
    if event is None or writer.lines - event.number > _LONGEST_TRACEBACK:
        writer.traceback = ""
    elif not text.startswith((" ", "\t", 'File "', "Traceback")):
        is_named = bool(_EXCEPTION.match(text))
        if is_named or not event.raised:
            writer.events[writer.traceback] = replace(event, raised=shorten(text))
        writer.traceback = "" if is_named else writer.traceback


def _event(
    writer: Writer, line: LogLine, rule: LogRule | None, template: int, groups: dict[str, str | None]
) -> LogEvent:
    ranks, addresses = [], []
    for match in _NAMES.finditer(line.text[:1000]):
        if match[1] is not None:
            ranks.append(int(match[1]))
        else:
            addresses.append(match[2])
    host = next((value for name, value in groups.items() if name.startswith("host") and value), "")
    return LogEvent(
        shorten(line.text), line.unix_s, line.rank, line.host, line.source, line.level, writer.name, writer.lines,
        writer.progress, rule, template, host, tuple(dict.fromkeys(ranks)), tuple(dict.fromkeys(addresses)),
        calm=writer.calm, ends=writer.end_number == writer.lines, process=process_of(line.text),
    )  # fmt: skip


def _clocks(steps: OrderedDict[StepKey, dict[str, float]]) -> dict[str, float]:
    """How far the clock of each host is ahead of the median, by steps that they logged together."""
    differences: dict[str, list[float]] = {}
    for at in steps.values():
        if len(at) < 2:
            continue
        middle = median(at.values())
        for host, unix_s in at.items():
            differences.setdefault(host, []).append(unix_s - middle)
    return {host: median(values) for host, values in differences.items() if len(values) >= 3}


def in_job_time(event: LogEvent, digest: LogDigest) -> LogEvent:
    """The event by the job's clock, where that of its host is known."""
    ahead = digest.ahead_s.get(event.host)
    return event if ahead is None or event.unix_s is None else replace(event, unix_s=event.unix_s - ahead)
