"""A real browser, Debian's Chromium, on a dashboard that runs in this process: for measurements, tests and pictures."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from phalanx.dashboard.dashboard_app import create_app
from phalanx.dashboard.data_source import DataSource
from phalanx.run.secrets import Token

TOKEN = Token("ab" * 32)
CHROMIUM = Path("/usr/bin/chromium")
_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def why_no_browser() -> str:
    """Why none can be started; empty: one can."""
    if not CHROMIUM.exists():
        return f"{CHROMIUM} is not installed"
    return "" if importlib.util.find_spec("playwright") else "the package playwright is not installed"


@contextmanager
def served(source: DataSource, cache: Path | None = None) -> Iterator[str]:
    """The URL, with its token, of a dashboard on a free port of loopback."""
    app = create_app(source, TOKEN, cache=cache)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/?token={TOKEN.reveal()}"
    finally:
        server.should_exit = True
        thread.join(30)


@dataclass
class Watched:
    """A browser's page, and what it complained of: errors in its console, and requests to others than the dashboard."""

    page: Any
    address: str
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Go to a page of the dashboard, and wait until its figures are drawn."""
        self.page.goto(self.address.partition("/?")[0] + path)
        self.drawn()

    def drawn(self) -> None:
        """Wait until every figure is drawn."""
        # wait_for_function would need eval, which the dashboard's pages forbid.
        waiting = "[data-figure]:not(.js-plotly-plot):not(.failed)"
        self.page.wait_for_selector(waiting, state="detached")

    def check(self) -> None:
        """Nothing went wrong, and nobody else was asked."""
        assert not self.errors, self.errors
        assert not self.strangers, self.strangers
        assert not self.page.query_selector_all(".figure.failed")


@contextmanager
def watched(address: str, **context: Any) -> Iterator[Watched]:
    """A page of a browser that has entered with the token."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=_ARGUMENTS)
        page = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **context}).new_page()
        page.set_default_timeout(float(os.environ.get("BROWSER_TIMEOUT_S", "30")) * 1000)
        seen = Watched(page, address)
        own = address.partition("/?")[0]

        def note(request: Any) -> None:
            if not request.url.startswith((own, "data:", "blob:")):
                seen.strangers.append(request.url)

        def complain(message: Any) -> None:
            if message.type in ("error", "warning"):
                seen.errors.append(message.text)

        page.on("request", note)
        page.on("console", complain)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        try:
            page.goto(address)
            yield seen
        finally:
            browser.close()
