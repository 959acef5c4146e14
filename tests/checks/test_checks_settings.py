"""What the system tells: cores, memory, limits, disks, processes, timeouts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checks_helpers import empty_host, recorded, write_tree

from phalanx.checks import cpu, disks, leftover_processes, memory, system_settings
from phalanx.checks.check_host import Host, cache_folder, run_command
from phalanx.checks.isolated_check import run_isolated
from phalanx.checks.leftover_processes import UserProcess, judge_leftovers
from phalanx.checks.system_settings import ib_wait_s, judge_timeouts
from phalanx.core.host import Mount


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return empty_host(tmp_path)


def test_cores_that_are_offline(host: Host) -> None:
    write_tree(host.sys / "devices/system/cpu", {"present": "0-7", "online": "0-3,6"})
    result = cpu.check_cores(host)
    assert (result.outcome, result.value, result.threshold) == ("fail", 5.0, 8.0)
    assert cpu.judge_cores(8, 8, 8, None).outcome == "pass"
    off = cpu.judge_cores(8, 4, 4, None, smt_off=True)
    assert (off.outcome, off.reason) == (
        "pass",
        "no threshold is known; the second thread of each core is switched off",
    )
    few = cpu.judge_cores(8, 8, 4, 2.5)
    assert few.outcome == "pass"
    assert few.reason == "this process may use 4 of 8; its control group grants the time of 2.5"
    assert cpu.check_cores(replace(host, expected={"cores": 1e6})).outcome == "fail"


def test_quotas_of_both_kinds_of_control_groups(host: Host) -> None:
    assert cpu.read_quota(host) is None
    write_tree(host.sys, {"fs/cgroup/cpu/cpu.cfs_quota_us": 150000, "fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    assert cpu.read_quota(host) == 1.5
    write_tree(host.proc, {"self/cgroup": "0::/user/job"})
    write_tree(host.sys, {"fs/cgroup/user/job/cpu.max": "400000 100000"})
    assert cpu.read_quota(host) == 4.0


def test_a_memory_module_that_is_gone(host: Host) -> None:
    write_tree(host.proc, {"meminfo": "MemTotal:  1000000 kB\nSwapTotal: 0 kB"})
    assert memory.check_size(host).outcome == "pass"
    write_tree(host.proc, {"meminfo": "MemTotal:  995000 kB"})
    assert memory.check_size(host).outcome == "pass"  # another kernel
    write_tree(host.proc, {"meminfo": "MemTotal:  937500 kB"})
    result = memory.check_size(host)
    assert result.outcome == "fail"
    assert "most seen here" in result.threshold_source


def test_memory_errors(host: Host) -> None:
    assert memory.check_errors(host).outcome == "skip"
    controllers = host.sys / "devices/system/edac/mc"
    write_tree(controllers, {"mc0/ue_count": 0, "mc0/ce_count": 7, "mc1/ue_count": 0, "mc1/ce_count": 0})
    assert memory.check_errors(host).reason == "7 corrected since the boot"
    write_tree(controllers, {"mc1/ue_count": 2, "mc1/mc_name": "skx#1"})
    result = memory.check_errors(host)
    assert (result.outcome, result.value) == ("fail", 2.0)
    assert "mc1 (skx#1) could not correct 2" in result.reason


def test_notes_never_fail(host: Host) -> None:
    write_tree(host.proc, {"meminfo": "SwapTotal: 2097152 kB\nSwapFree: 1048576 kB", "sys/kernel/numa_balancing": 1})
    write_tree(
        host.sys,
        {
            "devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            "devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
            "devices/system/node/node0/cpulist": "0",
            "devices/system/node/node1/cpulist": "1",
            "kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        },
    )
    assert (memory.check_swap(host).outcome, memory.check_swap(host).value) == ("pass", 1.0)
    told = system_settings.check_tuning(host)
    assert told.outcome == "pass"
    for part in ("1 cores powersave", "huge pages: madvise", "numa_balancing=0"):
        assert part in told.reason


def test_limits() -> None:
    good = {"files": 1 << 20, "processes": -1, "pinned": 65536}
    assert system_settings.judge_limits(good, has_rdma=False).outcome == "pass"
    bad = system_settings.judge_limits({**good, "files": 256, "processes": 64}, has_rdma=True)
    assert bad.outcome == "fail"
    for part in ("256 open files", "64 processes", "65536 bytes may be pinned"):
        assert part in bad.reason
    assert "ulimit -l unlimited" in bad.action
    assert system_settings.judge_limits({**good, "pinned": -1}, has_rdma=True).outcome == "pass"


def test_limits_of_pinned_memory_do_not_hold_for_all() -> None:
    assert system_settings.may_pin("Name:\tx\nCapEff:\t000001ffffffffff\n")
    assert not system_settings.may_pin("CapEff:\t00000000a80425fb\n")  # Docker's default
    assert not system_settings.may_pin("")


def test_shared_memory(host: Host, tmp_path: Path) -> None:
    assert memory.check_shm(host).outcome == "skip"
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert memory.check_shm(host).unit == "GiB free"
    assert memory.check_shm(replace(host, expected={"shm": 1e9})).outcome == "fail"


# Disks


def test_room_is_read_from_df(host: Host, tmp_path: Path) -> None:
    real = replace(host, run=run_command, folder=str(tmp_path / "not/yet/there"))
    result = disks.check_space(real)
    assert (result.outcome, result.unit) == ("pass", "GiB free")
    assert disks.check_space(replace(real, expected={"space": 1e9})).outcome == "fail"
    assert disks.check_space(replace(real, folder="s3://bucket/x")).outcome == "skip"
    hanging = replace(host, folder=str(tmp_path))
    assert "gave no answer" in disks.check_space(hanging).reason


def test_full_disks_by_bytes_and_by_files(host: Host, tmp_path: Path) -> None:
    head = "Filesystem 1024-blocks Used Available Capacity Mounted on\n"

    def df(blocks: str, inodes: str) -> Host:
        answers = {"-Pk": head + blocks, "-Pi": head + inodes}
        return replace(host, folder=str(tmp_path), run=lambda command, limit_s: answers[command[1]])

    good = "/dev/vda 1000000 1 900000 1% /"
    assert disks.check_space(df(good, "/dev/vda 100 50 50 50% /")).outcome == "pass"
    assert disks.check_space(df("/dev/vda 1000000 999000 1000 100% /", "/dev/vda 100 50 50 50% /")).outcome == "fail"
    assert "inodes" in disks.check_space(df(good, "/dev/vda 100 100 0 100% /")).reason
    assert disks.check_space(df(good, "btrfs 0 0 0 - /")).outcome == "pass"
    assert disks.check_space(df(good, "weird")).outcome == "pass"


def test_without_checkpoints_the_disk_of_temporary_files_is_looked_at(host: Host, tmp_path: Path) -> None:
    asked: list[str] = []

    def df(command: Sequence[str], limit_s: float) -> str:
        asked.append(command[-1])
        return "/dev/vda 1000000 1000000 0 100% /"

    result = disks.check_space(replace(host, environment={"TMPDIR": str(tmp_path)}, run=df))
    assert result.outcome == "fail" and set(asked) == {str(tmp_path)}


def test_a_read_only_disk_is_seen_without_touching_it(host: Host) -> None:
    lines = [
        "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        "40 22 0:40 / /mnt/my\\040data rw,relatime shared:2 - ext4 /dev/sdb ro,errors=remount-ro",
    ]
    write_tree(host.proc, {"self/mountinfo": "\n".join(lines)})
    result = disks.check_space(replace(host, folder="/mnt/my data/run"))
    assert (result.outcome, result.reason) == ("fail", "/mnt/my data is mounted read-only")
    found = disks.mount_of("/mnt/my datax", "\n".join(lines))
    assert found == Mount("/", "/", ("rw", "relatime", "rw"), "ext4")


def test_mounts_of_a_real_node(host: Host) -> None:
    text = recorded("gcm-health-slurm/sample-proc-self-mountinfo-output.txt").read_text()
    assert disks.mount_of("/home/me", text) is None
    found = disks.mount_of("/logs/run", text)
    assert found is not None
    assert found.point == "/logs"
    write_tree(host.proc, {"self/mountinfo": text})
    assert "/public is mounted read-only" in disks.check_space(replace(host, folder="/public/run")).reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user may not mount: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_everywhere(small_disk: Path, host: Host) -> None:
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    full = replace(host, run=run_command, folder=str(small_disk))
    told = disks.check_space(full)
    assert (told.outcome, told.value) == ("fail", 0.0)
    assert "No space left" in disks.check_storage(full).reason
    assert "No space left" in disks.check_disk(full).reason
    assert [each.name for each in small_disk.iterdir()] == ["filler"]


def test_storage_is_probed_and_left_as_it_was(host: Host, tmp_path: Path) -> None:
    assert disks.check_storage(host).outcome == "skip"
    good = disks.check_storage(replace(host, folder=str(tmp_path)))
    assert (good.outcome, good.unit) == ("pass", "ms")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".phalanx")]
    assert disks.check_storage(replace(host, folder="memory://bucket/run")).outcome == "pass"
    missing = disks.check_storage(replace(host, folder=str(tmp_path / "nothing")))
    assert "is not there" in missing.reason
    assert disks.check_storage(replace(host, folder="nonsense://x")).outcome == "fail"


def test_storage_is_made_where_the_host_says_so(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "checkpoints"
    result = run_isolated(disks.STORAGE, replace(host, folder=str(folder), makes_folder=True))
    assert result.outcome == "pass", result.reason
    assert folder.is_dir() and not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    below_file = disks.check_storage(replace(host, folder=str(tmp_path / "file" / "x"), makes_folder=True))
    assert below_file.outcome == "fail" and "NotADirectoryError" in below_file.reason
    assert "run.checkpoints" in disks.check_storage(replace(host, makes_folder=True)).reason


# Processes


def test_ranks_without_a_launcher_are_leftovers() -> None:
    me, shell = UserProcess(10, 5, "phalanx"), UserProcess(5, 1, "bash")
    orphan = UserProcess(20, 1, "phalanx rank 0", is_rank=True)
    loader = UserProcess(21, 20, "phalanx loader", is_rank=True)
    result = judge_leftovers([me, shell, orphan, loader], 10)
    assert (result.outcome, result.value) == ("fail", 2.0)
    assert "20 (phalanx rank 0)" in result.reason
    assert result.action == "end them: kill -9 20 21"


@pytest.mark.parametrize(
    "others",
    [
        [
            UserProcess(20, 15, "rank", is_rank=True),
            UserProcess(15, 5, "phalanx"),
            UserProcess(5, 1, "bash"),
        ],  # launched
        [UserProcess(20, 1, "phalanx keeper", is_rank=True), UserProcess(21, 20, "phalanx persist", is_rank=True)],
        [UserProcess(20, 10, "child", is_rank=True)],  # ours
        [UserProcess(20, 1, "python")],  # anyone's
        [UserProcess(20, 777, "python", is_rank=True, gpus=("/dev/nvidia0",))],  # launched by another user's slurmstepd
        [UserProcess(20, 0, "python", gpus=("/dev/nvidia0",))],  # started from outside of the container
    ],
)
def test_what_is_no_leftover(others: list[UserProcess]) -> None:
    assert judge_leftovers([UserProcess(10, 1, "phalanx"), *others], 10).outcome == "pass"


def test_adopted_by_systemd_is_orphaned_and_own_runs_are_spared() -> None:
    adopted = [
        UserProcess(800, 1, "systemd"),
        UserProcess(20, 800, "rank", is_rank=True),
        UserProcess(10, 800, "phalanx"),
    ]
    assert judge_leftovers(adopted, 10).outcome == "fail"
    assert judge_leftovers(adopted, 10, own=frozenset({20})).outcome == "pass"


def test_children_of_a_container_whose_first_process_launches_are_no_orphans() -> None:
    processes = [UserProcess(10, 1, "phalanx"), UserProcess(20, 1, "python", is_rank=True)]
    assert judge_leftovers(processes, 10).outcome == "fail"
    assert judge_leftovers(processes, 10, first_launches=True).outcome == "pass"


def test_who_holds_a_gpu() -> None:
    me, shell = UserProcess(10, 5, "phalanx"), UserProcess(5, 1, "bash")
    lost = UserProcess(20, 1, "python", gpus=("/dev/nvidia0",))
    assert "20 (python) holds /dev/nvidia0" in judge_leftovers([me, shell, lost], 10).reason
    second = judge_leftovers([me, shell, replace(lost, parent=5)], 10)
    assert (second.outcome, "other work of this user: 20" in second.reason) == ("pass", True)


def test_a_real_orphan_is_found(host: Host) -> None:
    """A rank whose launcher is gone: read from this machine's own /proc."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    rank = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PHALANX_RANK": "3"},
    )
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        real = {
            each.pid: each for each in leftover_processes.read_processes(Path("/proc"), os.geteuid(), has_gpus=True)
        }
        assert real[rank.pid].is_rank
        assert real[rank.pid].parent == os.getpid()
        orphan = replace(real[rank.pid], parent=1)
        assert str(rank.pid) in judge_leftovers([orphan, real[os.getpid()]], os.getpid()).reason
    finally:
        rank.communicate(b"\n", timeout=60)


@pytest.mark.parametrize("stays", [True, False])
def test_ranks_that_are_just_ending_are_no_leftovers(host: Host, monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    me, ending = UserProcess(os.getpid(), 1, "phalanx"), UserProcess(20, 1, "python", is_rank=True)
    later = UserProcess(30, 1, "python", is_rank=True)  # of another run that ends while this one looks
    looks = iter([[me, ending], [me, ending, later], *([[me, ending]] if stays else [[me, later]]) * 1000])
    monkeypatch.setattr(leftover_processes, "read_processes", lambda *_, **__: next(looks))
    monkeypatch.setattr(leftover_processes, "_ENDING_S", 1.0)
    monkeypatch.setattr(leftover_processes, "read_text", lambda path: "systemd")
    result = leftover_processes.run(replace(host, proc=Path("/proc")))
    assert result.outcome == ("fail" if stays else "pass")
    assert ("20 (python)" in result.reason) == stays


# Timeouts


def test_defaults_are_in_order() -> None:
    result = judge_timeouts({})
    assert result.outcome == "pass"
    assert "34 s" in result.reason
    assert ib_wait_s(20, 7) == pytest.approx(34.4, abs=0.1)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"NCCL_IB_TIMEOUT": "14"}, "gives a link up after 0.537 s"),
        ({"NCCL_IB_TIMEOUT": "18", "NCCL_IB_RETRY_CNT": "7"}, "sooner than it is back from a flap"),
        ({"NCCL_IB_TIMEOUT": "0"}, "waits without end"),
        ({"NCCL_IB_TIMEOUT": "27"}, "longer than a collective may take"),
        ({"NCCL_IB_TIMEOUT": "many"}, "'many' is no number"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}, "before a record of 15 s is written"),
        ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "600000"}, "before a record of 600 s"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "never ended"),
    ],
)
def test_timeouts_in_the_wrong_order(environment: dict[str, str], told: str) -> None:
    result = judge_timeouts(environment)
    assert result.outcome == "fail"
    assert told in result.reason
    assert result.action


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"},
    ],
)
def test_timeouts_in_order(environment: dict[str, str]) -> None:
    assert judge_timeouts(environment).outcome == "pass"


def test_soft_below_hard() -> None:
    assert judge_timeouts({}, soft_s=60.0, hard_s=90.0).outcome == "pass"
    assert "not below" in judge_timeouts({}, soft_s=90.0, hard_s=90.0).reason
    assert judge_timeouts({"NCCL_IB_TIMEOUT": "22"}, collective_s=60.0).outcome == "fail"


# The host itself


def test_commands_that_hang_or_are_not_there() -> None:
    assert run_command(["no-such-command-here"], 1.0) is None
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"], 60.0) is None
    assert run_command([sys.executable, "-c", "input()"], 60.0) is None  # stdin is empty
    assert run_command([sys.executable, "-c", "import threading; threading.Event().wait()"], 0.2) is None
    assert run_command([sys.executable, "-c", "print('x')"], 60.0) == "x\n"


def test_where_a_host_remembers() -> None:
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})).startswith("/c/phalanx/checks/")
    assert str(cache_folder({"HOME": "/h"})).startswith("/h/.cache/phalanx/checks/")
    assert "phalanx" in str(cache_folder({}))
