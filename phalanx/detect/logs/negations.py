"""Words that say that something did not happen: counts of zero, and what there was none of.

    GPU memory errors checked: 0 uncorrectable ECC errors, 0 retired pages
    dcgmi health: GPU 3 PASS: no network error, no node failure
    CUDA error count: 0        checkpoint uploaded without storage errors

Rules look for what there is; they read a line without these words. "GPU 0 failed" and "no space left on device" stay.
"""

from __future__ import annotations

import re

_TROUBLE = (
    r"(?:errors?|failures?|faults?|time-?outs?|problems?|issues?|exceptions?|crash(?:es)?|hangs?|warnings?|violations?|"
    r"retries|losses|xids?|ooms?|dead|down|lost|dropped|unhealthy|missing|failed)"
)
_MANY = (
    r"(?:errors|failures|faults|time-?outs|problems|issues|exceptions|crashes|hangs|warnings|violations|retries|losses|"
    r"xids|ooms|restarts)"
)
_GONE = r"(?:failed|dead|down|lost|dropped|unhealthy|missing)"
_WORDS = r"(?:[\w/-]{1,30} ){0,4}"
_BEFORE = r"(?:[\w-]{1,30} ){0,3}"
_NONE_OF = re.compile(
    rf"\b(?:(?:no|without|free of)(?! (?:an?|such)\b) {_WORDS}?{_TROUBLE}|zero {_WORDS}?{_MANY})\b(?! code)",
    re.IGNORECASE,
)
_ZERO_OF = re.compile(
    rf"(?<![\w.:-])0 (?:{_WORDS}?{_MANY}\b|(?:\w{{1,20}} )?{_GONE}(?= *(?:$|[,;.)|])))", re.IGNORECASE
)
_INDEX = re.compile(
    r"(?:\b(?:rank|gpu|device|dev|node|worker|host|task|process|proc|stage|shard|group|link|port|code|status|id|index|"
    r"step|epoch|attempt|cpu|socket|slot|lane|channel|partition|bank|pod|replica|server|container|thread)s?|#|_id)"
    r"[\s:=#\[(]{0,3}$",
    re.IGNORECASE,
)
"""What a number after it counts through, so that "GPU 0 errors" tells of a GPU and not of none."""
_COUNTED = (
    rf"(?:{_MANY}|{_TROUBLE}[ _-](?:count(?:er)?s?|total|rate|detected|found)|{_GONE}) ?[:=] ?(?:0(?:\.0+)?%?|no)"
    r"|(?:errors?|failures?|faults?|warnings?|problems?|issues?|exceptions?) ?[:=] ?none"
    r"|(?:missing|unexpected|failed|lost|dead)(?: [\w.-]{1,40}){0,6} ?[:=] ?(?:set\(\)|\[\]|\{\}|\(\)|None)"
)
_COUNT_IS_ZERO = re.compile(
    rf"{_BEFORE}(?:[\w-]{{1,30}}[_-])?(?:{_COUNTED})(?= *(?:$|[,;.)|\]]| \w+[:=]| \w+_))", re.IGNORECASE
)
_NOT_SEEN = re.compile(
    rf"{_BEFORE}{_TROUBLE} (?:(?:were|was|(?:has|have) been) )?(?:not|never) (?:detected|found|seen|observed)\b",
    re.IGNORECASE,
)
_PASSED = re.compile(r"\b(?:PASS(?:ED)?)\b|: (?:[Pp]ass(?:ed)?|OK|ok)\s*$")
_MAY_NEGATE = re.compile(
    r"\b(?:no|zero|without|free|not|never|pass(?:ed)?|ok|none)\b|(?<![\w.])0(?![\w:])|set\(\)|\[\]|\{\}|\(\)",
    re.IGNORECASE,
)
_NOT_PASSED = re.compile(r"\bfail", re.IGNORECASE)


def without_negations(text: str) -> str:
    """The line without what it says there was none of; empty where it is the result of a check that was passed."""
    if not _MAY_NEGATE.search(text):
        return text
    said = _NONE_OF.sub(" ", text)
    said = _ZERO_OF.sub(lambda match: match[0] if _INDEX.search(_text_before(match)) else " ", said)
    said = _NOT_SEEN.sub(" ", _COUNT_IS_ZERO.sub(" ", said))
    return "" if _PASSED.search(said) and not _NOT_PASSED.search(said) else said


def _text_before(match: re.Match[str]) -> str:
    """The 40 characters in front of a match."""
    return match.string[max(match.start() - 40, 0) : match.start()]
