"""The pages of ranks in a real browser: clicked through, without an error and without a request to anybody else."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from dashboard_helpers import TOKEN
from support.live_ranks import live_ranks
from support.traced_runs import add_reports, large_run, traced_run

from phalanx.dashboard.dashboard_app import create_app
from phalanx.dashboard.data_source import DataSource

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed")

GUARD_MS = 60_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    traced_run(folder / "small")
    add_reports(traced_run(folder / "job", ends={6: 9}))
    large_run(folder / "large", ranks=1024, steps=20, spans_of=(20,), slow=(77,))
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    """The dashboard of the folder, served on loopback."""
    config = uvicorn.Config(create_app(DataSource.of_folder(folder), TOKEN), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until_s = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until_s, "the server does not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, base: str) -> Iterator[Any]:
    """A page that has entered; afterwards nothing may have gone wrong in it, and nobody else been asked."""
    context = browser.new_context(base_url=base, viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(GUARD_MS)
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request", lambda one: wrong.append(one.url) if not one.url.startswith((base, "data:", "blob:")) else None
    )
    opened.goto(f"/?token={TOKEN.reveal()}")
    yield opened
    context.close()
    assert wrong == []


def _drawn(page: Any, name: str) -> Any:
    """A figure by the beginning of its address, once it is drawn."""
    figure = page.locator(f'[data-figure^="{name}"]')
    figure.locator(".main-svg").first.wait_for()
    return figure


def test_from_the_heat_map_to_the_host_its_timeline_and_its_place(page: Any) -> None:
    page.goto("/machines?run=small")
    heatmap = _drawn(page, "/machines/heatmap")
    assert "rank 5 (node-2) 1.4" in heatmap.get_attribute("aria-label")
    plot = heatmap.locator(".nsewdrag").first.bounding_box()
    page.mouse.click(plot["x"] + plot["width"] * 0.3, plot["y"] + plot["height"] * (5.5 / 8))  # a cell of rank 5
    page.wait_for_url("**/machines/host?*")
    assert page.locator("main h2").first.inner_text() == "node-2"
    _drawn(page, "/machines/host/steps")
    _drawn(page, "/machines/host/counters")
    page.get_by_role("link", name="Timeline of its ranks").click()
    page.wait_for_url("**/timeline?*")
    _drawn(page, "/timeline/figure")
    page.get_by_role("link", name="Place of these ranks in the layout").click()
    page.wait_for_url("**/parallelism?*")
    for name in ("lattice", "pipeline", "parts", "bytes"):
        _drawn(page, f"/parallelism/{name}")


def test_a_rank_is_picked_by_a_click_on_the_lattice(page: Any) -> None:
    page.goto("/parallelism?run=small&rank=0")
    lattice = _drawn(page, "/parallelism/lattice")
    point = lattice.locator(".scatterlayer .point").last.bounding_box()  # the chosen rank is drawn last
    first = lattice.locator(".scatterlayer .point").first.bounding_box()
    assert point != first
    page.mouse.click(first["x"] + first["width"] / 2, first["y"] + first["height"] / 2)
    page.wait_for_url(lambda url: "rank=0" not in url)
    assert _drawn(page, "/parallelism/lattice").get_attribute("aria-label").startswith("Rank ")


def test_what_is_chosen_and_looked_at_stands_in_the_url(page: Any) -> None:
    page.goto("/timeline?run=small&ranks=1,5&steps=3")
    figure = _drawn(page, "/timeline/figure")
    plot = figure.locator(".nsewdrag").first.bounding_box()
    y = plot["y"] + plot["height"] / 2
    page.mouse.move(plot["x"] + plot["width"] * 0.2, y)
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] * 0.5, y, steps=5)
    page.mouse.up()
    page.wait_for_url("**from=*to=*")
    shared = page.url
    page.goto(shared)
    ticks = _drawn(page, "/timeline/figure").locator(".xtick text").all_text_contents()
    assert float(ticks[0]) > 50  # the stretch, not the whole step
    page.locator('select[name="groups"]').select_option("tensor")
    page.wait_for_url("**groups=tensor**")
    _drawn(page, "/timeline/figure")


def test_figures_are_tables_for_who_does_not_see_them_and_the_keyboard_reaches_hosts(page: Any) -> None:
    page.goto("/machines?run=small")
    _drawn(page, "/machines/heatmap")
    page.get_by_text("Numbers as a table").click()
    page.locator(".as-table tbody tr").nth(7).wait_for()
    assert page.locator(".as-table tbody tr").count() == 8
    page.locator('.host-grid a[aria-label^="node-2: slow"]').focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**host=node-2**")


def test_incidents_lead_to_their_reports_evidence_and_timeline(page: Any) -> None:
    page.goto("/incidents?run=job")
    _drawn(page, "/incidents/time")
    _drawn(page, "/incidents/recovery")
    page.get_by_role("link", name="rank 6 was killed").click()
    page.wait_for_url("**/incidents/report?*")
    assert "Where the time went" in page.locator("main").inner_text()
    page.get_by_role("link", name="rank-6.txt").click()
    assert "the last lines of <rank> 6" in page.content().replace("&lt;", "<").replace("&gt;", ">")
    page.go_back()
    page.get_by_role("link", name="Timeline around it").click()
    _drawn(page, "/timeline/figure")


def test_predictions_and_the_verdict_come(page: Any) -> None:
    page.goto("/plan?run=small")
    for name in ("step", "parts", "memory"):
        _drawn(page, f"/plan/{name}")
    page.get_by_role("heading", name="What limits this run").wait_for()


def test_findings_come_by_themselves_and_lead_to_the_host(page: Any) -> None:
    page.goto("/findings?run=small")
    page.locator("article", has_text="phalanx detect stragglers").wait_for()  # without anybody touching the page
    assert "Rank 5" in page.locator(".verdict.bad").inner_text()
    page.locator("article").get_by_role("link", name="node-2").first.click()
    page.wait_for_url("**/machines/host?*")
    assert "stragglers: " in page.locator(".verdict", has_text="stragglers").inner_text()


def test_many_ranks_and_the_dark(page: Any) -> None:
    page.goto("/machines?run=large")
    _drawn(page, "/machines/heatmap")
    assert page.locator(".host-grid.dense a.look-slow").count() == 1
    page.locator("[data-theme-toggle]").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    for path in ("/timeline?run=large", "/parallelism?run=large", "/incidents?run=large", "/plan?run=large"):
        page.goto(path)
        page.locator("[data-figure] .main-svg").first.wait_for()


def test_a_death_appears_by_itself(page: Any, folder: Path, tmp_path: Path) -> None:
    with live_ranks(folder / "live", tmp_path / "orders", ranks=2) as ranks:
        until_s = time.monotonic() + 60
        while not list((folder / "live" / "telemetry" / "live").glob("*.arrows")) and time.monotonic() < until_s:
            time.sleep(0.05)
        page.goto("/machines?run=live")
        page.get_by_text("ranks", exact=True).first.wait_for()
        ranks[1].kill()
        page.locator(".verdict.bad", has_text="dead: rank 1").wait_for()  # without anybody touching the page
        assert page.locator(".host-grid a.look-dead").count() == 1
