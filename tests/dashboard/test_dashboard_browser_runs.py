"""Pages of runs in a real browser: clicked through, without an error in its console or a request to anybody else."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_helpers import make_run, write_log
from support.browser import Watched

from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_list import read_kept
from phalanx.telemetry.run_samples import keep_sample

pytestmark = pytest.mark.slow

Browse = Callable[..., Watched]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    base = make_run(folder / "base")
    make_run(folder / "other", steps=12, optim={"lr": 1e-2})
    write_log(base, [("INFO", f"step {n}") for n in range(50)] + [("ERROR", "ValueError: it broke")])
    keep_sample(base, 20, "Once", " upon a time")
    return folder


def test_runs_are_clicked_through(runs: Path, browse: Browse) -> None:
    seen = browse(runs)
    page = seen.page
    seen.drawn()
    assert "token=" not in page.url
    assert page.locator("#curves .legendtext").all_text_contents() == ["base", "other"]
    page.get_by_label("draw other").uncheck()
    page.wait_for_url(re.compile(r"on=base"))
    page.locator("#curves .gtitle", has_text="loss of base").wait_for()
    assert "on=other" not in page.url
    page.locator("#view [name=span]").select_option("10")
    page.locator("#curves .gtitle", has_text="smoothed over 10 steps").wait_for()
    page.get_by_role("searchbox").fill("other")
    page.get_by_role("searchbox").press("Enter")
    page.locator("tbody tr", has_text="base").wait_for(state="detached")
    page.go_back()
    page.locator("tbody tr", has_text="base").first.wait_for()
    # The same state from its URL alone.
    seen.open("/?chosen=1&on=base&on=other&column=validation_loss&x=tokens")
    assert page.locator("#curves .gtitle").text_content() == "validation loss of 2 runs over tokens"
    assert page.get_by_role("region", name="Settings that differ").get_by_text("optim.lr").count() == 1
    page.get_by_role("textbox", name="tags of the chosen").fill("+good")
    page.get_by_role("button", name="Change").click()
    page.get_by_role("link", name="good").first.wait_for()
    assert read_kept(runs / "base")["tags"] == ["good"]
    seen.check()


def test_a_run_is_clicked_through(runs: Path, browse: Browse) -> None:
    seen = browse(runs)
    page = seen.page
    page.get_by_role("link", name="base").first.click()
    page.wait_for_url(re.compile(r"/run\?run=base"))
    seen.drawn()
    assert "ends at" in (page.locator("#loss").get_attribute("aria-label") or "")
    assert page.get_by_text("upon a time").is_visible()
    page.locator("summary", has_text="settings").click()
    assert page.get_by_role("rowheader", name="optim.lr").is_visible()
    page.locator("#view [name=x]").select_option("tokens")
    page.wait_for_url(re.compile("x=tokens"))
    page.locator("form [name=note]").fill("a note")
    page.get_by_role("button", name="Keep").click()
    page.get_by_text("a note").first.wait_for()
    page.get_by_role("link", name="Logs").click()
    assert page.get_by_text("ValueError: it broke").is_visible()
    page.get_by_role("searchbox").fill("broke")
    page.get_by_role("searchbox").press("Enter")
    page.locator("table.log tr", has_text="step 4").first.wait_for(state="detached")
    page.locator("table.log a").first.click()
    page.locator("table.log tr", has_text="step 49").wait_for()
    assert page.locator("table.log tr:target").inner_text().endswith("ValueError: it broke")
    seen.check()


def test_curves_and_lines_of_a_run_come_by_themselves(runs: Path, browse: Browse) -> None:
    with (runs / "base" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen = browse(runs)
        seen.open("/run?run=base")
        with (runs / "base" / "metrics.jsonl").open("ab") as file:
            file.write(metrics_line("step", 21, {"loss": 77.0}))
        seen.page.locator(".cards b", has_text="77.0000").wait_for()
        seen.page.locator("#loss[aria-label*='training ends at 77']").wait_for()
        seen.open("/logs?run=base")
        write_log(runs / "base", [("WARNING", "something new")], begin_unix_s=1.9e9)
        seen.page.get_by_text("something new").wait_for()
        seen.check()


def test_the_keyboard_is_enough(runs: Path, browse: Browse) -> None:
    seen = browse(runs)
    page = seen.page
    seen.drawn()
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to content"
    page.keyboard.press("Enter")
    assert page.locator(":focus").get_attribute("id") == "main"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.locator(":focus").get_attribute("aria-label") == "draw other":
            break
    page.keyboard.press("Space")
    page.wait_for_url(re.compile(r"on=base"))
    page.locator("#curves .gtitle", has_text="loss of base").wait_for()
    page.wait_for_selector("input:focus[value=other]")
    seen.check()


def test_dark_and_light_are_kept(runs: Path, browse: Browse) -> None:
    seen = browse(runs, color_scheme="dark")
    page = seen.page
    color = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(color) == "rgb(20, 23, 26)"
    page.get_by_role("button", name="Switch between dark and light").click()
    assert page.evaluate(color) == "rgb(255, 255, 255)"
    page.reload()
    assert page.evaluate(color) == "rgb(255, 255, 255)"
    seen.check()


def test_a_page_on_a_small_screen_does_not_scroll_sideways(runs: Path, browse: Browse) -> None:
    seen = browse(runs, viewport={"width": 420, "height": 800})
    for path in ("/", "/run?run=base", "/logs?run=base"):
        seen.open(path)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 420, path
    seen.check()


def test_all_columns_of_the_table_fit_a_small_screen(tmp_path: Path, browse: Browse) -> None:
    tags = ["width", "lr:3e-4", "baseline", "rerun"]
    run = make_run(tmp_path / "runs" / "experiments" / "a-rather-long-name-of-a-run", run={"tags": tags})
    (run / "ended.json").write_text(json.dumps({"step": 20, "why": "ValueError: " + "it broke in some way " * 5}))
    make_run(tmp_path / "runs" / "base", total=200_000)
    seen = browse(tmp_path / "runs", viewport={"width": 1280, "height": 900})
    seen.drawn()
    table = seen.page.locator("table.runs")
    assert table.evaluate("one => one.parentElement.scrollWidth - one.parentElement.clientWidth") <= 0
    seen.check()
