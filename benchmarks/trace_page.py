"""Outputs of commands in docs/trace.md and docs/detect_stragglers.md, written by running them on ByteDance's published
job trace.

    python benchmarks/trace_page.py             # run every command again and write what it prints
    python benchmarks/trace_page.py --check     # change nothing, fail where the page is of older code
    python benchmarks/trace_page.py --picture   # also make the picture of the report, in Debian's Chromium

Without the published trace it does nothing.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from tempfile import TemporaryDirectory

from doc_outputs import ROOT, written

PAGES = (ROOT / "docs" / "trace.md", ROOT / "docs" / "detect_stragglers.md")
PICTURE = ROOT / "docs" / "images" / "trace-report.png"
TRACES = ROOT.parent / "shared" / "data" / "traces" / "straggler-analysis"


def page_now(page: Path) -> str:
    """A page with every block as its command prints it now; the commands run in order, in a folder of their own."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "traces").symlink_to(TRACES)
        return written(page.read_text(), Path(folder))


def take_picture() -> None:
    """The upper part of the report, as a browser draws it."""
    from playwright.sync_api import sync_playwright

    from phalanx.figures.pages.run_report import write_report
    from phalanx.telemetry.trace_imports.importing import import_traces

    with TemporaryDirectory() as folder, sync_playwright() as browsers:
        run, page = Path(folder) / "AR", Path(folder) / "report.html"
        import_traces([TRACES / "trace-AR.parquet"], run)
        write_report(run, page)
        browser = browsers.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 1000}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_function(
            "[...document.querySelectorAll('.figure')].every((one) => one.querySelector('.main-svg'))"
        )
        tab.screenshot(path=PICTURE)
        browser.close()
    print(f"written: {PICTURE.name}")


def main() -> None:
    """Write or check the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--quick", action="store_true", help="change nothing, fail where it is old")
    parser.add_argument("--picture", action="store_true", help="also make the picture of the report")
    given = parser.parse_args()
    check = given.check
    if not TRACES.exists():
        print(f"skipped: {TRACES} is not there")
        return
    stale = {page: now for page in PAGES if (now := page_now(page)) != page.read_text()}
    if not check:
        for page, now in stale.items():
            page.write_text(now)
        if given.picture:
            take_picture()
    names = ", ".join(page.name for page in stale) or "none"
    print(f"{'of older code' if check else 'written'}: {names}")
    sys.exit(check and bool(stale))


if __name__ == "__main__":
    main()
