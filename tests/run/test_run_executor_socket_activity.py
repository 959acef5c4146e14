"""Real processes are looked at as a host looks at its ranks that make no step."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.settled import until_at_rest, until_in_loop

from phalanx.detect.hangs.socket_activity import (
    QUIET_S,
    RECEIVING,
    QuietRank,
    SocketBytes,
    StillnessWatch,
    _ready,
    _WatchedRank,
    open_files,
    quiet_after_s,
    tcp_bytes,
    waits_for,
)
from phalanx.detect.hangs.stack_traces import LOOK_S, RankStillness, Sample
from phalanx.run.judge.step_limits import LimitConfig
from phalanx.run.messages import Accelerator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LOOKS = 4
BETWEEN_S = 0.4
"""Of real time, for which the clock of the watch goes two seconds on."""

SLEEPS = "import time\nprint(1, flush=True)\ntime.sleep(600)"
SPINS = "print(1, flush=True)\nwhile True:\n    pass"
WALKS = """
def a(n): return sum(i * i for i in range(n))
def b(n): return sorted(range(n), key=lambda i: -i)
def c(n): return [str(i) for i in range(n)]
print(1, flush=True)
while True:
    for step in (a, b, c):
        step(20_000)
"""
CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(1, flush=True)
child.wait()
"""
WRITES = "out = open('/dev/null', 'wb', 0)\nprint(1, flush=True)\nwhile True:\n    out.write(bytes(1 << 20))"


@contextmanager
def script(text: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.read(1) == b"1"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def still_s(
    process: subprocess.Popen[bytes], watch: StillnessWatch, clock: Clock, looks: int = LOOKS, printed: int = 0
) -> float:
    return still_of({"": process}, watch, clock, looks, printed)[""]


def still_of(
    ranks: Mapping[str, subprocess.Popen[bytes]], watch: StillnessWatch, clock: Clock, looks: int, printed: int = 0
) -> dict[str, float]:
    """For how long each of several ranks of one host stands still."""
    for number in range(looks):
        watch.look([QuietRank(rank, one.pid, (1, 2), printed * number) for rank, one in enumerate(ranks.values())])
        time.sleep(BETWEEN_S)
        clock.now_s += 2.0
    clock.now_s -= 2.0
    return {name: watch.still_s(rank, (1, 2)) for rank, name in enumerate(ranks)}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StillnessWatch:
    return StillnessWatch(clock=clock)


def needs_sock_diag() -> None:
    if tcp_bytes() is None:
        pytest.skip("the kernel does not tell of sockets")


THREADS = """
import os, threading
def sort():
    while True:
        list(range(1000)).sort()
os.nice(19)
for _ in range(3):
    threading.Thread(target=sort).start()
print(1, flush=True)
threading.Event().wait()
"""


def test_a_rank_whose_steps_are_long_is_seen_before_it_may_count_as_hung() -> None:
    assert [quiet_after_s(took_s) for took_s in (0.0, 0.1, 8.0)] == [QUIET_S, QUIET_S, 12.0]
    assert quiet_after_s(3600.0) + 4 * LOOK_S < LimitConfig().floor_s


def schedstat(proc: Path, thread: int, used_s: float, turns: int) -> None:
    """As the kernel tells it of a thread that waited for a core most of the time."""
    folder = proc / "7" / "task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"{int(used_s * 1e9)} 4000000000 {turns}\n")
    (folder / "stat").write_text(f"{thread} (a) R 1\n")


def test_a_thread_that_wakes_up_to_look_at_something_does_not_compute_though_it_waits_for_a_core(
    tmp_path: Path,
) -> None:
    threads = _WatchedRank((), RankStillness(), 0.0)
    for thread in (7, 8, 9, 10):
        schedstat(tmp_path, thread, 1.0, 1000)
    assert threads.polling([7], tmp_path) == set()
    schedstat(tmp_path, 7, 1.3, 1200)
    schedstat(tmp_path, 8, 1.0025, 1120)  # a busy machine: 21 us each time, 120 times
    schedstat(tmp_path, 9, 1.1, 1230)  # one of several that hand the interpreter's lock to each other
    polling = threads.polling([7], tmp_path)  # 10 got no core at all
    assert polling == {8}
    assert _ready([7], polling, tmp_path) == (True, True)
    assert _ready([7], {8, 9, 10}, tmp_path) == (True, False)


DOWNLOADS = """
import hashlib, socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
def feed():
    client = server.accept()[0]
    while True:
        client.sendall(bytes({bytes}))
        time.sleep(0.05)
{where}
said = hashlib.sha256()
with socket.create_connection(server.getsockname()) as client:
    print(1, flush=True)
    while True:
        said.update(client.recv(1 << 16))
"""
IN_A_CHILD = "import os\nif not os.fork(): feed()"
IN_A_THREAD = "threading.Thread(target=feed, daemon=True).start()"


TALKS = """
import subprocess, sys
talks = "import time\\nwhile True:\\n    print('x' * 99, flush=True)\\n    time.sleep({every_s})"
child = subprocess.Popen([sys.executable, "-c", talks], stdout=subprocess.PIPE)
child.stdout.readline()
print(1, flush=True)
for line in child.stdout:
    pass
"""


RECEIVES = """
import socket, threading
made = socket.socket(socket.AF_{family}, socket.SOCK_{kind})
if "{kind}" == "DGRAM":
    made.bind({address!r})
    print("1", made.getsockname()[1], flush=True)
else:
    made.connect({address!r})
    print("1 0", flush=True)
lock = threading.Lock()
def poll():
    while not lock.acquire(timeout=0.05):
        pass
lock.acquire()
threading.Thread(target=poll, daemon=True).start()
while made.recv(1 << 16):
    pass
"""


@contextmanager
def sender(kind: str, every_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process that receives 4 kB every so often, and not from its own children."""
    ended = threading.Event()

    def send(far: socket.socket) -> None:
        while not ended.wait(every_s):
            far.send(bytes(4000))

    with ExitStack() as stack:
        if kind == "UDP":
            text = RECEIVES.format(family="INET", kind="DGRAM", address=("127.0.0.1", 0))
            process = stack.enter_context(script(text))
            assert process.stdout is not None
            far = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            far.connect(("127.0.0.1", int(process.stdout.readline())))
        else:
            address = f"\0phalanx-{os.getpid()}-{every_s}"
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address), server.listen()
            text = RECEIVES.format(family="UNIX", kind="STREAM", address=address)
            process = stack.enter_context(script(text))
            far = stack.enter_context(server.accept()[0])
        thread = threading.Thread(target=send, args=[far])
        thread.start()
        try:
            yield process
        finally:
            ended.set()
            thread.join()


def test_who_sleeps_waits_is_stopped_or_goes_round_in_one_place_stands_still(
    watch: StillnessWatch, clock: Clock
) -> None:
    """Beside others that receive much, which is no movement of theirs."""
    with ExitStack() as stack:
        start = lambda text: stack.enter_context(script(text))  # noqa: E731
        start(DOWNLOADS.format(bytes=80_000, where=IN_A_CHILD))
        ranks = {
            "sleeps": start(SLEEPS),
            "waits for words of a child that is silent": start(TALKS.format(every_s=600)),
            **{f"waits for {kind}": stack.enter_context(sender(kind, every_s=600)) for kind in ("unix", "UDP")},
        }
        for one in ranks.values():
            until_at_rest(one.pid)
        ranks["hears a word now and then"] = start(DOWNLOADS.format(bytes=100, where=IN_A_CHILD))
        ranks["is stopped"] = start(WALKS)
        os.kill(ranks["is stopped"].pid, signal.SIGSTOP)
        until_at_rest(ranks["is stopped"].pid, "T")
        if watch.program is not None:
            ranks["goes round"] = start(SPINS)
            until_in_loop(ranks["goes round"].pid)
        assert still_of(ranks, watch, clock, looks=6) == dict.fromkeys(ranks, 2.0 * 5)


def test_who_computes_writes_receives_or_wants_a_core_moves(watch: StillnessWatch, clock: Clock) -> None:
    with ExitStack() as stack:
        start = lambda text: stack.enter_context(script(text))  # noqa: E731
        computes = {
            # Now and then it is seen in the same function at four looks running, which proves nothing.
            "walks": start(WALKS),
            "has a child that computes": start(CHILD),
            "writes": start(WRITES),
            # Its main thread waits for others, and these for a core that other processes have, and for each other.
            "wants a core": start(THREADS),
        }
        receives = {
            "hears a child that sleeps in between": start(TALKS.format(every_s=0.1)),
            **{f"hears by {kind}": stack.enter_context(sender(kind, every_s=0.01)) for kind in ("unix", "UDP")},
        }
        if tcp_bytes() is not None:
            for name, where in (("a child", IN_A_CHILD), ("a thread", IN_A_THREAD)):
                receives[f"receives of {name}"] = start(DOWNLOADS.format(bytes=80_000, where=where))
        found = still_of(computes | receives, watch, clock, looks=3 * LOOKS)
        assert {name: found[name] for name in receives} == dict.fromkeys(receives, 0.0)
        assert not {name: still_s for name, still_s in found.items() if still_s > 2.0}


@pytest.mark.skipif(platform.machine() not in RECEIVING, reason="numbers of system calls are not known here")
@pytest.mark.parametrize("kind", ["unix", "UDP"])
def test_where_the_kernel_does_not_name_what_is_waited_for_the_call_tells(kind: str, tmp_path: Path) -> None:
    def without_wchan(process: subprocess.Popen[bytes]) -> Path:
        found, pid = tmp_path / str(process.pid), str(process.pid)
        (found / "task" / pid).mkdir(parents=True)
        (found / "task" / pid / "wchan").write_text("0")
        (found / "fd").symlink_to(f"/proc/{pid}/fd")
        for _ in range(100):  # until it has come as far
            shutil.copyfile(f"/proc/{pid}/task/{pid}/syscall", found / "task" / pid / "syscall")
            if waits_for(process.pid, {}, tmp_path):
                break
            time.sleep(0.05)
        return found

    with sender(kind, every_s=600) as process:
        found = without_wchan(process)
        assert waits_for(process.pid, {}, tmp_path) == "socket"
        [inode] = [int(link[8:-1]) for link in open_files(process.pid) if link.startswith("socket:[")]
        assert waits_for(process.pid, {inode: 1}, tmp_path) == "", "TCP has counters of its own"
        (found / "task" / str(process.pid) / "syscall").write_text("230 0x0 0x0 0x7ffde100")
        assert waits_for(process.pid, {}, tmp_path) == ""
    with script(TALKS.format(every_s=600)) as process:
        without_wchan(process)
        assert waits_for(process.pid, {}, tmp_path) == "pipe"


def test_who_is_on_a_core_at_one_look_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fed a hundred times a second is now and then found between two waits."""
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    (task / "syscall").write_text("running")
    (task / "wchan").write_text("0")
    later = iter(["futex_wait_queue", "unix_stream_data_wait"])
    monkeypatch.setattr(time, "sleep", lambda _: (task / "wchan").write_text(next(later)))
    assert waits_for(7, {}, tmp_path) == "socket"
    later = iter(["futex_wait_queue"] * 3)
    (task / "wchan").write_text("futex_wait_queue")
    assert waits_for(7, {}, tmp_path) == "" and not list(later)


def test_bytes_of_a_socket_are_counted_as_they_are_sent() -> None:
    needs_sock_diag()
    counted = SocketBytes()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            assert counted.add([os.getpid()], tcp_bytes() or {}) == 0
            near.sendall(bytes(100_000))
            assert len(far.recv(100_000, socket.MSG_WAITALL)) == 100_000
            # Both ends are ours; what is not yet acknowledged is not yet sent.
            assert 100_000 <= counted.add([os.getpid()], tcp_bytes() or {}) <= 200_010
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        near, far = socket.create_connection(server.getsockname()[:2]), server.accept()[0]
        near.sendall(bytes(50_000))
        assert len(far.recv(50_000, socket.MSG_WAITALL)) == 50_000
        before = counted.add([], {})
        assert counted.add([os.getpid()], tcp_bytes() or {}) - before >= 50_000
        near.close(), far.close()


def test_heartbeats_of_a_thousand_ranks_at_a_store_are_chatter(tmp_path: Path) -> None:
    """Where rank 0 holds the store, each of the others says some hundred bytes a second to it, hung or not."""
    (tmp_path / "7" / "fd").mkdir(parents=True)
    for inode in range(1000):
        (tmp_path / "7" / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")
    counted = SocketBytes()
    for look in range(4):
        assert counted.add([7], dict.fromkeys(range(1000), 1000 * look), tmp_path) == 0
    downloads = dict.fromkeys(range(1000), 4000) | {5: 4_000_000}
    assert counted.add([7], downloads, tmp_path) == 4_000_000 - 3000


def test_where_the_kernel_does_not_tell_of_sockets_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError("no netlink here")

    monkeypatch.setattr(socket, "socket", refused)
    assert tcp_bytes() is None


def test_output_is_movement(watch: StillnessWatch, clock: Clock) -> None:
    with script(SLEEPS) as process:
        assert still_s(process, watch, clock, looks=2, printed=10) == 0.0


def test_a_long_call_of_a_compiled_library_moves(watch: StillnessWatch, clock: Clock) -> None:
    if watch.program is None:
        pytest.skip("py-spy is not installed")
    text = "import numpy as np\na = np.random.rand(4000, 4000)\nprint(1, flush=True)\nwhile True:\n    np.linalg.svd(a)"
    with script(text) as process:
        assert still_s(process, watch, clock) <= 2.0


def test_where_stacks_cannot_be_read_cpu_time_is_movement(clock: Clock) -> None:
    watch = StillnessWatch(program=None, clock=clock)
    with script(SPINS) as spins, script(SLEEPS) as sleeps:
        found = still_of({"spins": spins, "sleeps": sleeps}, watch, clock, LOOKS)
        assert found == {"spins": 0.0, "sleeps": 2.0 * (LOOKS - 1)}


def test_another_pause_is_looked_at_anew_and_who_makes_steps_again_is_forgotten(
    watch: StillnessWatch, clock: Clock
) -> None:
    with script(SLEEPS) as process:
        assert still_s(process, watch, clock, looks=2) > 0
        assert watch.still_s(0, (3, 4)) == -1.0 == watch.still_s(1, (1, 2))
        watch.look([QuietRank(0, process.pid, (3, 4))])
        assert watch.still_s(0, (3, 4)) == 0.0
        watch.look([])
        assert watch.still_s(0, (3, 4)) == -1.0


def test_a_process_that_is_gone_is_nothing_to_look_at(watch: StillnessWatch) -> None:
    with script(SLEEPS) as process:
        pid = process.pid
    watch.look([QuietRank(0, pid, ())])


@pytest.mark.parametrize(("activity", "found"), [((-1.0,), None), ((0.0, 0.3), True), ((0.0, 0.01), False), ((), None)])
def test_a_gpu_works_when_its_memory_is_used(
    activity: tuple[float, ...], found: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sample] = []
    monkeypatch.setattr(RankStillness, "observe", lambda self, sample: seen.append(sample))
    devices = [Accelerator("H100", 80 << 30, utilisation=1.0, memory_activity=share) for share in activity]
    watch = StillnessWatch(lambda: devices, program=None)
    watch.look([QuietRank(0, os.getpid(), ())])
    assert [sample.is_gpu_active for sample in seen] == [found]


def test_counters_that_the_kernel_does_not_give_say_nothing(clock: Clock, tmp_path: Path) -> None:
    with script(SLEEPS) as process:
        folder = tmp_path / str(process.pid)
        folder.mkdir()
        shutil.copy(f"/proc/{process.pid}/stat", folder / "stat")
        watch = StillnessWatch(program=None, proc=tmp_path, clock=clock)
        assert still_s(process, watch, clock) == 2.0 * (LOOKS - 1)
