"""Rules learnt from labelled incidents: templates that only incidents of one class have.

    {"logs": "jobs/17", "class": "storage error", "host": "gpu03"}       one incident a line; host may be missing
    {"logs": "jobs/18", "class": "healthy"}

Acme (arXiv 2403.07648, section 5) lets a language model write such patterns; here a template has to earn its place by
counting: it occurs in several incidents of one class, in none or hardly any of the others, in no healthy job, and,
where the host is known, not on the hosts that only noticed. What lines of victims and tracebacks have in common with
other classes falls out by itself. The file is one of rules, for `phalanx detect logs --rules` and ``run.rules`` of
`phalanx run`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES, class_of
from phalanx.detect.logs.line_templates import masked
from phalanx.detect.logs.log_digest import DigestCollector
from phalanx.detect.logs.log_rules import Matcher, Source, load_rules
from phalanx.detect.logs.log_sources import find_log_files, read_lines

HEALTHY = "healthy"

_TAIL_LINES = 60
_LONGEST = 160
_PLACE = re.compile(r"<(URL|PATH|ADDR|UUID|PCI|HEX|HOST|N)>")
_AT_A_STEP = re.compile(r"\s*File \"|\s*\^+$|Traceback \(most")


class LearningPolicy(Config):
    """When a template becomes a rule."""

    least_incidents: int = Field(3, ge=2, description="incidents of the class that have the template")
    precision: float = Field(
        0.95, gt=0.5, le=1, description="share of incidents with the template that are of the class"
    )
    chance: float = Field(
        0.05, gt=0, lt=1, description="how likely a template without a meaning falls on so many jobs of one class"
    )


@dataclass(frozen=True)
class LabelledIncident:
    """Logs of a job, what it failed of (`HEALTHY`: it did not), and on which host; empty: not known, or on none."""

    logs: Path
    kind: str
    host: str = ""


@dataclass
class LearntRule:
    """A template that separates: in `incidents` of its class, in `others` of other ones."""

    kind: str
    template: str
    source: Source
    incidents: int
    others: int
    examples: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """Share of the incidents with it that are of its class."""
        return self.incidents / (self.incidents + self.others)


def read_labels(path: Path) -> list[LabelledIncident]:
    """A file of labels, one JSON object a line; paths are relative to the file.

    Raises:
        UserError: it cannot be read, or a line is wrong; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", cure="give a file of labels", value=str(path)) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            row = json.loads(line)
            incident = LabelledIncident(path.parent / row["logs"], str(row["class"]), str(row.get("host") or ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            cure = 'write {"logs": "jobs/17", "class": "storage error", "host": "gpu03"}; "healthy" is a class, too'
            raise UserError("is no label", cure=cure, field=place, value=line[:80]) from None
        if incident.kind not in FAILURE_CLASSES and incident.kind != HEALTHY:
            cure = f"one of {', '.join([*FAILURE_CLASSES, HEALTHY])}"
            raise UserError("is no class of failure", cure=cure, field=place, value=incident.kind)
        if not incident.logs.exists():
            raise UserError(
                "is not there", cure="paths are relative to the file of labels", field=place, value=row["logs"]
            )
        found.append(incident)
    return found


def learn_rules(
    incidents: Sequence[LabelledIncident], policy: LearningPolicy | None = None, refused: Counter[str] | None = None
) -> list[LearntRule]:
    """Templates that separate, those of most incidents first.

    Args:
        refused: takes why templates did not become rules, and how many.
    """
    policy = policy or LearningPolicy()
    refused = Counter() if refused is None else refused
    matcher = Matcher(load_rules(of_failed_jobs=True))
    with_template: dict[tuple[str, Source], Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, Source], list[str]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    spoilt: set[tuple[str, Source]] = set()
    for incident in incidents:
        sizes[incident.kind] += 1
        own, elsewhere = _templates_of(incident, matcher)
        if incident.kind == HEALTHY:
            spoilt |= own.keys()
            continue
        spoilt |= elsewhere
        for key, line in own.items():
            with_template[key][incident.kind] += 1
            if len(examples[key]) < 3 and line not in examples[key]:
                examples[key].append(line)
    rules = []
    for key, kinds in with_template.items():
        (kind, count), *_ = kinds.most_common(1)
        others = sum(kinds.values()) - count
        rule = LearntRule(kind, key[0], key[1], count, others, examples[key])
        if key in spoilt:
            refused["occur in healthy jobs, too, or on hosts that only noticed"] += 1
        elif count < policy.least_incidents:
            refused[f"occur in too few incidents: a rule needs {policy.least_incidents} of one class"] += 1
        elif rule.precision < policy.precision:
            refused["occur in incidents of several classes"] += 1
        elif _by_chance(count, count + others, sizes[kind], sizes.total()) > policy.chance:
            refused["may fall on one class by chance: label more healthy jobs, or incidents of other classes"] += 1
        else:
            rules.append(rule)
    return sorted(rules, key=lambda rule: (-rule.incidents, rule.kind, rule.template))


def _by_chance(count: int, having: int, of_class: int, jobs: int) -> float:
    """How likely `having` of all labelled jobs, healthy ones included, picked at random hold `count` of the class."""
    ways = sum(
        math.comb(of_class, drawn) * math.comb(jobs - of_class, having - drawn)
        for drawn in range(count, min(having, of_class) + 1)
    )
    return ways / math.comb(jobs, having)


def write_rules(path: Path, rules: Iterable[LearntRule]) -> None:
    """Write them as a file of rules, and check that it is one.

    Raises:
        UserError: it is refused; nothing is left then.
        OSError: it cannot be written.
    """
    lines = ["# Rules learnt from labelled incidents (docs/detect_logs.md). Support and precision stand in `meaning`."]
    numbers: Counter[str] = Counter()
    for rule in rules:
        numbers[rule.kind] += 1
        found = class_of(rule.kind)
        host = {"infrastructure": "host", "framework": "user", "script": "user"}.get(found.family, "unknown")
        fault = {"storage error": "storage", "network error": "network", "connection error": "network"}.get(
            rule.kind, host
        )
        share = f"{rule.incidents} incidents, precision {rule.precision:.2f}"
        lines += [
            "",
            f"[learnt-{re.sub(r'[^a-z0-9]+', '-', rule.kind.lower())}-{numbers[rule.kind]}]",
            f'where = "{rule.source}"',
            f"pattern = {json.dumps(pattern_of(rule.template))}",
            f'fault = "{fault}"',
            'severity = "fatal"',
            f"kind = {json.dumps(rule.kind)}",
            f"meaning = {json.dumps(f'{rule.kind}, learnt from {share}')}",
            'action = "see what was done about the incidents that it was learnt from"',
            f"matches = {json.dumps(rule.examples)}",
        ]
    text = "\n".join(lines) + "\n"
    write_bytes(path, text.encode())
    try:
        load_rules([path])
    except UserError:
        path.unlink(missing_ok=True)
        raise


def pattern_of(template: str) -> str:
    """A regular expression for lines of a masked template, without a repetition that could explode."""
    parts = _PLACE.split(template)
    made = "".join(re.escape(part) if number % 2 == 0 else r"\S{1,200}" for number, part in enumerate(parts))
    return re.sub(r"(?:\\ )+", r"\\s{1,8}", made)


def _templates_of(
    incident: LabelledIncident, matcher: Matcher
) -> tuple[dict[tuple[str, Source], str], set[tuple[str, Source]]]:
    """Of the lines since the last step: where it failed, with an example each; and of other hosts."""
    collector = DigestCollector(matcher, tail_lines=_TAIL_LINES)
    own: dict[tuple[str, Source], str] = {}
    for file, line in read_lines(find_log_files([incident.logs])):
        collector.add(file, line)
        if incident.kind == HEALTHY and line.text.strip():
            own[masked(line.text)[:_LONGEST], line.source] = line.text
    if incident.kind == HEALTHY:
        return own, set()
    elsewhere: set[tuple[str, Source]] = set()
    for writer in collector.digest().writers:
        for line in writer.tail or ():
            text = line.text.strip()
            if len(text) < 12 or _AT_A_STEP.match(text):
                continue
            rule = matcher.find(text, line.source)
            if rule is not None and (rule.kind == incident.kind or rule.notices):
                continue
            key = masked(text)[:_LONGEST], line.source
            if incident.host and writer.host and writer.host != incident.host:
                elsewhere.add(key)
            else:
                own.setdefault(key, text)
    return own, elsewhere
