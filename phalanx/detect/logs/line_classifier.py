"""The class of a line that no rule knows, by its words: learnt from the labelled wordings in `labelled_lines.txt`.

    classifier = LineClassifier.shipped()
    classifier.guess("ResourceExhaustedError: OOM when allocating tensor with shape[32,4096]")   # out of memory, 0.93

Words and pairs of words, weighted by how rare they are (TF-IDF), and a linear classifier by least squares (ridge
regression), which is solved at once from some hundred lines. What it would have said of each labelled line without that
line follows from the same solution; from this comes how sure a score is, and when it abstains.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.logs.line_templates import masked

HARMLESS = "harmless"

_PLACES = re.compile(r"<(?:URL|PATH|ADDR|UUID|PCI|HEX|HOST|N)>")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]")
_SUFFIX = re.compile(r"(?:ings?|ed|es|s)$")
_RIDGE = 0.6
_LEAST_WORDS = 2  # of a line that the labelled ones have, too, without those of any sentence
_COMMON = frozenset([
    "a", "an", "and", "are", "as", "at", "be", "been", "but", "by", "can", "error", "for", "from", "had", "has", "have",
    "in", "into", "is", "it", "its", "no", "not", "of", "on", "or", "so", "that", "the", "their", "there", "this", "to",
    "was", "were", "will", "with",
])  # fmt: skip
_MOST_ASKED = 20_000


@dataclass(frozen=True)
class LabelledLine:
    """A wording and its class; `notices`: who writes it only notices what happened elsewhere."""

    text: str
    kind: str
    notices: bool = False


@dataclass(frozen=True)
class LineGuess:
    """What a line most likely speaks of; `kind` may be `HARMLESS`; `sureness`: 0 to 1, by the labelled lines."""

    kind: str
    notices: bool
    sureness: float


def read_labelled_lines(text: str, source: str) -> list[LabelledLine]:
    """Lines of a file of `== class` and wordings.

    Raises:
        UserError: a wording comes before the first class.
    """
    found: list[LabelledLine] = []
    kind, notices = "", False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("== "):
            kind, _, more = line[3:].partition(", ")
            notices = more == "notices"
        elif line and not line.startswith("#"):
            if not kind:
                raise UserError("has no class", cure="write `== class` above it", field=f"{source}: line {number}")
            found.append(LabelledLine(line, kind, notices))
    return found


def words_of(text: str) -> list[str]:
    """Words in lower case without endings, names taken apart where capitals change, and pairs of neighbours."""
    plain = _PLACES.sub(" ", masked(text))
    words = [_SUFFIX.sub("", word.lower()) if len(word) > 4 else word.lower() for word in _WORD.findall(plain)]
    return words + [f"{one} {other}" for one, other in pairwise(words)]


class LineClassifier:
    """Guesses classes of lines.

    Args:
        lines: labelled ones.
    """

    def __init__(self, lines: Sequence[LabelledLine]) -> None:
        labels = [(line.kind, line.notices) for line in lines]
        self._labels = list(dict.fromkeys(labels))
        counts = [Counter(words_of(line.text)) for line in lines]
        having = Counter(word for count in counts for word in count)
        self._words = {word: number for number, word in enumerate(having)}
        self._rarity = np.array([math.log((1 + len(lines)) / (1 + count)) + 1 for count in having.values()])
        table = np.stack([self._vector(count) for count in counts])
        wanted = np.full((len(lines), len(self._labels)), -1.0)
        wanted[np.arange(len(lines)), [self._labels.index(label) for label in labels]] = 1.0
        inverse = np.linalg.inv(table @ table.T + _RIDGE * np.eye(len(lines)))
        dual = inverse @ (wanted + 1.0)
        self._weights = table.T @ dual
        # Of each line without itself (the closed form of leaving one out).
        left_out = (wanted + 1.0) - dual / np.diag(inverse)[:, None]
        self._calibrate(left_out, [self._labels.index(label) for label in labels])
        self._asked: OrderedDict[str, LineGuess | None] = OrderedDict()

    @classmethod
    def shipped(cls, more: Sequence[LabelledLine] = ()) -> LineClassifier:
        """Of the wordings in this package, and `more`."""
        text = resources.files("phalanx.detect.logs").joinpath("labelled_lines.txt").read_text(encoding="utf-8")
        return cls([*read_labelled_lines(text, "labelled_lines.txt"), *more])

    def guess(self, text: str) -> LineGuess | None:
        """The likeliest class; None: it has too few words that the labelled lines have."""
        key = masked(text)
        if key in self._asked:
            return self._asked[key]
        found = self._guess(key)
        self._asked[key] = found
        if len(self._asked) > _MOST_ASKED:
            self._asked.popitem(last=False)
        return found

    def _guess(self, text: str) -> LineGuess | None:
        count = Counter(words_of(text))
        known = sum(1 for word in count if word in self._words and " " not in word and word not in _COMMON)
        if known < _LEAST_WORDS:
            return None
        scores = self._vector(count) @ self._weights
        first, second = np.argsort(scores)[::-1][:2]
        kind, notices = self._labels[first]
        return LineGuess(kind, notices, self._sureness(float(scores[first] - scores[second])))

    def _vector(self, count: Counter[str]) -> np.ndarray:
        vector = np.zeros(len(self._words))
        for word, number in count.items():
            place = self._words.get(word)
            if place is not None:
                vector[place] = (1 + math.log(number)) * self._rarity[place]
        # What it does not know makes a line less like any other: its length counts all words.
        unknown = sum(1 for word in count if word not in self._words) * float(self._rarity.max())
        length = math.sqrt(float(vector @ vector) + unknown)
        return vector / length if length else vector

    def _calibrate(self, scores: np.ndarray, right: Sequence[int]) -> None:
        """How often the first class is right, by its lead before the second: a rising step function."""
        order = np.sort(scores, axis=1)
        lead = order[:, -1] - order[:, -2]
        hit = (np.argmax(scores, axis=1) == np.asarray(right)).astype(float)
        by_lead = np.argsort(lead)
        blocks: list[list[float]] = []  # least lead, hits, lines; neighbours are pooled until shares rise
        for place in by_lead:
            blocks.append([float(lead[place]), float(hit[place]), 1.0])
            while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
                _, hits, lines = blocks.pop()
                blocks[-1][1] += hits
                blocks[-1][2] += lines
        self._leads = np.array([block[0] for block in blocks])
        self._shares = np.array([(block[1] + 1) / (block[2] + 2) for block in blocks])
        self.left_out_right = float(hit.mean())

    def _sureness(self, lead: float) -> float:
        place = int(np.searchsorted(self._leads, lead, side="right")) - 1
        return float(self._shares[max(place, 0)])
