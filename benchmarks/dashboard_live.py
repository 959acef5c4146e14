"""How soon what goes wrong stands on the pages that are open, without reading: by a mark, a colour or a badge.

python benchmarks/dashboard_live.py                       # each scene three times; cut networks need root
python benchmarks/dashboard_live.py --only spike --pictures /tmp/pictures

Every scene is a job of processes that really run, and what happens to it is real: a rank is killed, a rank takes twice
as long, the interface of a host goes down in its network namespace (a job of `phalanx run`, and a plain
`phalanx train` over gloo), for three steps the weights of a model are 8
times as large, so that its loss jumps. Pages are open in
Chromium beforehand and are not touched; what counts is the time from the deed until a mark is in them. Where a run
is watched for alerts, those that came are counted as well. Healthy runs show what is shown and reported without cause.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support import namespaces, tiny
from support.browser import Watched, served, watched, why_no_browser
from support.harness import benchmark_parser, machine, write_json
from support.live_ranks import live_ranks

from phalanx.dashboard.data_source import DataSource
from phalanx.faults.host_faults import link_down
from phalanx.run.backends.local import INTERFACE, Network, number_of
from phalanx.run.campaign import tiny_training
from phalanx.run.config import toml_value
from phalanx.run.secrets import ensure_certificate
from phalanx.telemetry.alerts.alert_episodes import read_alerts

GUARD_S = 120.0
USUAL_S = 4.0
"""So long all is well before anything happens: what is usual has to be known."""
_HEALTHY_S = 30.0
SUBNET = "100.64.9.0/24"

BAD, WARN = ".verdict.bad, .badge.bad", ".verdict.warn, .badge.warn"

_TRAINS = """
import sys, time
from pathlib import Path
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

order, pace_s = Path(sys.argv.pop(1)), float(sys.argv.pop(1))
lasts = 3
left = 0

@torch.no_grad()
def scale(optimizer, factor):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(factor)

def after_step(optimizer, *_):
    global left
    time.sleep(pace_s)
    left -= 1
    if left == 0:
        scale(optimizer, 1 / 8)
    if order.exists():
        scale(optimizer, 8.0)
        left = lasts
        order.rename(order.with_suffix(".done"))

register_optimizer_step_post_hook(after_step)
from phalanx.cli.main import main
sys.exit(main())
"""


@dataclass
class Scene:
    """What happened, and when each page showed it.

    Attributes:
        seen_after_s: by page, in the order of repeats.
        alerts: kinds that were reported, of each repeat; empty: nobody watched.
    """

    what: str
    seen_after_s: dict[str, list[float]] = field(default_factory=dict)
    alerts: list[dict[str, int]] = field(default_factory=list)

    def add(self, seen: Mapping[str, float]) -> None:
        """One more repeat."""
        print(f"{self.what}: {', '.join(f'{page} {seconds:.1f} s' for page, seconds in seen.items())}", flush=True)
        for page, seconds in seen.items():
            self.seen_after_s.setdefault(page, []).append(seconds)

    def print(self) -> None:
        """A line for people."""
        for page, each in self.seen_after_s.items():
            times = f"{statistics.median(each):.1f} s ({min(each):.1f} to {max(each):.1f})"
            print(f"{self.what}: on the page {page} after {times}", flush=True)
        if self.alerts:
            print(f"{self.what}: alerts {self.alerts}", flush=True)


Pages = Mapping[str, tuple[str, str]]
"""By name: its address, and the selector of the mark."""


def seen_after(browser: Watched, pages: Pages, deed: Callable[[], None], pictures: Path | None) -> dict[str, float]:
    """Do the deed, and wait until each of the pages shows its mark, which none does before."""
    opened = {}
    for name, (path, _) in pages.items():
        opened[name] = browser.page.context.new_page()
        opened[name].goto(browser.address.partition("/?")[0] + path)
    time.sleep(USUAL_S)
    for name, (_, selector) in pages.items():
        shown = opened[name].locator(selector).all_inner_texts()
        assert not shown, f"{name} shows something before: {shown}"
    deed()
    begin_s, found = time.perf_counter(), dict[str, float]()
    while len(found) < len(pages):
        assert time.perf_counter() < begin_s + GUARD_S, f"not shown on {sorted(set(pages) - set(found))}"
        for name, (_, selector) in pages.items():
            if name not in found and opened[name].locator(selector).count():
                found[name] = time.perf_counter() - begin_s
        time.sleep(0.02)
    for name, page in opened.items():
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=pictures / f"{name}.png".lower())
        page.close()
    return found


@contextmanager
def looking_at(folder: Path) -> Iterator[Watched]:
    """A dashboard of this folder, and a browser that has entered."""
    with served(DataSource.of_folder(folder)) as address, watched(address) as browser:
        yield browser


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait for it."""
    until_s = time.monotonic() + GUARD_S
    while not is_so():
        assert time.monotonic() < until_s, f"{what} does not come"
        time.sleep(0.05)


def ranks(folder: Path, pictures: Path | None, slow: Scene, dead: Scene) -> None:
    """Ranks of a loop of one's own that record spans, 150 ms a step: one becomes slow, another is killed."""
    run, orders = folder / "job", folder.with_name(f"{folder.name}-orders")
    with live_ranks(run, orders, ranks=3, period_s=1.0) as processes:
        until(lambda: list((run / "telemetry" / "live").glob("*.arrows")), "the first span")
        with looking_at(folder) as browser:
            both = {"Machines": f"/machines?run={run.name}", "Run": f"/run?run={run.name}"}
            pages = {name: (path, WARN) for name, path in both.items()}
            slow.add(seen_after(browser, pages, (orders / "slow-2").touch, pictures and pictures / "slow"))
            pages = {name: (path, BAD) for name, path in both.items()}
            dead.add(seen_after(browser, pages, processes[1].kill, pictures and pictures / "dead"))


@contextmanager
def training(
    folder: Path, run: Path, prefixes: list[tuple[str, ...]], environments: list[dict[str, str]], **settings: Any
) -> Iterator[Path]:
    """A `phalanx train`, a process for each prefix of a command; the file whose making puts a spike into its loss."""
    order, config = folder / "spike", folder / "empty.toml"
    config.touch()
    changes = {"train.steps": 1_000_000, "telemetry.spans": True, "alerts.watch": True, "alerts.disk_free_bytes": 1}
    words = tiny.overrides(folder, run, tiny.SETTINGS | changes | settings)
    with (folder / "said.txt").open("wb") as said:
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-c", _TRAINS, str(order), "0.1", "train", str(config), *words],
                env=os.environ | environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            for prefix, environment in zip(prefixes, environments, strict=True)
        ]
    try:
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_bytes().count(b'"step_s"') > 45, "step 45")
        yield order
    finally:
        for process in processes:
            process.kill()
            process.wait()


def spike(folder: Path, pictures: Path | None, scene: Scene) -> None:
    """The weights of a model are multiplied: its loss jumps in the next three steps."""
    run = folder / "runs" / "night"
    with training(folder, run, [()], [{}]) as order, looking_at(run.parent) as browser:
        pages = {"Runs": ("/", WARN), "Run": ("/run?run=night", WARN)}

        def deed() -> None:
            order.touch()
            until(order.with_suffix(".done").exists, "the deed")

        scene.add(seen_after(browser, pages, deed, pictures and pictures / "spike"))
        time.sleep(2 * USUAL_S)
        scene.alerts.append(counted(run))


def healthy(folder: Path, number: int, seconds: float) -> tuple[list[str], dict[str, int]]:
    """A run with evaluations and checkpoints that is well: what pages show all the same, and alerts."""
    run, found = folder / "runs" / "night", dict[str, None]()
    settings = {"train.seed": number, "data.seed": number, "evaluate.every_steps": 60, "checkpoint.every_steps": 100}
    with training(folder, run, [()], [{}], **settings), looking_at(run.parent) as browser:
        opened = []
        for path in ("/", "/run?run=night", "/machines?run=night"):
            opened.append(browser.page.context.new_page())
            opened[-1].goto(browser.address.partition("/?")[0] + path)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for page in opened:
                found |= dict.fromkeys(page.locator(f"{WARN}, {BAD}").all_inner_texts())
            time.sleep(0.1)
        return list(found), counted(run)


def cut_plain(folder: Path, pictures: Path | None, scene: Scene) -> None:
    """Two ranks of a `phalanx train` over gloo in network namespaces; the interface of one goes down."""
    run = folder / "runs" / "night"
    with namespaces.two_hosts(1000) as hosts:
        port = str(_free_port())
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        shared |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
        environments = [
            shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface} for rank, host in enumerate(hosts)
        ]
        # The other host has a name of its own.
        renamed = ("unshare", "--uts", "sh", "-c", 'hostname node-1 && exec "$@"', "sh")
        prefixes = [hosts[0].prefix, (*hosts[1].prefix, *renamed)]
        settings = {"parallel.shard": 2, "alerts.stall_s": 5.0}
        with training(folder, run, prefixes, environments, **settings), looking_at(run.parent) as browser:
            pages = {"Runs": ("/", f"{WARN}, {BAD}"), "Run": ("/run?run=night", f"{WARN}, {BAD}")}
            pages["Machines"] = ("/machines?run=night", f"{WARN}, {BAD}")
            down = link_down(hosts[1].interface, hosts[1].prefix[3])
            scene.add(seen_after(browser, pages, down.__enter__, pictures and pictures / "cut-plain"))
            until(lambda: counted(run).get("stall"), "the alert")
            time.sleep(2 * USUAL_S)
            scene.alerts.append(counted(run))
            down.__exit__(None, None, None)


def cut_job(folder: Path, pictures: Path | None, scene: Scene) -> None:
    """A job of `phalanx run` of two hosts in network namespaces; the interface of one goes down."""
    runs = folder / "runs"
    run, script = runs / "job", folder / "train.py"
    runs.mkdir(parents=True)
    script.write_bytes(Path(tiny_training.__file__).read_bytes())
    network = Network(run, SUBNET)
    files = ensure_certificate(folder, [network.address, "127.0.0.1"])
    settings: dict[str, object] = {
        "run.backend_options": {"network": "namespaces", "subnet": SUBNET},
        "run.listen": f"{SUBNET.rpartition('.')[0]}.1:0",
        "run.alerts.watch": True,
        "run.alerts.disk_free_bytes": 1,
        **{f"run.tls.{name}": str(path) for name, path in vars(files).items()},
    }
    words = ["run", "--no-supervisor", "--hosts", "2", "--workers-per-host", "1", "--folder", str(run)]
    for name, value in settings.items():
        words += ["--set", f"{name}={toml_value(value)}"]
    losses, states = str(folder / "losses.txt"), str(folder / "states")
    words += ["--", str(script), "100000", "--losses", losses, "--states", states, "--pace", "0.15"]
    with (folder / "driver.txt").open("wb") as out:
        driver = subprocess.Popen([sys.executable, "-m", "phalanx", *words], stdout=out, stderr=out, cwd=folder)
    try:
        until(lambda: Path(losses).exists() and Path(losses).read_bytes().count(b"\n") > 30, "step 30")
        with looking_at(runs) as browser:
            pages = {name: (path, BAD) for name, path in (("Runs", "/"), ("Run", "/run?run=job"))}
            pages["Machines"] = ("/machines?run=job", ".look-cut-off")
            down = link_down(INTERFACE, network.name_of(number_of("host-2")))
            scene.add(seen_after(browser, pages, down.__enter__, pictures and pictures / "cut-job"))
            until(lambda: counted(run).get("incident"), "the alert")
            time.sleep(2 * USUAL_S)
            scene.alerts.append(counted(run))
    finally:
        driver.terminate()
        try:
            driver.wait(60)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        network.end()


def counted(run: Path) -> dict[str, int]:
    """How many alerts of each kind there were."""
    return dict(Counter(alert["kind"] for alert in read_alerts(run)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Play each scene, print when it was seen."""
    parser = benchmark_parser(__doc__, "the loss spike alone, once", repeats=3, as_json=True)
    parser.add_argument(
        "--only", choices=("ranks", "spike", "cut-plain", "cut-job", "healthy"), action="append", default=[]
    )
    parser.add_argument("--healthy", type=int, default=10, metavar="N", help="healthy runs that are looked at")
    parser.add_argument("--pictures", type=Path, help="folder for what the pages look like then")
    given = parser.parse_args()
    if why := why_no_browser():
        print(f"not measured: {why}")
        sys.exit(0 if given.quick else 1)
    slow, dead = Scene("a rank becomes slow"), Scene("a rank is killed")
    spiked = Scene("the loss jumps")
    plain, job = Scene("the network of a rank is cut"), Scene("the network of a host of a job is cut")
    wanted = given.only or (["spike"] if given.quick else ["ranks", "spike", "cut-plain", "cut-job"])
    print(machine())
    for turn in range(1 if given.quick else given.repeats):
        pictures = given.pictures if turn == 0 else None
        with TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            if "ranks" in wanted:
                (folder / "ranks").mkdir()
                ranks(folder / "ranks", pictures, slow, dead)
            others = (("spike", spike, spiked), ("cut-plain", cut_plain, plain), ("cut-job", cut_job, job))
            for each, play, scene in others:
                if each not in wanted:
                    continue
                if each != "spike" and (why_not := namespaces.cannot()):
                    print(f"{scene.what}: not measured, {why_not}")
                    continue
                (folder / each).mkdir()
                play(folder / each, pictures, scene)
    calm = []
    for turn in range(given.healthy if "healthy" in given.only or not (given.only or given.quick) else 0):
        with TemporaryDirectory(ignore_cleanup_errors=True) as name:
            calm.append(healthy(Path(name), turn, _HEALTHY_S))
        print(f"healthy run {turn}: shown {calm[-1][0]}, alerts {calm[-1][1]}", flush=True)
    played = [scene for scene in (slow, dead, spiked, plain, job) if scene.seen_after_s]
    for scene in played:
        scene.print()
    write_json(given.json, {"scenes": [json.loads(json.dumps(vars(scene))) for scene in played], "healthy": calm})


if __name__ == "__main__":
    main()
