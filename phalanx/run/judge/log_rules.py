"""Log rules: which class of fault a line of a rank or of the kernel speaks of, by regular expressions.

What can be said of a regular expression without running it: texts that a match contains, and whether it may explode.

Python's own parser of regular expressions is used (``re._parser``, which is not public), and only here.

Rules for lines that ranks and kernels write: what a line says is wrong, which class of fault it is, and what to do.

The rules stand in ``rules.toml`` beside this file; a user adds files of the same form, whose rules come first and may
change or switch off ours by name. `Matcher` finds the rule of a line, `Watcher` also leaves out what repeats.
"""

from __future__ import annotations

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from phalanx.core.config import Config, validate
from phalanx.core.errors import UserError
from phalanx.run.messages import Finding, Severity

FLAGS = re.IGNORECASE | re.ASCII
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_MANY = 16
"""From how many turns on a repetition counts as one without end."""
_ENDLESS = 400
_SHORTEST = 3


def required_texts(pattern: str) -> frozenset[str] | None:
    """Texts in lower case, one of which every line that the pattern matches contains; None: nothing can be said.

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
        found.append(_of_part(code, value))
    found.append(frozenset([run]))
    return max(found, key=lambda texts: min(map(len, texts), default=0))


def _of_part(code: Any, value: Any) -> frozenset[str]:
    if code is codes.SUBPATTERN:
        return _of_sequence(value[3])
    if code is codes.ATOMIC_GROUP:
        return _of_sequence(value)
    if code is codes.BRANCH:
        branches = [_of_sequence(branch) for branch in value[1]]
        return frozenset().union(*branches) if all(any(texts) for texts in branches) else frozenset()
    if code in _REPEATS and value[0] > 0:
        return _of_sequence(value[2])
    return frozenset()


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
Fault = Literal["user", "process", "host", "network", "storage", "unknown"]

KERNEL_RANK = -1
"""The rank of a line of the kernel log."""

LONGEST_LINE = 2000
"""Characters of a line that are looked at: the first three quarters of them, and the last quarter."""

_LONG_TEXT = 5
"""Texts from this length on are rare enough in logs for the one prefilter; a rule with shorter ones is tried apart."""


class Rule(Config):
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
    meaning: str = Field(min_length=1, description="what such a line means")
    action: str = Field(min_length=1, description="what to do about it")
    matches: tuple[str, ...] = Field(min_length=1, description="real lines that the pattern must match")
    spares: tuple[str, ...] = Field((), description="lines that the pattern must not match")
    enabled: bool = Field(True, description="whether it is used")


def load_rules(files: Sequence[Path] = ()) -> tuple[Rule, ...]:
    """Our rules, changed and added to by `files` in order.

    A table named as a rule that is already there changes the fields that it gives (``enabled = false`` switches the
    rule off); with a new pattern it brings its own examples. New rules come before ours, in their order.

    Raises:
        UserError: a file cannot be read, is no TOML, or has a rule that is refused; it names file, rule and field.
    """
    ours = resources.files("phalanx.run.judge").joinpath("rules.toml").read_text(encoding="utf-8")
    trees = _tables(ours, "rules.toml")
    names = list(trees)
    rules = {name: _rule(name, tree, "rules.toml") for name, tree in trees.items()}
    for path in files:
        added = []
        for name, tree in _tables(_read(path), str(path)).items():
            added += [] if name in trees else [name]
            trees[name] = _merge(trees.get(name, {}), tree)
            rules[name] = _rule(name, trees[name], str(path))
        names = added + names
    return tuple(rules[name] for name in names if rules[name].enabled)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in old.items() if key not in ("matches", "spares")} if "pattern" in new else old
    return {**kept, **new}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", cure="save the rule file as UTF-8", value=str(path)) from None
    except OSError as error:
        problem = f"this rule file cannot be read ({error.strerror})"
        raise UserError(problem, cure="check the path", value=str(path)) from None


def _tables(text: str, source: str) -> dict[str, dict[str, Any]]:
    try:
        trees = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"is not valid TOML: {error}", cure="correct that line", value=source) from None
    for name, tree in trees.items():
        if not isinstance(tree, dict):
            cure = f"write [{name}] on a line of its own and its fields below"
            raise UserError("is not a table, as every rule is", cure=cure, field=f"{source}: {name}", value=tree)
    return trees


def _rule(name: str, tree: Mapping[str, Any], source: str) -> Rule:
    place = f"{source}: [{name}]"
    try:
        rule = validate(Rule, {**tree, "name": name})
    except UserError as error:
        raise UserError(str(error), cure="the fields are in docs/run_detection.md", field=place) from None
    _check_pattern(rule, place)
    compiled = re.compile(rule.pattern, FLAGS)
    for field, wanted in (("matches", True), ("spares", False)):
        for line in getattr(rule, field):
            if bool(compiled.search(shorten(line))) is not wanted:
                problem = "the pattern does not match this line" if wanted else "the pattern matches this line"
                cure = "correct the pattern or the example"
                raise UserError(problem, cure=cure, field=f"{place} {field}", value=line)
    return rule


def _check_pattern(rule: Rule, place: str) -> None:
    field = f"{place} pattern"
    try:
        explosive = may_explode(rule.pattern)
    except re.error as error:
        cure = "correct it; in TOML, write it between single quotes"
        raise UserError(f"is no regular expression ({error})", cure=cure, field=field, value=rule.pattern) from None
    if explosive:
        problem = "has a repetition within a repetition, or more than two without end: some lines would take for ever"
        raise UserError(problem, cure="give them limits, such as .{0,80}", field=field, value=rule.pattern)


def shorten(line: str) -> str:
    """The part of a line that is looked at."""
    if len(line) <= LONGEST_LINE:
        return line
    tail = LONGEST_LINE // 4
    return line[: LONGEST_LINE - tail] + line[-tail:]


@dataclass(frozen=True)
class _Compiled:
    rule: Rule
    pattern: re.Pattern[str]
    texts: frozenset[str] | None

    def search(self, text: str, lower: str) -> re.Match[str] | None:
        if self.texts is not None and not any(needed in lower for needed in self.texts):
            return None
        return self.pattern.search(text)


class _Sieve:
    """The rules of one source of lines, with one prefilter that most lines do not pass."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._all = [_Compiled(rule, re.compile(rule.pattern, FLAGS), required_texts(rule.pattern)) for rule in rules]
        self._apart = [one for one in self._all if one.texts is None or min(map(len, one.texts)) < _LONG_TEXT]
        texts = {text for one in self._all if one not in self._apart for text in one.texts or ()}
        needed = sorted(text for text in texts if not any(other != text and other in text for other in texts))
        self._prefilter = re.compile("|".join(map(re.escape, needed)) or r"(?!)")

    def find(self, line: str) -> tuple[Rule, re.Match[str]] | None:
        text = shorten(line)
        lower = text.lower()
        for one in self._all if self._prefilter.search(lower) else self._apart:
            if (match := one.search(text, lower)) is not None:
                return one.rule, match
        return None


class Matcher:
    """Finds what a line says: the first of `rules` that it matches."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.by_name = {rule.name: rule for rule in self.rules}
        self._sieves = {
            source: _Sieve(rule for rule in self.rules if rule.where in (source, "any"))
            for source in ("output", "kernel")
        }

    def find(self, line: str, source: Source) -> Rule | None:
        """The rule of a line, if one matches; it never raises, whatever the line is."""
        found = self._sieves[source].find(line)
        return found[0] if found else None

    def find_which(self, line: str, source: Source) -> tuple[Rule, str] | None:
        """The same, with what the pattern's group `which` has found (empty without one)."""
        found = self._sieves[source].find(line)
        return found and (found[0], found[1].groupdict().get("which") or "")


class Watcher:
    """Turns lines into findings, and leaves out what the same rank said of the same thing within `window_s`.

    At most `capacity` of what was said last are remembered.
    """

    def __init__(self, matcher: Matcher, window_s: float = 60.0, capacity: int = 4096) -> None:
        self._matcher = matcher
        self._window_s = window_s
        self._capacity = capacity
        self._said: OrderedDict[tuple[int, str, str], float] = OrderedDict()
        self.left_out: dict[str, int] = {}
        """How many findings were left out, by the name of the rule."""

    def look(self, rank: int, line: str, now_s: float) -> Finding | None:
        """What a line says, unless it was said just before.

        Args:
            rank: who wrote it; `KERNEL_RANK` for the kernel log.
            line: without its newline.
            now_s: any clock that does not go back.
        """
        found = self._matcher.find_which(line, "kernel" if rank == KERNEL_RANK else "output")
        if found is None:
            return None
        rule, which = found
        key = (rank, rule.name, which)
        if now_s - self._said.get(key, float("-inf")) < self._window_s:
            self.left_out[rule.name] = self.left_out.get(rule.name, 0) + 1
            return None
        self._said[key] = now_s
        self._said.move_to_end(key)
        if len(self._said) > self._capacity:
            self._said.popitem(last=False)
        return Finding(rank, rule.name, rule.fault, shorten(line), rule.severity)

    def forget(self) -> None:
        """A new attempt begins: what is said again is said of that."""
        self._said.clear()
