"""Rules for lines that no particular rule knows: what their words tell (`line_classifier`), as a rule."""

from __future__ import annotations

import re
from functools import cached_property

from phalanx.detect.logs.failure_classes import class_of
from phalanx.detect.logs.line_classifier import HARMLESS, LineClassifier, LineGuess
from phalanx.detect.logs.log_rules import Fault, LogRule

LEAST_SURE = 0.6
SURE = 0.9
"""Where a rule names what a line speaks of; the other general rules only say that an exception was raised."""
SURE_OF_NOTICE = 0.75
"""Whoever only notices is no cause, and what it says later a consequence: not to be said of a cause lightly."""
WORDS = "words-"
GUESSED = "guessed-"
_SAYS_LITTLE = ("runtime error", "OS error")
_OTHER_EXCEPTIONS = frozenset({
    "assertion error", "attribute error", "index error", "key error", "name error", "syntax error", "type error",
    "value error", "zero division error",
})  # fmt: skip
_NAMES_ITSELF = re.compile(r"\b(?:RuntimeError|OSError|IOError|NotImplementedError)\b")
_ANNOUNCES = re.compile(r":\s*$")
_CALM_LEVELS = ("DEBUG", "INFO", "WARNING")
_FAULTS: dict[str, Fault] = {"storage error": "storage", "network error": "network", "connection error": "network"}


class GuessedRules:
    """Gives a line without a rule, or with one that says little, the rule that its words speak for.

    Args:
        classifier: None: the shipped one, made when it is first needed.
        least_sure: below which it abstains.
    """

    def __init__(self, classifier: LineClassifier | None = None, least_sure: float = LEAST_SURE) -> None:
        self._given, self._least_sure = classifier, least_sure
        self._rules: dict[tuple[str, bool], LogRule] = {}

    def better(self, rule: LogRule | None, text: str, level: str) -> LogRule | None:
        """The rule of a line that is an error: `rule`, or one that is guessed.

        Args:
            rule: that matches; None: none does.
        """
        if rule is not None and not rule.general:
            return rule
        if level in _CALM_LEVELS:
            return None
        if rule is None and _ANNOUNCES.search(text):  # "Error in call to target 'x':" says what follows, not what it is
            return None
        guess = self._classifier.guess(text)
        if guess is None or guess.kind == HARMLESS:
            return rule
        if guess.kind in _OTHER_EXCEPTIONS and _NAMES_ITSELF.search(text):  # an exception is of the class that it names
            return rule
        if guess.notices and rule is None and guess.sureness < SURE_OF_NOTICE:
            return None
        is_named = rule is not None and rule.name.startswith(WORDS)
        if guess.sureness < (SURE if is_named else self._least_sure) or (is_named and guess.kind in _SAYS_LITTLE):
            return rule
        return self._rule(guess)

    @cached_property
    def _classifier(self) -> LineClassifier:
        return self._given or LineClassifier.shipped()

    def _rule(self, guess: LineGuess) -> LogRule:
        key = guess.kind, guess.notices
        if key not in self._rules:
            found = class_of(guess.kind)
            fault = {"infrastructure": "host", "framework": "user", "script": "user"}.get(found.family, "unknown")
            self._rules[key] = LogRule(
                name=f"{GUESSED}{guess.kind.replace(' ', '-')}{'-notice' if guess.notices else ''}",
                where="output",
                pattern="(?!)",
                fault=_FAULTS.get(guess.kind, fault),
                severity="fatal",
                kind=guess.kind,
                notices=guess.notices,
                general=True,
                meaning=f"no rule knows this line; its words are those of: {guess.kind}",
                action="read the lines around it; if that is right, label the incident (`--learn`)",
                matches=("",),
            )
        return self._rules[key]
