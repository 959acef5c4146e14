"""Pictures of a real job for docs/run_incidents.md: the live view as SVG, and the web page as PNG.

    python docs/images/make_run_pictures.py FOLDER

Two hosts of this machine train a small model in FOLDER; rank 1 is killed with SIGKILL; when training goes on, view and
page are drawn as they are then. The PNG needs chromium.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from phalanx.run.config import load_job
from phalanx.run.drive.main import drive
from phalanx.run.incidents.incident_pages import listed
from phalanx.run.reports import terminal_text
from phalanx.run.reports.job_page import page
from phalanx.run.reports.live_view import Panel
from phalanx.run.reports.recent_events import Item, Overview, Source, Told, Wrote

HERE = Path(__file__).parent
STEPS_BEFORE, STEPS_AFTER = 60, 40
WIDTH, HEIGHT = 96, 26

SCRIPT = """\
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, path, step = dist.get_rank(), "state.pt", 0
model = DDP(torch.nn.Linear(64, 64)); optimizer = torch.optim.AdamW(model.parameters())
if os.path.exists(path):
    state = torch.load(path); model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 4000:
    loss = model(torch.randn(16, 64)).square().mean(); loss.backward()
    optimizer.step(); optimizer.zero_grad(); step += 1
    if rank == 0 and step % 10 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.replace(path + ".new", path)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    time.sleep(0.05)
"""


async def take(source: Source, folder: Path) -> None:
    """Kill a rank, wait until training goes on, draw, and stop the job."""
    items: list[Item] = []
    reading = asyncio.create_task(_read(source, items))
    await _until(source, lambda now: now.phase == "running" and now.step >= STEPS_BEFORE)
    victim = next(worker for host in (await source.overview()).hosts for worker in host.workers if worker.rank == 1)
    os.kill(victim.pid, signal.SIGKILL)
    now = await _until(
        source, lambda now: now.attempt > 1 and now.phase == "running" and now.step >= STEPS_AFTER and not now.incident
    )
    draw_view(now, items)
    draw_page(now, items, folder)
    os.kill(os.getpid(), signal.SIGTERM)
    await reading


async def _read(source: Source, items: list[Item]) -> None:
    async for item in source.follow(0):
        items.append(item)


async def _until(source: Source, is_so: Callable[[Overview], bool]) -> Overview:
    while True:
        now = await source.overview()
        if is_so(now):
            return now
        await asyncio.sleep(0.1)


def draw_view(now: Overview, items: list[Item]) -> None:
    """The terminal as it is now: lines above the panel."""
    told = [item for item in items if isinstance(item, Told)]
    panel = Panel(now, told)
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=WIDTH, height=HEIGHT)
    probe = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT)
    probe.print(panel)
    assert isinstance(probe.file, io.StringIO)
    room = HEIGHT - len(probe.file.getvalue().splitlines())
    shown = [item for item in items if isinstance(item, Told) or (isinstance(item, Wrote) and item.rank == 0)]
    for item in shown[-room:]:
        console.print(terminal_text.line(item), highlight=False, no_wrap=True, overflow="ellipsis")
    console.print(panel)
    text = console.export_svg(title="phalanx run --hosts 2 --spares 1 -- train.py", theme=DIMMED_MONOKAI)
    text = re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)  # a picture loads nothing
    (HERE / "run-live.svg").write_text(text)


def draw_page(now: Overview, items: list[Item], folder: Path) -> None:
    """The web page as it is now."""
    path = folder / "page.html"
    path.write_text(page(now, items, listed(folder / "run")))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("no chromium: the page is not drawn\n")
        return
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,880"]
    picture = HERE / "run-page.png"
    subprocess.run([browser, *options, f"--screenshot={picture}", path.as_uri()], check=True, timeout=120)


def main(folder: Path) -> int:
    """Run the job, and draw it."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    changes = {
        "run.script": str(folder / "train.py"),
        "run.working_folder": str(folder),
        "run.folder": str(folder / "run"),
        "run.hosts": 2,
        "run.spares": 1,
        "run.policy.joining_check": "passive",
    }
    return drive(load_job(None, [], changes).value.run, lambda source: take(source, folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
