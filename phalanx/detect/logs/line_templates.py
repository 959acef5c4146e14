"""Lines compressed into templates, in bounded memory: masks for what varies, then drain3 for words that vary, too.

    "loss 2.31 at step 120 of 10.0.0.4:29500"  →  "loss <N> at step <N> of <ADDR>"

Drain (He et al., ICWS 2017) keeps a tree of fixed depth over the words of a line. Most lines of a training log are
equal once they are masked, so that a cache of masked lines answers nearly all and the tree is asked only for new ones.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

from pydantic import Field

from phalanx.core.config import Config

_MASKS = re.compile(
    r"(?P<URL>\b(?:https?|s3|hdfs|gs|tcp|file)://[^\s'\"<>,;]+)"
    r"|(?P<PATH>(?<![\w./])(?:/[\w.@%+=:~-]+){2,}/?)"
    r"|(?P<ADDR>(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?:[:<]\d{1,5}>?)?)"
    r"|(?P<UUID>\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b)"
    r"|(?P<PCI>\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?\b)"
    r"|(?P<HEX>\b0[xX][0-9a-fA-F]+\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b)"
    r"|(?P<HOST>\b(?:node|host|gpu|worker|rank|dgx|hgx)[-_]?\d+(?:\.[\w.-]+)?\b)"
    r"|(?P<N>[-+]?(?<![A-Za-z_])\d[\d_,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?)"
)
LONGEST = 400  # characters of a line that make its template


class TemplateLimits(Config):
    """Bounds of memory, and how alike lines of one template are."""

    most_templates: int = Field(20_000, ge=10, le=1_000_000, description="templates; the least used ones are forgotten")
    cached_lines: int = Field(50_000, ge=10, le=5_000_000, description="masked lines whose template is remembered")
    depth: int = Field(4, ge=3, le=10, description="of Drain's tree: how many first words tell templates apart")
    similarity: float = Field(
        0.5, gt=0, le=1, description="share of equal words from which on two lines are of one template"
    )


def masked(text: str) -> str:
    """`text` with numbers, addresses, paths and the like as ``<N>``, ``<ADDR>``, ``<PATH>``."""
    return _MASKS.sub(lambda match: f"<{match.lastgroup}>", text[:LONGEST])


class Templates:
    """Templates by number. Without drain3 (extra ``logs``) each masked line is a template of its own.

    Attributes:
        lines: that were added.
        asked: how many of them were not in the cache.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._drain = _drain(self._limits)
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._texts: OrderedDict[int, str] = OrderedDict()
        self._next = 0
        self.lines = self.asked = 0

    @property
    def compressed_by(self) -> str:
        """``drain3``, or ``masks`` alone."""
        return "drain3" if self._drain is not None else "masks"

    def add(self, text: str) -> int:
        """The number of the template of a line."""
        return self.add_masked(masked(text))

    def add_masked(self, line: str, most_asked: int | None = None) -> int:
        """The same, of a line that is `masked`; -1: no more than `most_asked` new ones were to be looked at."""
        self.lines += 1
        number = self._cache.get(line)
        if number is not None:
            self._cache.move_to_end(line)
            return number
        if most_asked is not None and self.asked >= most_asked:
            return -1
        self.asked += 1
        if self._drain is not None:
            cluster, _ = self._drain.add_log_message(line)
            number = int(cluster.cluster_id)
            self._keep(number, str(cluster.get_template()))
        else:
            self._next = number = self._next + 1
            self._keep(number, line)
        self._cache[line] = number
        if len(self._cache) > self._limits.cached_lines:
            self._cache.popitem(last=False)
        return number

    def text(self, number: int) -> str:
        """A template; empty: it was forgotten."""
        return self._texts.get(number, "")

    def __len__(self) -> int:
        return len(self._texts)

    def _keep(self, number: int, text: str) -> None:
        self._texts[number] = text
        self._texts.move_to_end(number)
        if len(self._texts) > self._limits.most_templates:
            self._texts.popitem(last=False)


def _drain(limits: TemplateLimits) -> Any:
    try:
        from drain3.drain import Drain
    except ImportError:
        return None
    return Drain(
        depth=limits.depth,
        sim_th=limits.similarity,
        max_clusters=limits.most_templates,
        parametrize_numeric_tokens=False,
    )


def quoted(text: str, most: int = 110) -> str:
    """A line as a verdict cites it."""
    line = " ".join(text.split()).rstrip(".")
    return f'"{line if len(line) <= most else line[: most - 1] + "…"}"'
