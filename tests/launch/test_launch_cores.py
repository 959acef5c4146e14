"""Cores: read from an imitated system, and shared among ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.cores import Core, Share, local_shares, read_cores, share_cores


def make_system(root: Path, nodes: int, cores_per_node: int, threads_per_core: int) -> Path:
    """A sysfs tree as Linux numbers it: first threads of all cores, then the second ones."""
    total = nodes * cores_per_node
    for cpu in range(total * threads_per_core):
        node, core = divmod(cpu % total, cores_per_node)
        topology = root / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{core}\n")
        (topology / "physical_package_id").write_text(f"{node}\n")
        (root / "node" / f"node{node}" / f"cpu{cpu}").mkdir(parents=True)
    return root


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    cores = read_cores(range(16), make_system(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2))
    assert [core.cpus for core in cores] == [(cpu, cpu + 8) for cpu in range(8)]
    assert [core.node for core in cores] == [0] * 4 + [1] * 4


def test_shares_follow_the_numa_nodes(tmp_path: Path) -> None:
    cores = read_cores(range(16), make_system(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2))
    first, second = share_cores(cores, 2)
    assert first == Share(frozenset({0, 1, 2, 3, 8, 9, 10, 11}), threads=4)
    assert second == Share(frozenset({4, 5, 6, 7, 12, 13, 14, 15}), threads=4)


def test_a_mask_leaves_out_what_it_does_not_hold(tmp_path: Path) -> None:
    cores = read_cores({1, 9, 6}, make_system(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2))
    assert [core.cpus for core in cores] == [(1, 9), (6,)]


def test_a_system_that_tells_nothing_has_a_core_per_cpu(tmp_path: Path) -> None:
    assert [core.cpus for core in read_cores({3, 1}, tmp_path)] == [(1,), (3,)]


def test_more_ranks_than_cores_share_them_all() -> None:
    assert share_cores([Core(0, 0, 0, (0,))], 3) == [Share(None, 1)] * 3


@given(cores=st.integers(1, 64), count=st.integers(1, 64))
def test_shares_are_equal_and_disjoint(cores: int, count: int) -> None:
    shares = share_cores([Core(0, 0, number, (number, number + 64)) for number in range(cores)], count)
    assert len(shares) == count
    assert len({share.threads for share in shares}) == 1
    sets = [share.cpus for share in shares if share.cpus is not None]
    assert sum(map(len, sets)) == len(frozenset().union(*sets))
    assert (not sets) == (count > cores)


def test_this_machine_is_shared() -> None:
    (whole,) = local_shares(1)
    assert whole.cpus == os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_worker_that_was_bound_elsewhere_keeps_its_mask() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    program = (
        "import os, sys; from phalanx.launch.cores import bind_started_elsewhere as bind\n"
        "if sys.argv[2]: os.sched_setaffinity(0, {int(sys.argv[2])})\n"
        "bind(int(sys.argv[1]), 2); print(sorted(os.sched_getaffinity(0)))"
    )

    def mask(local_rank: int, bound_to: str) -> str:
        command = [sys.executable, "-c", program, str(local_rank), bound_to]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert mask(0, str(cpus[-1])) == str([cpus[-1]])
    first, second = (share.cpus for share in local_shares(2))
    if first is not None and second is not None:
        assert (mask(0, ""), mask(1, "")) == (str(sorted(first)), str(sorted(second)))
