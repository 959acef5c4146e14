"""What of a job listens, and where: nothing at all addresses, and of a job on one machine nothing that others reach."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from run_executor_parts import GUARD_S, make_executor
from support.recovery.job import Job

from phalanx.launch.rendezvous_store import open_store_socket
from phalanx.run import messages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    open(f"stepped-{rank}", "w").close()
    is_over = torch.tensor([float(os.path.exists("enough"))])
    dist.all_reduce(is_over)
    if is_over:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""

LISTENS = "0A"  # a state of /proc/net/tcp

OUTWARD = "192.0.2.77"

# A machine whose name stands for an address that other machines reach, as it does nearly everywhere.
NAMED = """
mount --bind "$1" /etc/hosts && hostname outward && ip link set lo up &&
ip link add outward0 type veth peer name outward1 && ip address add $2/24 dev outward0 && ip link set outward0 up &&
shift 2 && exec "$@"
"""

ANSWER = """
import os
print("store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
"""


def listeners(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Addresses at which processes listen, by what each is; of their own networks, which psutil does not know."""
    found: dict[str, list[str]] = {}
    for process in processes:
        own = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            held = {os.path.realpath(descriptor).rpartition("/")[2] for descriptor in (own / "fd").iterdir()}
            lines = [line.split() for kind in ("tcp", "tcp6") for line in (own / "net" / kind).open()]
            at = [address_of(line[1]) for line in lines if line[3] == LISTENS and f"socket:[{line[9]}]" in held]
            if at:
                found.setdefault((own / "comm").read_text().strip(), []).extend(at)
    return found


def more(found: dict[str, list[str]], before: dict[str, list[str]]) -> dict[str, list[str]]:
    """What has come since."""
    new = {name: list((Counter(at) - Counter(before.get(name, []))).elements()) for name, at in found.items()}
    return {name: at for name, at in new.items() if at}


def address_of(place: str) -> str:
    """As /proc/net has it: words of four bytes, each as the machine holds a number, and a port."""
    raw = bytes.fromhex(place.partition(":")[0])
    return str(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


def outward_machine(folder: Path) -> list[str]:
    """A command that runs another in a network of its own, whose one machine has a name that leads outside."""
    wanted = ("unshare", "ip", "mount", "hostname")
    if os.geteuid() != 0 or not all(map(shutil.which, wanted)):
        pytest.skip(f"needs root and {', '.join(wanted)}")
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{OUTWARD} outward\n")
    within = ["unshare", "--mount", "--uts", "--net", "sh", "-c", NAMED, "sh", str(hosts), OUTWARD]
    tried = subprocess.run([*within, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network of its own can be made here: {tried.stderr.strip()}")
    return within


@pytest.mark.campaign(but=("1-2",))
@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 2), (2, 1)])
def test_nothing_of_a_job_on_one_machine_is_reached_from_another(tmp_path: Path, hosts: int, per_host: int) -> None:
    within = outward_machine(tmp_path)
    (tmp_path / "listens.py").write_text(SCRIPT)
    words = ["--hosts", str(hosts), "--workers-per-host", str(per_host), "--set", "run.policy.joining_check=passive"]
    with Job(tmp_path, [*words, "--", "listens.py"], within=within) as job:
        job.wait_for(lambda: all((tmp_path / f"stepped-{rank}").exists() for rank in range(2)))
        found = listeners(job.processes())
        (tmp_path / "enough").touch()
        assert job.commands[-1].wait(GUARD_S) == 0, job.output
    assert {"phalanx store", "phalanx rank 0", "phalanx rank 1", "phalanx executo"} <= found.keys()
    assert len(found) > 4, "the driver listens too"
    reached = {name: at for name, at in found.items() if not all(ipaddress.ip_address(a).is_loopback for a in at)}
    assert not reached


@pytest.mark.campaign(but=("127.0.0.2-2-127.0.0.2", "127.0.0.2-1-127.0.0.1"))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "hosts", "at"),
    [("127.0.0.2", 2, "127.0.0.2"), ("::1", 2, "::1"), ("127.0.0.2", 1, "127.0.0.1")],
)
def test_the_store_listens_where_the_hosts_of_the_job_reach_it(
    tmp_path: Path, address: str, hosts: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the address of rank 0's host where there are several, at loopback where all ranks are on this one."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    before = listeners([psutil.Process()])  # groups of gloo that earlier tests opened in this process

    async def story() -> None:
        executor, driver = make_executor(tmp_path, ANSWER, address=address, hosts=hosts)
        task = asyncio.create_task(executor.run())
        executor.hear(messages.Welcome(1, "j", 0, 0.05))
        executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, []))
        executor.hear(messages.OpenStore(1))
        opened = await driver.until(messages.StoreOpened)
        assert more(listeners([psutil.Process()]), before) == {Path("/proc/self/comm").read_text().strip(): [at]}
        executor.hear(messages.Start(1, [0, 1], 2, 0, hosts, address, opened.port, 0))
        assert (await driver.until(messages.Started)).problem == ""
        for _ in range(2):
            assert (await driver.until(messages.WorkerEnded)).code == 0
        executor.hear(messages.End("the test is over", 6))
        assert await asyncio.wait_for(task, GUARD_S) == 6
        for rank in range(2):
            said = (tmp_path / "logs" / f"rank-{rank}" / "attempt-0001.0001.log").read_text()
            assert f"store {at} {opened.port} lo" in said and "met" in said

    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


def test_an_address_that_is_not_of_this_host_is_told_with_what_to_do(tmp_path: Path) -> None:
    async def story() -> None:
        executor, driver = make_executor(tmp_path, ANSWER, address="198.51.100.9", hosts=2)
        task = asyncio.create_task(executor.run())
        executor.hear(messages.OpenStore(1))
        opened = await driver.until(messages.StoreOpened)
        assert "198.51.100.9" in opened.problem and opened.port == 0
        executor.hear(messages.End("the test is over", 6))
        assert await asyncio.wait_for(task, GUARD_S) == 6

    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


def test_no_store_is_opened_at_all_addresses() -> None:
    for everywhere in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="one address"):
            open_store_socket(everywhere)
