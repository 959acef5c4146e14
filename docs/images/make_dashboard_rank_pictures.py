"""Makes the pictures of docs/dashboard_ranks.md: pages of ranks in Debian's Chromium, of runs made up for it.

PYTHONPATH=benchmarks python docs/images/make_dashboard_rank_pictures.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from support.browser import served, watched
from support.traced_runs import add_reports, large_run, traced_run

from phalanx.dashboard.data_source import DataSource

HERE = Path(__file__).parent
PICTURES = {
    "dashboard-machines": ("/machines?run=training", "light", 760),
    "dashboard-machines-12288": ("/machines?run=large", "dark", 1000),
    "dashboard-host": ("/machines/host?run=training&host=node-2", "light", 1180),
    "dashboard-timeline": ("/timeline?run=training&ranks=0,1,4,5&steps=8", "dark", 620),
    "dashboard-parallelism": ("/parallelism?run=training", "light", 1060),
    "dashboard-incidents": ("/incidents?run=training", "light", 960),
    "dashboard-findings": ("/findings?run=training", "light", 860),
    "dashboard-plan": ("/plan?run=training", "light", 860),
}
"""By name: the page, dark or light, and how many pixels of it are shown."""


def main() -> None:
    """Make the runs, and a picture of each page."""
    with TemporaryDirectory() as own:
        folder = Path(own)
        add_reports(traced_run(folder / "training", ends={6: 10}, steps=10))
        large_run(folder / "large", steps=40, spans_of=(40,), slow=(4711, 9000))
        with served(DataSource.of_folder(folder)) as address:
            for name, (path, scheme, height) in PICTURES.items():
                with watched(address, viewport={"width": 1180, "height": height}, color_scheme=scheme) as browser:
                    browser.open(path)
                    for words in ("is being asked", "judges are looking"):
                        browser.page.get_by_text(words).first.wait_for(state="detached", timeout=180_000)
                    browser.page.wait_for_timeout(400)  # figures settle
                    browser.check()
                    browser.page.screenshot(path=str(HERE / f"{name}.png"))


if __name__ == "__main__":
    main()
