from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from keeper_helpers import SET, a_plan, a_snapshot, some_bytes
from keeper_processes import GUARD_S, a_host, a_process, a_rank, snapshots, until, until_gone, write

from phalanx.checkpoint.format.run_sums import first_fault
from phalanx.checkpoint.format.shard_plan import SnapshotId
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import address_for, end_keeper, ensure_keeper, is_listening
from phalanx.checkpoint.keeper_contract import KeeperLostError, RefusedError, Taken
from phalanx.core.errors import UserError

PLAN = a_plan((("w", "trained", 300_000), ("m", "optimizer", 300_000)))

WRITER = """
from pathlib import Path
from keeper_helpers import a_plan, some_bytes
from keeper_processes import a_rank, write
plan = a_plan((("w", "trained", 300_000), ("m", "optimizer", 300_000)))
keeper = a_rank(Path(sys.argv[1]), plan)
write(keeper, plan, 1, state='{"rows": 5}')
keeper.wait(1, "committed", 60)
if sys.argv[2] == "half":
    keeper.slot().memory[:1_000_000] = bytes(1_000_000)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("until_when", ["committed", "half"])
def test_what_is_committed_outlives_its_writer(until_when: str) -> None:
    with a_host(ensure_keeper) as address:
        with a_process(WRITER, [str(address), until_when]) as writer:
            writer.send_signal(signal.SIGKILL)
            writer.wait(GUARD_S)
        reader = KeeperClient(address, 0, 1)
        assert snapshots(reader) == [(1, 1, 0)]
        with reader.read(a_snapshot(1), 0) as (record, plan, memory):
            assert first_fault(memory, record, plan) is None
            assert bytes(memory) == some_bytes(PLAN, 1) and plan == PLAN
            assert record.state == '{"rows": 5}' and memory.readonly
        reader.close()


def test_a_slot_whose_copy_was_cut_off_is_used_again() -> None:
    with a_host() as address:
        with a_process(WRITER, [str(address), "half"]):
            pass
        rank = a_rank(address, PLAN, attempt=2)
        for step in (2, 3):
            write(rank, PLAN, step, 2)
            rank.wait(step, "committed", GUARD_S)
        assert snapshots(rank) == [(2, 2, 0), (2, 3, 0)]
        rank.close()


def test_what_was_taken_is_committed_though_its_writer_is_gone() -> None:
    with a_host() as address:
        rank = a_rank(address, PLAN)
        until(lambda: not rank.busy)
        slot = rank.slot()
        slot.memory[:] = some_bytes(PLAN, 1)
        rank.taken(slot, Taken(1))
        rank.close()
        reader = KeeperClient(address, 0, 1)
        assert snapshots(reader) == [(1, 1, 0)]  # waits for what is being examined
        reader.close()


def test_a_dead_keeper_is_noticed_and_another_one_started() -> None:
    with a_host() as address:
        rank = a_rank(address, PLAN)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        first = rank.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(KeeperLostError, match="gone"):
            rank.wait(2, "committed", GUARD_S)
        with pytest.raises(KeeperLostError):
            rank.held()
        rank.close()
        until_gone(first)
        with pytest.raises(KeeperLostError, match="no keeper can be reached"):
            KeeperClient(address, 0, 1)
        ensure_keeper(address, ttl_s=GUARD_S)
        again = a_rank(address, PLAN)
        assert again.pid != first and again.held() == [] and again.last_attempt == 0
        write(again, PLAN, 1)
        again.wait(1, "committed", GUARD_S)
        again.close()


def test_once_there_is_work_its_whole_session_gives_way() -> None:
    """A thread's niceness counts within its session only where the kernel shares cores out by session."""
    with a_host(ensure_keeper) as address:
        rank = a_rank(address, PLAN)
        group = Path(f"/proc/{rank.pid}/autogroup")
        if not group.is_file() or Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() != "1":
            pytest.skip("this kernel does not group processes by session")
        assert group.read_text().endswith("nice 0\n")
        own = Path("/proc/self/autogroup").read_text()
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        assert group.read_text().endswith("nice 10\n")
        assert Path("/proc/self/autogroup").read_text() == own
        rank.close()


@pytest.mark.campaign(but=("keeper.committed:2",))
@pytest.mark.parametrize("point", ["keeper.lease", "keeper.taken", "keeper.examined", "keeper.committed:2"])
def test_it_dies_at_the_points_where_faults_are_injected(point: str) -> None:
    with a_host(PHALANX_FAULTS=point) as address:
        rank = KeeperClient(address, 0, 1)
        with pytest.raises(KeeperLostError):
            rank.begin(1, SET, 1)
            rank.lease(PLAN, None, 2, None)
            until(lambda: rank.ready)
            for step in (1, 2):
                write(rank, PLAN, step)
                rank.wait(step, "committed", GUARD_S)
            until(lambda: rank.poll())
        until_gone(rank.pid)
        rank.close()


def test_exactly_one_is_started_however_many_ask() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from pathlib import Path; address = Path(sys.argv[1])\n"
        "from phalanx.checkpoint.keeper.keeper_start import ensure_keeper; ensure_keeper(address, ttl_s=60)\n"
        "from phalanx.checkpoint.keeper.keeper_client import KeeperClient; print(KeeperClient(address, 0, 1).pid)"
    )
    with a_host() as address:
        end_keeper(address)
        command = [sys.executable, "-c", program, str(address)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        pids = {rank.communicate(timeout=GUARD_S)[0] for rank in ranks}
        assert len(pids) == 1
        assert psutil.Process(int(pids.pop())).name() == "phalanx keeper"


def test_it_is_nobodys_child_and_ignores_the_signals_of_a_job() -> None:
    with a_host(ensure_keeper) as address:
        rank = a_rank(address, PLAN)
        keeper = psutil.Process(rank.pid)
        assert keeper.ppid() != os.getpid()
        assert os.getsid(rank.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            keeper.send_signal(number)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        rank.close()


def test_it_ends_when_every_rank_has_finished() -> None:
    with a_host(ensure_keeper) as address:
        ranks = [a_rank(address, a_plan(rank=number, world_size=2)) for number in range(2)]
        pid = ranks[0].pid
        ranks[0].finish()
        assert ranks[0].held() == []  # still there
        ranks[1].finish()
        until_gone(pid)
        assert not list(address.parent.glob(f"{address.name}*"))
        for rank in ranks:
            rank.close()


def test_a_keeper_that_was_asked_for_does_not_end_under_the_next_job() -> None:
    with a_host() as address:
        for attempt in range(1, 6):
            ensure_keeper(address, ttl_s=GUARD_S)
            rank = a_rank(address, PLAN, attempt)
            write(rank, PLAN, attempt, attempt)
            rank.wait(attempt, "committed", GUARD_S)
            rank.finish()
            rank.close()


def test_it_ends_some_time_after_the_last_one_hung_up() -> None:
    with a_host() as address:
        end_keeper(address)
        rank = None
        while rank is None:  # on a busy machine it may have ended before anybody has come
            ensure_keeper(address, ttl_s=0.5)
            with suppress(KeeperLostError):
                rank = a_rank(address, PLAN)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        with pytest.raises(TimeoutError):
            rank.wait(2, "committed", 1.0)  # longer than its time to live, but somebody is there
        pid = rank.pid
        rank.close()
        until_gone(pid)
        assert not is_listening(address) and not address.exists()


def test_only_its_user_gets_to_the_socket(tmp_path: Path) -> None:
    with a_host(ensure_keeper) as address:
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
    with tempfile.TemporaryDirectory() as short:  # a socket's path may not be long
        runtime = {"XDG_RUNTIME_DIR": short}
        found = address_for("s3://bucket/run", runtime)
        assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
        assert found != address_for("s3://bucket/other", runtime)
        found.parent.chmod(0o777)
        with pytest.raises(UserError, match="which others can enter"):
            address_for("s3://bucket/run", runtime)
        with pytest.raises(UserError, match="which others can write to"):
            address_for("", {"PHALANX_KEEPER": str(found)})
    with pytest.raises(UserError, match="107 bytes"):
        address_for("", {"PHALANX_KEEPER": str(tmp_path / ("x" * 107))})
    with tempfile.TemporaryDirectory() as short:
        assert address_for("", {"PHALANX_KEEPER": f"{short}/k"}) == Path(short) / "k"


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"phalanx-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a folder of this user"):
        address_for("runs", {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_keeper_that_cannot_be_started_says_why() -> None:
    with a_host() as address:
        end_keeper(address)
        with pytest.raises(KeeperLostError, match="is no fault point"):
            ensure_keeper(address, environ=os.environ | {"PHALANX_FAULTS": "name:none"})
        assert not address.exists()


def test_a_later_attempt_shuts_the_earlier_one_out() -> None:
    with a_host() as address:
        zombie = a_rank(address, PLAN)
        for step in (1, 2):
            write(zombie, PLAN, step)
            zombie.wait(step, "committed", GUARD_S)
        until(lambda: not zombie.busy)
        memory = zombie._maps[zombie._free or 0].memory  # it is about to write there
        rank = a_rank(address, PLAN, attempt=2)
        assert rank.last_attempt == 1
        with pytest.raises(RefusedError, match="attempt 2 has begun"):
            until(lambda: zombie.poll())
        for step in (3, 4, 5):
            memory[:] = bytes(len(memory))
            write(rank, PLAN, step, 2)
            rank.wait(step, "committed", GUARD_S)
        for held in rank.held():
            with rank.read(held.record.snapshot, 0) as (record, plan, copy):
                assert first_fault(copy, record, plan) is None
        late = KeeperClient(address, 0, 1)
        late.begin(1, SET, 1)
        with pytest.raises(RefusedError, match="attempt 1 is over"):
            late.held()
        for keeper in (zombie, rank, late):
            keeper.close()


def test_training_goes_on_from_an_older_snapshot() -> None:
    with a_host() as address:
        rank = a_rank(address, PLAN)
        for step in (1, 2):
            write(rank, PLAN, step)
            rank.wait(step, "committed", GUARD_S)
        rank.close()
        rank = a_rank(address, PLAN, attempt=2)
        rank.resume_from(a_snapshot(1))
        assert snapshots(rank) == [(1, 1, 0)]
        write(rank, PLAN, 2, 2)
        rank.wait(2, "committed", GUARD_S)
        assert snapshots(rank) == [(1, 1, 0), (2, 2, 0)]
        rank.close()


def test_a_copy_that_is_being_read_is_not_written_over() -> None:
    with a_host() as address:
        rank = a_rank(address, PLAN)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        reader = KeeperClient(address, 0, 1)
        with reader.read(a_snapshot(1), 0) as (_, __, memory):
            write(rank, PLAN, 2)
            rank.wait(2, "committed", GUARD_S)
            assert snapshots(rank) == [(1, 1, 0), (1, 2, 0)]
            assert rank.busy
            assert bytes(memory) == some_bytes(PLAN, 1)
        write(rank, PLAN, 3)
        rank.wait(3, "committed", GUARD_S)
        with pytest.raises(LookupError, match="no copy of step 1"), reader.read(a_snapshot(1), 0):
            pass
        with reader.read(a_snapshot(2), 0):
            write(rank, PLAN, 4) if not rank.busy else None
            reader.close()  # it goes without letting go
        until(lambda: not rank.busy)
        rank.close()


def test_memory_that_cannot_be_had_is_a_problem_and_not_a_signal() -> None:
    with a_host() as address:
        huge = a_plan((("w", "trained", 1 << 44),))
        rank = KeeperClient(address, 0, 1)
        rank.begin(1, SET, 1)
        rank.lease(huge, None, 2, None)
        news = []
        until(lambda: news.extend(rank.poll()) or news)
        assert news[0].step == -1 and "of memory" in news[0].problem
        assert not rank.ready and rank.busy
        rank.lease(PLAN, None, 2, None)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        rank.close()


def test_many_ranks_and_no_growth() -> None:
    plans = [a_plan((("w", "trained", 50_000 + rank),), rank, 6) for rank in range(6)]
    with a_host() as address:
        ranks = [a_rank(address, plan) for plan in plans]
        keeper = psutil.Process(ranks[0].pid)
        sizes = []
        for step in range(1, 51):
            for rank, plan in zip(ranks, plans, strict=True):
                write(rank, plan, step)
            for rank in ranks:
                assert not rank.wait(step, "committed", GUARD_S)[-1].problem
            sizes.append((keeper.memory_info().rss, keeper.num_fds()))
        assert sizes[-1][0] <= sizes[9][0] + (1 << 20) and sizes[-1][1] == sizes[9][1]
        slots = sum(2 * plan.data_bytes for plan in plans)
        assert sizes[-1][0] - slots < 60 << 20
        assert len(snapshots(ranks[0])) == 12
        random.Random(0).shuffle(ranks)
        for rank in ranks:
            rank.close()


def test_another_size_takes_the_place_of_the_first_when_it_is_whole() -> None:
    larger = a_plan((("w", "trained", 700_000),))
    with a_host() as address:
        rank = a_rank(address, PLAN)
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        rank.close()
        rank = a_rank(address, larger, attempt=2, set_id="new")
        with rank.read(a_snapshot(1), 0) as (record, plan, memory):
            assert first_fault(memory, record, plan) is None
        for step in (2, 3):
            write(rank, larger, step, 2)
            rank.wait(step, "committed", GUARD_S)
        assert snapshots(rank) == [(2, 2, 0), (2, 3, 0)]
        with rank.read(SnapshotId(3, 2, "new"), 0) as (record, plan, memory):
            assert first_fault(memory, record, plan) is None
        rank.close()


@pytest.mark.parametrize("junk", [b"\x00", b"[]", b'["Nothing"]', b'["Begin", 1]', b'["Free", 1, 2]', b"[1", b"7"])
def test_who_makes_no_sense_is_hung_up_on_and_the_others_are_not(junk: bytes) -> None:
    with a_host() as address:
        rank = a_rank(address, PLAN)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(address))
            stranger.settimeout(GUARD_S)
            stranger.send(junk)
            while stranger.recv(1 << 16):
                pass
        write(rank, PLAN, 1)
        rank.wait(1, "committed", GUARD_S)
        rank.close()


def test_slots_that_are_not_the_ranks_are_refused() -> None:
    other = a_plan(rank=1, world_size=2)
    with a_host() as address:
        rank = a_rank(address, other)
        write(rank, other, 1)
        rank.wait(1, "committed", GUARD_S)
        cheat = a_rank(address, a_plan(rank=0, world_size=2))
        cheat._free = next(iter(rank._maps))
        cheat._maps[cheat._free] = rank._maps[cheat._free]
        cheat.slot()
        with pytest.raises(KeeperLostError, match="is not rank 0's to write to"):
            cheat.held()
        assert snapshots(rank) == [(1, 1, 1)]
        rank.close()
