"""Arithmetic, memory and collectives, right and wrong."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks_helpers import KnownGpus, empty_host

from phalanx.checks import cpu, disks, memory, network
from phalanx.checks.check_host import Host
from phalanx.checks.collective import CollectiveError, CollectiveTask, bus_bytes, read_rank, run_here, start_rank
from phalanx.checks.nvml import Gpu

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return empty_host(tmp_path)


def test_products_repeat_bit_for_bit_on_this_machine() -> None:
    result = cpu.test_cores(_CORES, np.matmul, repeats=3)
    assert result.outcome == "pass", result
    if hasattr(os, "sched_getaffinity"):
        assert sorted(os.sched_getaffinity(0)) == _CORES


class _Corrupting:
    """A product in which now and then one bit is wrong, as on a core that is going bad."""

    def __init__(self, wrong_calls: set[int]) -> None:
        self.calls = 0
        self.wrong_calls = wrong_calls

    def __call__(self, a: Any, b: Any) -> Any:
        product = np.matmul(a, b)
        if self.calls in self.wrong_calls:
            product.view(np.uint32)[17, 5] ^= 1  # the lowest bit of one number
        self.calls += 1
        return product


def test_one_wrong_bit_in_one_product_is_found() -> None:
    result = cpu.test_cores([_CORES[0]], _Corrupting({2}), repeats=5)
    assert result.outcome == "fail"
    assert result.reason == f"products differ in their bits: core {_CORES[0]}: 1 of 5"
    assert result.value == 1
    assert "take the host out" in result.action


def test_a_product_that_is_always_wrong_is_not_exact() -> None:
    result = cpu.test_cores([_CORES[0]], _Corrupting(set(range(100))), repeats=3)
    assert (result.outcome, "not the exact product" in result.reason) == ("fail", True)


def test_the_core_that_differs_is_named() -> None:
    digests = {0: ["a", "a"], 1: ["a", "b"], 2: ["a", "a"]}
    assert cpu.judge_digests(digests).reason == "products differ in their bits: core 1: 1 of 2"
    assert cpu.judge_digests({0: ["a"], 1: ["a"]}).outcome == "pass"


def test_rates_are_measured(host: Host) -> None:
    for check, unit in ((cpu.check_gemm, "GFLOP/s"), (memory.check_bandwidth, "GB/s")):
        result = check(host)
        assert (result.outcome, result.unit) == ("pass", unit)
        assert result.value
        assert result.value > 0


def test_a_rate_below_what_is_expected_fails(tmp_path: Path) -> None:
    result = cpu.check_gemm(empty_host(tmp_path, expected={"gemm": 1e9}))
    assert result.outcome == "fail"
    assert result.action


def test_best_time_is_of_the_fastest_run() -> None:
    calls = []
    assert cpu.best_time(lambda: calls.append(1), 0.0) >= 0.0
    assert len(calls) == 4  # one to warm up, three measured


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    result = disks.check_disk(empty_host(tmp_path, folder=str(folder / "not yet there")))
    assert result.outcome == "pass"
    assert f"written to {folder}" in result.reason
    assert list(folder.iterdir()) == []
    assert disks.check_disk(empty_host(tmp_path, folder="s3://bucket/run")).outcome == "skip"


def test_a_folder_that_may_not_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    result = disks.check_disk(empty_host(tmp_path, folder=str(tmp_path)))
    assert (result.outcome, "Read-only file system" in result.reason) == ("fail", True)


def test_what_a_link_carries() -> None:
    assert bus_bytes("all-to-all", 800, 8) == 700
    assert bus_bytes("all-reduce", 800, 8) == 1400


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all-to-all", "all-reduce"])
def test_collectives_on_this_host(kind: Any) -> None:
    assert run_here(kind, 2, num_bytes=1 << 20, limit_s=120.0, on_gpus=False) > 0


@pytest.mark.slow
def test_a_rank_whose_partner_does_not_come_is_told_of(tmp_path: Path) -> None:
    """As between neighbours of which one is dead."""
    task = CollectiveTask("all-reduce", 0, 2, f"file://{tmp_path / 'store'}", 1 << 16, 3.0, os.getpid())
    with ExitStack() as stack:
        rank = start_rank(task, {"GLOO_SOCKET_IFNAME": "lo"})
        stack.callback(rank.kill)
        with pytest.raises(CollectiveError):
            read_rank(rank, 60.0)


def test_a_single_gpu_has_nobody_to_exchange_with(tmp_path: Path) -> None:
    host = empty_host(tmp_path, gpus=KnownGpus(Gpu(0, "NVIDIA H200", 1)))
    assert network.check_all_to_all(host).reason == "one GPU has nobody to exchange with"


def test_gpus_that_torch_cannot_use_are_no_failure(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch can use CUDA here")
    host = empty_host(tmp_path, gpus=KnownGpus(*(Gpu(index, "NVIDIA H200", 1) for index in range(2))))
    assert network.check_all_to_all(host).outcome == "skip"
