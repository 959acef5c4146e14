"""A benchmark that is killed leaves nothing: no processes, no networks, no mounts, no temporary files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leaving import nothing_left

from phalanx.run.backends.local import Network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GUARD_S = 240.0
SUBNET = "100.64.214.0/24"

# What it starts is in a session of its own, hears no SIGTERM, and has lost its parent: a first one starts it and ends.
STARTING = """
import signal, subprocess, sys, tempfile, time
from pathlib import Path
from support.leaving import nothing_left

SLEEP = "import signal as s, sys, time; s.signal(s.SIGTERM, s.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(999)"
START = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"

with nothing_left() as folder, tempfile.TemporaryDirectory() as inner:
    assert Path(inner).parent == folder
    begun = Path(inner, "begun")
    subprocess.run([sys.executable, "-c", START, SLEEP, str(begun)], check=True)
    while not begun.exists():
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(999)
"""

# A campaign that does not come to its own clearing up, in a subnet that is not the real one's.
CAMPAIGN = """
import sys, tempfile, time
from pathlib import Path
from phalanx.faults.host_faults import small_disk
from phalanx.run.backends.local import Network
from phalanx.run.campaign.case_command import CasePaths
from phalanx.run.campaign.case_run import forget_networks
from support.leaving import nothing_left

with nothing_left(forget_networks):
    places = CasePaths(Path(tempfile.mkdtemp(prefix="job-")) / "job")
    network = Network(places.run, sys.argv[1])
    places.folder.mkdir()
    network.begin()
    network.join(1)
    with small_disk(places.disk("host-1"), 1 << 20):
        print(places.run, flush=True)
        time.sleep(999)
"""


@contextlib.contextmanager
def running(tmp_path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program whose temporary files are below `tmp_path`; it and what it starts are known by that."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{BENCHMARKS}:{ROOT}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for pid in belonging(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def belonging(folder: Path) -> list[int]:
    """Processes that run and have the folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_what_was_started_goes_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "-c", STARTING) as process:
        assert first_line(process) == "ready"
        assert len(belonging(tmp_path)) == 3  # it, who watches over it, and what it has started
        process.send_signal(number)
        status = process.wait(GUARD_S)
        until(lambda: not belonging(tmp_path))
        until(lambda: not list(tmp_path.iterdir()))
        expected = {signal.SIGTERM: 143, signal.SIGHUP: 129}
        assert status == expected.get(number, -number)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_networks_and_disks_of_a_campaign_go_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "-c", CAMPAIGN, SUBNET) as process:
        network = Network(Path(first_line(process)), SUBNET)
        try:
            assert networks(network) and str(tmp_path) in Path("/proc/mounts").read_text()
            process.send_signal(number)
            process.wait(GUARD_S)
            until(lambda: not belonging(tmp_path))
            assert not networks(network)
            assert str(tmp_path) not in Path("/proc/mounts").read_text()
            assert not list(tmp_path.iterdir())
        finally:
            network.end()


def networks(network: Network) -> list[str]:
    """What there is of it on this machine."""
    prefix = network.name_of(1).partition("-")[0]
    found = [path.name for path in (*Path("/run/netns").glob("*"), *Path("/sys/class/net").iterdir())]
    return [name for name in found if name.startswith(prefix)]


@pytest.mark.campaign(but=("run_wire.py",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("run_wire.py --counts 3 --contenders ours", ["crowd.servers", "crowd.clients"]),
        ("run_scale.py --counts 3", ["crowd.driver", "crowd.hosts"]),
        ("run_warm_start.py --scripts ddp.py", ["ddp.py"]),
        ("run_recovery.py --sizes 1 --faults", ["phalanx.run.executor", "phalanx templat"]),
        ("run_recovery.py --sizes 1 --faults --cases torchrun", ["torch.distributed.run", " -u "]),
        ("run_campaign.py --only sigkill", ["phalanx.run.executor", "phalanx templat"]),
    ],
    ids=["run_wire.py", "run_scale.py", "run_warm_start.py", "run_recovery.py", "torchrun", "run_campaign.py"],
)
def test_each_of_run_leaves_nothing_when_it_is_killed(tmp_path: Path, words: str, started: list[str]) -> None:
    script, *options = words.split()
    if options[-1] == "torchrun":
        options[-1] = "torchrun, state in a file"
    with running(tmp_path, str(BENCHMARKS / script), *options) as process:

        def all_run() -> bool:
            assert process.poll() is None, "it has ended"
            return all(any(name in line for line in shown(tmp_path)) for name in started)

        until(all_run)
        process.kill()
        until(lambda: not belonging(tmp_path))
        left = [path for path in tmp_path.iterdir() if path.name.startswith("work-")]
        assert not left


def shown(folder: Path) -> list[str]:
    """Name and command line of all that belongs to the folder."""
    found = []
    for pid in belonging(folder):
        with contextlib.suppress(OSError):
            words = [Path(f"/proc/{pid}/{name}").read_text() for name in ("comm", "cmdline")]
            found.append(" ".join(words).replace("\0", " "))
    return found


def test_what_is_kept_stays_and_nothing_else_is_changed(tmp_path: Path) -> None:
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    with nothing_left(keep=True, inside=tmp_path) as folder:
        assert folder.parent == tmp_path
        (folder / "kept").touch()
        assert signal.getsignal(signal.SIGTERM) != handler
    assert (folder / "kept").exists()
    assert dict(os.environ) == before and signal.getsignal(signal.SIGTERM) == handler
    with nothing_left(keep=True, inside=tmp_path) as empty:
        pass
    assert not empty.exists()
