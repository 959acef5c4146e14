"""Log rules: which class of fault a line of a rank or of the kernel speaks of, and what to do about it.

The rules stand in ``rules.toml`` beside this file, which `phalanx run` uses, too; a user adds files of the same form,
whose rules come first and may change or switch off ours by name. `Matcher` finds the rule of a line.

What can be said of a regular expression without running it (texts that a match contains, and whether it may explode)
is read from Python's own parser of regular expressions (``re._parser``, which is not public), and only here.
"""

from __future__ import annotations

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from phalanx.core.config import Config, validate
from phalanx.core.errors import UserError

FLAGS = re.IGNORECASE | re.ASCII
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_MANY = 16  # from how many turns on a repetition counts as one without end
_ENDLESS = 400
_SHORTEST = 3


def required_texts(pattern: str) -> frozenset[str] | None:
    """Texts in lower case, one of which every line that the pattern matches contains; None: not known.

    Raises:
        re.error: it is not a regular expression.
    """
    texts = _of_sequence(parser.parse(pattern, FLAGS))
    return texts if texts and min(map(len, texts)) >= _SHORTEST else None


def may_explode(pattern: str) -> bool:
    """Whether matching may take far too long on some line.

    That is so when a repetition holds another one (time exponential in the length of the line), or when more than two
    have no limit (its fourth power).

    Raises:
        re.error: it is not a regular expression.
    """
    parsed = parser.parse(pattern, FLAGS)
    return _nests(parsed, within=False) or _endless(parsed) > 2


def _of_sequence(items: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The best that its parts give: those whose shortest text is longest."""
    found: list[frozenset[str]] = []
    run = ""
    for code, value in items:
        if code is codes.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        found.append(frozenset([run]))
        run = ""
        if code is codes.SUBPATTERN:
            found.append(_of_sequence(value[3]))
        elif code is codes.ATOMIC_GROUP:
            found.append(_of_sequence(value))
        elif code is codes.BRANCH:
            branches = [_of_sequence(branch) for branch in value[1]]
            found.append(frozenset().union(*branches) if all(any(texts) for texts in branches) else frozenset())
        elif code in _REPEATS and value[0] > 0:
            found.append(_of_sequence(value[2]))
    found.append(frozenset([run]))
    return max(found, key=lambda texts: min(map(len, texts), default=0))


def _nests(items: Iterable[tuple[Any, Any]], within: bool) -> bool:
    for code, value in items:
        if code in _REPEATS:
            many = value[1] >= _MANY
            if (many and within) or _nests(value[2], within or many):
                return True
        elif any(_nests(part, within) for part in _parts(code, value)):
            return True
    return False


def _endless(items: Iterable[tuple[Any, Any]]) -> int:
    """How many repetitions without a limit one match may go through."""
    count = 0
    for code, value in items:
        if code in _REPEATS:
            count += (value[1] >= _ENDLESS) + _endless(value[2])
        else:
            inner = [_endless(part) for part in _parts(code, value)]
            count += max(inner, default=0) if code is codes.BRANCH else sum(inner)
    return count


def _parts(code: Any, value: Any) -> Sequence[Iterable[tuple[Any, Any]]]:
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code is codes.ATOMIC_GROUP:
        return [value]
    if code is codes.BRANCH:
        return list(value[1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [value[1]]
    if code is codes.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return []


Source = Literal["output", "kernel"]
Severity = Literal["note", "alarm", "fatal"]
Fault = Literal["user", "process", "host", "network", "storage", "unknown"]

LONGEST_LINE = 2000  # characters of a line that are looked at: the first three quarters of them, and the last quarter
_OF_FAILED_JOBS = (
    "harmless_rules.toml", "failure_rules.toml", "rules.toml", "exception_rules.toml", "wording_rules.toml",
)  # fmt: skip
_LONG_TEXT = 5
"""Texts from this length on are rare enough in logs for the one prefilter; a rule with shorter ones is tried apart."""


class LogRule(Config):
    """What one kind of line means."""

    name: str
    where: Literal["output", "kernel", "any"] = Field(
        description="which lines it is for: output (of ranks), kernel, or any"
    )
    pattern: str = Field(
        min_length=1,
        description="a regular expression; capitals do not matter; a group named `which` tells devices apart",
    )
    fault: Fault = Field(description="the class of fault: user, process, host, network, storage or unknown")
    severity: Severity = Field(
        description="note (written down), alarm (shown, counts against a suspect) or fatal (training cannot go on)"
    )
    kind: str = Field(
        "", description="the class of failure for `phalanx detect logs` (its names: docs/detect_logs.md); empty: none"
    )
    notices: bool = Field(False, description="whether the writer only notices what happened elsewhere")
    general: bool = Field(
        False, description="whether it says so little that the words of a line may know better (`phalanx detect logs`)"
    )
    meaning: str = Field(min_length=1, description="what such a line means")
    action: str = Field(min_length=1, description="what to do about it")
    matches: tuple[str, ...] = Field(min_length=1, description="real lines that the pattern must match")
    spares: tuple[str, ...] = Field((), description="lines that the pattern must not match")
    enabled: bool = Field(True, description="whether it is used")


def load_rules(files: Sequence[Path] = (), *, of_failed_jobs: bool = False) -> tuple[LogRule, ...]:
    """Our rules, changed and added to by `files` in order.

    Args:
        of_failed_jobs: with those that only make sense of a job that has ended, such as every exception of Python by
            its class. A driver sees how processes end, and needs none of them.

    A table named as a rule that is already there changes the fields that it gives (``enabled = false`` switches the
    rule off); with a new pattern it brings its own examples. New rules come before ours, in their order.

    Raises:
        UserError: a file cannot be read, is not TOML, or has a rule that is refused; it names file, rule and field.
    """
    trees: dict[str, dict[str, Any]] = {}
    rules: dict[str, LogRule] = {}
    for source in _OF_FAILED_JOBS if of_failed_jobs else ("rules.toml",):
        text = resources.files("phalanx.detect.logs").joinpath(source).read_text(encoding="utf-8")
        own = _tables(text, source)
        trees |= own
        rules |= {name: _rule(name, tree, source) for name, tree in own.items()}
    names = list(trees)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError("is not UTF-8 text", cure="save the rule file as UTF-8", value=str(path)) from None
        except OSError as error:
            problem = f"this rule file cannot be read ({error.strerror})"
            raise UserError(problem, cure="check the path", value=str(path)) from None
        added = []
        for name, tree in _tables(text, str(path)).items():
            added += [] if name in trees else [name]
            old = trees.get(name, {})
            if "pattern" in tree:  # the examples are those of the old one
                old = {key: value for key, value in old.items() if key not in ("matches", "spares")}
            trees[name] = {**old, **tree}
            rules[name] = _rule(name, trees[name], str(path))
        names = added + names
    return tuple(rules[name] for name in names if rules[name].enabled)


def _tables(text: str, source: str) -> dict[str, dict[str, Any]]:
    try:
        trees = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid TOML: {error}", cure="correct that line", value=source) from None
    for name, tree in trees.items():
        if not isinstance(tree, dict):
            cure = f"write [{name}] on a line of its own and its fields below"
            raise UserError("is not a table, as every rule is", cure=cure, field=f"{source}: {name}", value=tree)
    return trees


def _rule(name: str, tree: Mapping[str, Any], source: str) -> LogRule:
    place = f"{source}: [{name}]"
    try:
        rule = validate(LogRule, {**tree, "name": name})
    except UserError as error:
        raise UserError(str(error), cure="the fields are in docs/run_detection.md", field=place) from None
    try:
        explosive = may_explode(rule.pattern)
    except re.error as error:
        problem, cure = f"is no regular expression ({error})", "correct it; in TOML, write it between single quotes"
        raise UserError(problem, cure=cure, field=f"{place} pattern", value=rule.pattern) from None
    if explosive:
        problem = "has a repetition within a repetition, or more than two without end: some lines would take for ever"
        cure = "give them limits, such as .{0,80}"
        raise UserError(problem, cure=cure, field=f"{place} pattern", value=rule.pattern)
    compiled = re.compile(rule.pattern, FLAGS)
    for field, wanted in (("matches", True), ("spares", False)):
        for line in getattr(rule, field):
            if bool(compiled.search(shorten(line))) is not wanted:
                problem = "the pattern does not match this line" if wanted else "the pattern matches this line"
                cure = "correct the pattern or the example"
                raise UserError(problem, cure=cure, field=f"{place} {field}", value=line)
    return rule


def shorten(line: str) -> str:
    """The part of a line that is looked at."""
    if len(line) <= LONGEST_LINE:
        return line
    tail = LONGEST_LINE // 4
    return line[: LONGEST_LINE - tail] + line[-tail:]


class _CompiledRule(NamedTuple):
    rule: LogRule
    pattern: re.Pattern[str]
    texts: frozenset[str] | None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of these texts: a tree by their letters, eight times as fast as one after the other."""
    return re.compile(_tree(sorted(set(texts))) if texts else r"(?!)")


def _tree(texts: Sequence[str]) -> str:
    if "" in texts:  # what is longer contains it
        return ""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _tree(rest) for first, rest in by_first.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class _RuleSet:
    """The rules of one source of lines, with prefilters that most lines do not pass."""

    def __init__(self, rules: Iterable[LogRule]) -> None:
        self._all = [
            _CompiledRule(rule, re.compile(rule.pattern, FLAGS), required_texts(rule.pattern)) for rule in rules
        ]
        self._apart = [one for one in self._all if one.texts is None or min(map(len, one.texts)) < _LONG_TEXT]
        self._always = [one for one in self._all if one.texts is None]
        self._prefilter = any_of([text for one in self._all if one not in self._apart for text in one.texts or ()])
        self._prefilter_apart = any_of([text for one in self._apart for text in one.texts or ()])

    def find(self, line: str) -> tuple[LogRule, re.Match[str]] | None:
        text = shorten(line)
        lower = text.lower()
        # Nearly all lines match no rule: one search for all long texts at once, and one for the short, sort them out.
        if self._prefilter.search(lower):
            rules = self._all
        else:
            rules = self._apart if self._prefilter_apart.search(lower) else self._always
        for one in rules:
            may_match = one.texts is None or any(needed in lower for needed in one.texts)
            if may_match and (match := one.pattern.search(text)) is not None:
                return one.rule, match
        return None


class Matcher:
    """Finds what a line says: the first of `rules` that it matches."""

    def __init__(self, rules: Iterable[LogRule]) -> None:
        self.rules = tuple(rules)
        self.by_name = {rule.name: rule for rule in self.rules}
        self._sets = {
            source: _RuleSet(rule for rule in self.rules if rule.where in (source, "any"))
            for source in ("output", "kernel")
        }

    def find(self, line: str, source: Source) -> LogRule | None:
        """The rule of a line, if one matches; it never raises, whatever the line is."""
        found = self._sets[source].find(line)
        return found[0] if found else None

    def find_match(self, line: str, source: Source) -> tuple[LogRule, re.Match[str]] | None:
        """The same, with what the pattern has found in the line (or in what `shorten` leaves of it)."""
        return self._sets[source].find(line)

    def find_which(self, line: str, source: Source) -> tuple[LogRule, str] | None:
        """The same, with what the pattern's group `which` has found (empty without one)."""
        found = self._sets[source].find(line)
        return found and (found[0], found[1].groupdict().get("which") or "")
