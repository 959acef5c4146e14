"""Whether a log says that its program ended badly, and whether a program went on after a line that looks like an error.

Libraries complain when they start (a plugin that is registered twice, a driver that is too old, a tool that is not
there) and go on. Such a line is no failure where its writer says other things after it and nobody in the job says that
anything ended: no traceback, no exit code, no rank that waits for another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.detect.logs.failure_classes import OUTSIDE, class_of
from phalanx.detect.logs.line_heads import LogLine

if TYPE_CHECKING:
    from phalanx.detect.logs.log_digest import LogDigest, LogEvent

_EXCEPTION = re.compile(
    r"^[\s\W]{0,8}(?:\[?rank ?\d{1,6}\]?:? ?)?(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"[A-Za-z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Failed|Timeout)(?:$|:|\()"
)
_END = re.compile(
    r"^Traceback \(most recent|^Fatal Python error|terminate called|^\s{0,4}what\(\): |panicked at|core dumped|"
    r"\bexit ?(?:ed|s|ing)?(?: |-)?(?:with )?(?:return ?)?(?:code|status)[ :=]{1,3}-?[1-9]\d{0,2}\b|"
    r"[Ss]egmentation fault|\breturn ?code ?= ?-?[1-9]|"
    r"exitcode ?: ?-?[1-9]|non-?zero exit|^[\s\W]{0,12}Killed$|\bKilled\b {2}|died with|[Cc]aught signal|got signal|"
    r"\bSIG(?:KILL|SEGV|ABRT|BUS|ILL|FPE)\b|OOM ?[Kk]illed|Out Of Memory$|Watchdog caught|"
    r"^Aborted|ChildFailedError|(?:mpirun|mpiexec|prterun)\S{0,8} (?:noticed|detected|has exited)|"
    r"(?:srun|slurmstepd|salloc): error: (?!.{0,60}(?:exited 0|chdir))|Assertion .{1,200} failed",
)
_OF_THE_END = re.compile(
    r"^\s|^[\W_]{0,200}$|^wandb: |NCCL INFO|^(?:During handling of|The above exception|File|Root Cause|Failures?:)|"
    r"^(?:srun|slurmstepd|salloc|scancel): |closing signal|^[a-z_ ]{1,16} : "
)
_TRIES_AGAIN = re.compile(
    r"\bretry(?:ing)?\b|\b(?:will|to) be (?:\w{1,16}ly )?retried\b|will try again|trying again|"
    r"\bre-?connect(?:ing|ed)\b|attempt \d+ ?(?:/|of|out of) ?\d+|"
    r"\bfall(?:ing|s)? ?back\b|\bskipp(?:ed|ing)\b|\bignor(?:ed|ing)\b|\boptional\b|\bsub-?optimal\b|"
    r"\brecovered\b|\bharmless\b|\bdeprecat",
    re.IGNORECASE,
)
_GIVES_UP = re.compile(
    r"max(?:imum)? (?:number of )?retries|retries exceeded|retry (?:count|counter|limit) (?:was )?exceeded|"
    r"giving up|gave up|after \d+ (?:retries|attempts)",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\b(?:will|shall) (?:be )?ignored?\b|\band continue\b|\bcontinuing (?:with|without|anyway)\b|"
    r"\b[A-Z][a-z]\w{2,40}Warning: |"
    r"thrown while requesting (?:GET|HEAD)\b",
    re.IGNORECASE,
)  # however grave what they quote
_CALM_LINES = 2
_NEAR_LINES = 5  # that a writer may say calmly between a line of a general rule and its end
_END_LINES = 200


def tries_again(text: str) -> bool:
    """Whether a line says that its program does something once more, or does without it."""
    return bool(_TRIES_AGAIN.search(text))


def gives_up(text: str) -> bool:
    """Whether a line says that its program had tried often enough."""
    return bool(_GIVES_UP.search(text))


def goes_on(text: str) -> bool:
    """Whether a line only warns, or says that its program goes on whatever it tells."""
    return bool(_GOES_ON.search(text))


def is_end(line: LogLine) -> bool:
    """Whether a line says that its program, or a part of the job, ended badly."""
    if line.level in ("DEBUG", "INFO", "WARNING"):
        return False
    return bool(_EXCEPTION.match(line.text) or _END.search(line.text, 0, 600))


def says_calmly(line: LogLine) -> bool:
    """Whether a line that no rule knows shows that its program goes on, and is no part of how a program ends."""
    return line.level not in ("ERROR", "CRITICAL") and not _OF_THE_END.search(line.text, 0, 400)


def went_on(event: LogEvent, digest: LogDigest, steps_after: int) -> bool:
    """Whether its writer only went on after a line, while nobody ended or waited: then it shows no failure yet."""
    rule = event.rule
    kind = class_of(rule.kind) if rule is not None else None
    writer = digest.by_key.get(event.writer_key)
    if event.source != "output" or writer is None or event.ends:
        return False
    if kind is not None and (kind.name == OUTSIDE or kind.depth >= class_of("ECC error").depth):
        return False
    calm = writer.calm - event.calm
    if calm < _CALM_LINES:
        return False
    is_general = rule is None or rule.general
    own_end = writer.end_number - event.number
    if 0 <= own_end < _END_LINES:
        return is_general and writer.end_calm - event.calm > _NEAR_LINES
    others = any(one.ends_badly(steps_after) for one in digest.writers if one is not writer)
    return not others or (is_general and calm > _NEAR_LINES)
