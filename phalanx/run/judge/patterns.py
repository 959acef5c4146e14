"""What can be said of a regular expression without running it: texts that a match contains, and whether it may explode.

Python's own parser of regular expressions is used (``re._parser``, which is not public), and only here.
"""

from __future__ import annotations

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Sequence
from typing import Any

FLAGS = re.IGNORECASE | re.ASCII
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_MANY = 16
"""From how many turns on a repetition counts as one without end."""
_ENDLESS = 400
_SHORTEST = 3


def required_texts(pattern: str) -> frozenset[str] | None:
    """Texts in lower case, one of which every line that the pattern matches contains; None: nothing can be said.

    Raises:
        re.error: it is no regular expression.
    """
    texts = _of_sequence(parser.parse(pattern, FLAGS))
    return texts if texts and min(map(len, texts)) >= _SHORTEST else None


def may_explode(pattern: str) -> bool:
    """Whether matching may take far too long on some line.

    That is so when a repetition holds another one (time exponential in the length of the line), or when more than two
    have no limit (its fourth power).

    Raises:
        re.error: it is no regular expression.
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
