"""Hosts made of recorded files, and checks that misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.checks.check_host import Check, CheckResult, Host, passed
from phalanx.checks.nvml import Gpu, Gpus

NODES = Path(__file__).parents[3] / "shared" / "data" / "nodes"


def recorded(name: str) -> Path:
    """A file or folder of other people's machines; the test skips where it is not at hand."""
    path = NODES / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


class KnownGpus(Gpus):
    """GPUs that are given."""

    def __init__(self, *gpus: Gpu) -> None:
        super().__init__()
        self._answer = gpus


def empty_host(root: Path, **given: Any) -> Host:
    """A host without anything; what the test needs, it gives."""
    fields: dict[str, Any] = {
        "proc": root / "proc",
        "sys": root / "sys",
        "dev": root / "dev",
        "cache": root / "cache",
        "run": lambda command, limit_s: None,
        "read_kernel_lines": lambda: None,
        "gpus": Gpus(root / "proc/driver/nvidia"),
    }
    return Host(**{**fields, **given})


def write_tree(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def rdma_port(
    state: str = "4: ACTIVE", physical: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)", **counters: int
) -> dict[str, Any]:
    files: dict[str, Any] = {"state": state, "phys_state": physical, "rate": rate, "link_layer": "InfiniBand"}
    files |= {f"counters/{name}": value for name, value in counters.items()}
    return {f"ports/1/{name}": value for name, value in files.items()}


def add_rdma(sys_root: Path, device: str, **port: Any) -> None:
    write_tree(sys_root / "class/infiniband" / device, rdma_port(**port))


def snapshot_tree(name: str, root: Path) -> Path:
    """A node of gcm's tests as a tree: PCI devices with their ports, and the links in class/ that lead to them."""
    files = json.loads(recorded(f"gcm-health-slurm/health_checks/{name}.json").read_text())
    for path, content in files.items():
        if path.startswith("/sys/bus/pci/devices/") and isinstance(content, str):
            target = root / path.removeprefix("/sys/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
    for kind in ("infiniband", "net"):
        for device in (root / "bus/pci/devices").glob(f"*/{kind}/*"):
            link = root / "class" / kind / device.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(device)
            if kind == "net":
                (device / "device").symlink_to(device.parent.parent)
    return root


def check(name: str, run: Any, **given: Any) -> Check:
    return Check(name, f"tests {name}", "passive", run, **given)


def fine(host: Host) -> CheckResult:
    return passed("fine")


def noisy(host: Host) -> CheckResult:
    print("a library says hello")
    os.write(1, b"and so does C\n")
    return passed("noisy", value=1.5, unit="things")


def crash(host: Host) -> CheckResult:
    raise RuntimeError("boom")


def die(host: Host) -> CheckResult:
    os.kill(os.getpid(), signal.SIGSEGV)
    return passed("die")


def leave(host: Host) -> CheckResult:
    sys.exit(7)


def hang(host: Host) -> CheckResult:
    threading.Event().wait()
    return passed("hang")


def hang_with_child(host: Host) -> CheckResult:
    pipe = os.open(host.environment["PIPE"], os.O_WRONLY)  # stays open until both are gone
    if os.fork() == 0:
        os.write(pipe, b"x")
    threading.Event().wait()
    return passed("hang")


def modules(host: Host) -> CheckResult:
    return passed("modules", " ".join(sorted({name.partition(".")[0] for name in sys.modules})))
