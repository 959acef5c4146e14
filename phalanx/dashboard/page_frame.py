"""What all pages share: a frame with the navigation, figures as JSON, and answers that cost little if nothing is new.

A page is a module of `phalanx.dashboard.pages` with `PAGE` and ``build_router(frame)``. Its state stands in the URL, so
that a link shows to others what one sees. What goes on is drawn again by asking for the same URL once more: parts of
HTML (``data-fragment``) and figures (``data-figure``), each with an ETag of the files that it is made from.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from phalanx import __version__
from phalanx.core.units import count, duration
from phalanx.dashboard.data_source import DataSource, Run
from phalanx.dashboard.metrics_store import MetricsStore
from phalanx.dashboard.remembered import Remembered
from phalanx.dashboard.run_findings import RunFindings
from phalanx.dashboard.run_troubles import RunTroubles
from phalanx.figures.style import Figure

HERE = Path(__file__).parent
LIVE_S = 2.0
"""A run that goes on is looked at so often."""


@dataclass(frozen=True)
class Page:
    """A page in the navigation.

    Attributes:
        name: of its module and template.
        title: in the navigation.
        path: of its URL.
        is_of_run: whether it shows one run, which its query names (``run=``).
    """

    name: str
    title: str
    path: str
    is_of_run: bool = True


class PageFrame:
    """What modules of pages get: the source of runs, templates, and how to answer.

    Attributes:
        source: where runs come from.
        metrics: their figures.
        pages: all pages, in the order of the navigation.
        remembered: answers that several parts of pages ask for.
        findings: what judges say of runs.
        troubles: what is the matter with runs that go on.
    """

    def __init__(
        self,
        source: DataSource,
        metrics: MetricsStore,
        pages: Sequence[Page],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.source, self.metrics, self.pages, self.unix_s = source, metrics, pages, unix_s
        self.remembered = Remembered()
        self.findings = RunFindings(unix_s)
        self.troubles = RunTroubles(unix_s)
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= {
            "count": _count,
            "number": _number,
            "duration": lambda seconds: "" if seconds is None else duration(seconds),
            "age": self._age,
            "moment": moment,
        }
        self._templates.globals |= {"url": url, "static_version": _static_version(), "pages": pages, "source": source}

    def page(self, page: Page, template: str, run: Run | None = None, *, status: int = 200, **values: Any) -> Response:
        """A whole page.

        Args:
            template: extends ``base.html``; has `page`, `run`, `freshness` and `values`.
            run: the run that it shows; links of the navigation go on to it.
        """
        return HTMLResponse(self.text(template, page=page, run=run, **values), status)

    def part(self, request: Request, template: str, **values: Any) -> Response:
        """A part of a page, for ``data-fragment``; 304 where it is what the browser has."""
        text = self.text(template, **values)
        return _unless_known(request, hashlib.sha256(text.encode()).hexdigest()[:24], lambda: HTMLResponse(text))

    def figure(self, request: Request, made_from: Iterable[object], make: Callable[[], Figure]) -> Response:
        """A figure as JSON, for ``data-figure``; 304, without making it, where what it is made from has not changed.

        Args:
            made_from: such as `stamp` of files; the URL counts by itself.
        """
        return _unless_known(request, tag_of(request.url.query, *made_from), lambda: _json(make()))

    def text(self, template: str, **values: Any) -> str:
        """A template, filled in."""
        shown = self._templates.get_template(template).render(now=self.unix_s(), **values)
        shown = self.source.as_given(shown)
        return shown.encode(errors="backslashreplace").decode()  # names of folders may be no UTF-8

    def _age(self, unix_s: float | None) -> str:
        """``4m ago``: one unit is enough."""
        if not unix_s:
            return ""
        seconds = max(self.unix_s() - unix_s, 0.0)
        for unit_s, letter in ((86400, "d"), (3600, "h"), (60, "m")):
            if seconds >= unit_s:
                return f"{int(seconds // unit_s)}{letter} ago"
        return f"{int(seconds)}s ago"


def url(path: str, query: Mapping[str, Any] | None = None, **more: Any) -> str:
    """A link with its state; None and empty values are left out, lists become several."""
    pairs = [
        (name, one)
        for name, value in {**(query or {}), **more}.items()
        for one in (value if isinstance(value, list | tuple) else [value])
        if one not in (None, "", False)
    ]
    return path + ("?" + urlencode(pairs, errors="surrogateescape") if pairs else "")


def stamp(*paths: Path | None) -> tuple[object, ...]:
    """Which files these are and how far they are written: equal while nothing has changed."""
    found: list[object] = []
    for path in paths:
        try:
            state = path.stat() if path is not None else None
        except OSError:
            state = None
        found.append(None if state is None else (state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)


def tag_of(*parts: object) -> str:
    """An ETag of values."""
    return hashlib.sha256(repr((__version__, parts)).encode()).hexdigest()[:24]


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form that was sent by POST; of several of one name, the last."""
    return dict(parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True))


def moment(unix_s: float | None) -> str:
    """``2026-11-25 18:50:33`` UTC."""
    return "" if not unix_s else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _static_version() -> str:
    """Of the scripts and styles, which browsers keep for ever."""
    files = sorted((HERE / "static").iterdir())
    return tag_of(*(file.read_bytes() for file in files))[:12]


def _unless_known(request: Request, tag: str, answer: Callable[[], Response]) -> Response:
    quoted = f'"{tag}"'
    headers = {"etag": quoted, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == quoted:
        return Response(status_code=304, headers=headers)
    found = answer()
    found.headers.update(headers)
    return found


def _json(figure: Figure) -> Response:
    return Response(json.dumps(figure, separators=(",", ":")), media_type="application/json")


def _count(value: float | None) -> str:
    return "" if value is None else count(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
