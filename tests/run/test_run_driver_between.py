"""A driver that has its hosts test the network between them, after nobody stood out twice: emulated, and really."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from driver_helpers import FakeHost, Town, running

from phalanx.checks.network import judge_peers
from phalanx.checks.peer_bandwidth import PeerMeasure
from phalanx.run import messages
from phalanx.run.backends.local import INTERFACE, Network
from phalanx.run.decide import actions
from phalanx.run.decide.policy import Job
from phalanx.run.incidents.incident_pages import to_markdown
from phalanx.run.incidents.report import Incident, after
from phalanx.run.secrets import ensure_token

Links = dict[str, float]
"""Bytes per second of each host's link; 0: nothing comes through."""

SUBNET = "100.64.217.0/24"

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None,
    reason="needs Linux, root, ip and nsenter",
)


@pytest.fixture(name="town")
def town_fixture(tmp_path: Path) -> Iterator[Town]:
    """Four hosts on machines of their own, and a spare."""
    made = Town(tmp_path, list("abcde"), Job("j", hosts=4, workers_per_host=1, spares=1))
    for number, host in enumerate(made.hosts.values()):
        host.boot, host.peer_port = f"boot {number}", 4000 + number
    yield made
    made.journal.close()


def emulate(town: Town, links: Links) -> None:
    """Let hosts measure what these links carry, and judge it as they do."""
    by_address = {f"at-{host.name}:{host.peer_port}": links[host.name] for host in town.hosts.values()}

    def check(host: FakeHost, order: messages.Check) -> list[messages.CheckOutcome]:
        rates = {address: min(by_address[address], links[host.name]) for address in order.peers}
        measured = [PeerMeasure(peer, rate, rate, 1e-5, 0.0, 1e-6) for peer, rate in rates.items() if rate > 0]
        problems = {peer: f"{peer}: timed out" for peer, rate in rates.items() if not rate}
        if order.kind == "passive" or not rates:
            return [messages.CheckOutcome("memory", "pass")]
        found = judge_peers(measured, problems, is_suspect=True)
        return [messages.CheckOutcome("memory", "pass"), messages.CheckOutcome(**asdict(found))]

    for host in town.hosts.values():
        host.check = lambda order, host=host: check(host, order)  # type: ignore[misc]


def hang_twice(town: Town) -> None:
    """No rank makes a step, and none is silent: the second time all hosts are tested with each other."""
    for attempt in (1, 2):
        town.until(running(attempt))
        town.go_on(20)
        for host in town.hosts.values():
            host.heard.clear()
            host.stalled = bool(host.ranks)
        town.until(lambda state: state.recovery is not None, within_s=90)


def asked(town: Town) -> list[tuple[str, list[str]]]:
    """Who was asked to test which addresses, in the order of the checks."""
    orders = [(one.number, host, one.peers) for host, one in town.sent(messages.Check)]  # type: ignore[union-attr]
    return [(host, peers) for _, host, peers in sorted(orders)]


def report(town: Town) -> str:
    return "\n".join(f"{one.text}: {one.why}" for one in town.told if isinstance(one, actions.AddToIncident))


def page(town: Town) -> str:
    """The last report as people read it."""
    incident: Incident | None = None
    for one in town.told:
        if isinstance(one, actions.OpenIncident | actions.AddToIncident | actions.CloseIncident):
            fresh = None if isinstance(one, actions.OpenIncident) else incident
            incident = after(fresh, one, "j", 1e9, lambda text: text)
    assert incident is not None
    return to_markdown(incident)


def evicted(town: Town) -> list[str]:
    return [one.host for one in town.orders if isinstance(one, actions.Evict)]


def test_the_host_whose_link_is_dead_is_evicted_and_its_neighbour_stays(town: Town) -> None:
    town.begin()
    emulate(town, dict.fromkeys("abce", 10e9) | {"d": 0.0})
    hang_twice(town)
    town.until(running(3))
    at = {name: f"at-{name}:{host.peer_port}" for name, host in town.hosts.items()}
    first = [("a", [at["b"]]), ("b", [at["a"]]), ("c", [at["d"]]), ("d", [at["c"]])]
    assert asked(town) == [*first, ("c", [at["a"]]), ("d", [at["b"]])]
    assert evicted(town) == ["d"] and town.driver.state.placement == ("a", "b", "c", "e")
    shown = page(town)
    for line in (
        "| first round: a with b, c with d | each host is tested with its neighbour |",
        "| second round: c with a, d with b | each is tested with a host of a good pair |",
        "| c cleared | good with a good host |",
        "| d is evicted | bad with b too, which is good |",
        "bad: c with d: no measure: timed out; good: a with b",
    ):
        assert line in shown
    state = town.driver.state
    town.restart()
    assert msgspec.structs.replace(town.driver.state, now_s=0.0) == msgspec.structs.replace(state, now_s=0.0)


def test_a_slow_link_is_found_between_hosts_on_machines_of_their_own_only(tmp_path: Path) -> None:
    for number, is_one_machine in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        town = Town(folder, list("abcdefg"), Job("j", hosts=6, workers_per_host=1, spares=1))
        for place, host in enumerate(town.hosts.values()):
            host.boot, host.peer_port = "one" if is_one_machine else f"boot {place}", 4000 + place
        town.begin()
        emulate(town, dict.fromkeys("abcdefg", 10e9) | {"f": 1e9})
        hang_twice(town)
        town.until(running(3))
        assert evicted(town) == ([] if is_one_machine else ["f"])
        town.journal.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_driver_that_is_started_again_in_a_round_goes_on_with_it(town: Town, nth: int) -> None:
    """The host with the dead link does not answer its check of this round before that."""
    town.begin()
    emulate(town, dict.fromkeys("abce", 10e9) | {"d": 0.0})
    hang_twice(town)
    late, answer = town.hosts["d"], town.hosts["d"].answer

    def answer_late(message: messages.FromDriver, now_s: float) -> list[messages.FromExecutor]:
        answers = answer(message, now_s)
        checks = [one for one in late.heard if isinstance(one, messages.Check)]
        return [] if isinstance(message, messages.Check) and len(checks) == nth else answers  # it is busy with it

    late.answer = answer_late  # type: ignore[method-assign]
    town.until(lambda state: list(state.checks) == ["d"])
    town.restart()
    town.until(running(3))
    assert set(evicted(town)) == {"d"}  # said again when it connects again
    assert "c cleared: good with a good host" in report(town)


# Really: hosts with network namespaces of their own

HOST = """
import sys
from contextlib import ExitStack
from pathlib import Path
import msgspec
from phalanx.checks.runner import CHECKS
from phalanx.run import messages
from phalanx.run.executor.main import open_to_peers
from phalanx.run.executor.host_monitor import HostContext, check_host

name, address, token, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
others = frozenset(one.name for one in CHECKS) - {"peers", "clock"}
context = HostContext(name, address, "", {"HOME": str(folder)}, folder, folder)
with ExitStack() as doors:
    print(open_to_peers(doors, address, token.read_bytes().strip()), flush=True)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=messages.Check)
        found = []
        if order.kind != "passive":
            found = check_host(context, order.kind, order.peers, [], skip=others, token=token)
        print(msgspec.json.encode(found).decode(), flush=True)
"""


@pytest.fixture(name="network")
def network_fixture(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path, SUBNET)
    yield made
    made.end()


def live_at(host: FakeHost, number: int, network: Network, token: Path, doors: ExitStack) -> None:
    """Let a host test and be tested in a namespace of its own, with the code of executors."""
    network.join(number)
    host.address = network.address_of(number)
    folder = token.parent.parent / host.name
    folder.mkdir()
    command = [sys.executable, "-c", HOST, host.name, host.address, str(token), str(folder)]
    process = doors.enter_context(
        subprocess.Popen(
            network.command(number, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
    )
    doors.callback(process.kill)
    assert process.stdin is not None and process.stdout is not None
    host.peer_port = int(process.stdout.readline())
    assert host.peer_port

    def check(order: messages.Check, lines: subprocess.Popen[str] = process) -> list[messages.CheckOutcome]:
        assert lines.stdin is not None and lines.stdout is not None
        lines.stdin.write(msgspec.json.encode(order).decode() + "\n")
        return msgspec.json.decode(lines.stdout.readline(), type=list[messages.CheckOutcome])

    host.check = check


@needs_root
@pytest.mark.slow
def test_a_link_that_is_really_down_is_named_by_real_measurements(town: Town, network: Network, tmp_path: Path) -> None:
    token = tmp_path / "secret" / "token"
    ensure_token(token)
    network.begin()
    with ExitStack() as doors:
        for number, host in enumerate(town.hosts.values(), start=1):
            live_at(host, number, network, token, doors)
        town.begin()
        town.until(running(1))
        down = ["ip", "-n", network.name_of(3), "link", "set", INTERFACE, "down"]  # of host c
        subprocess.run(down, check=True)
        hang_twice(town)
        town.until(running(3))
    assert evicted(town) == ["c"] and town.driver.state.placement == ("a", "b", "e", "d")
    assert "d cleared: good with a good host" in report(town)
    assert "bad: c with d: no measure: " in report(town)
