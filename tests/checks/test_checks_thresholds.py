"""What values are held against: never a guess."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checks_helpers import empty_host, write_tree

from phalanx.checks.check_host import CheckResult, Host
from phalanx.checks.pairwise_tests import Threshold, slow_hosts
from phalanx.checks.thresholds import (
    FIRST_PASSES,
    OtherWork,
    all_to_all_threshold,
    busy_seconds,
    copy_threshold,
    first_passes,
    gemm_threshold,
    judge,
)

_DATA = Path(__file__).parents[3] / "shared" / "data" / "hardware" / "aiconfigurator"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return empty_host(tmp_path)


def _judge(host: Host, value: float, **given: object) -> CheckResult:
    return judge(host, "gemm", value, "GFLOP/s", action="look", hardware="A", **given)  # type: ignore[arg-type]


def test_unknown_is_shown_without_a_verdict_until_the_host_knows_itself(host: Host) -> None:
    for number in range(FIRST_PASSES):
        result = _judge(host, 100.0 - number)
        assert (result.outcome, result.threshold) == ("pass", None)
    result = _judge(host, 68.0)
    assert (result.outcome, result.threshold) == ("pass", pytest.approx(67.2))
    assert "worst of this host's first 5" in result.threshold_source
    slow = _judge(host, 67.0)
    assert (slow.outcome, slow.action) == ("fail", "look")
    # Later passes move nothing, or a host could become slower and slower unseen.
    assert first_passes(host, "gemm", "A") == [100.0, 99.0, 98.0, 97.0, 96.0]


def test_other_hardware_is_learnt_anew(host: Host) -> None:
    for _ in range(FIRST_PASSES):
        _judge(host, 100.0)
    other = judge(host, "gemm", 10.0, "GFLOP/s", action="", hardware="B")
    assert (other.outcome, other.threshold) == ("pass", None)


def test_beside_other_work_the_hosts_past_is_no_measure(host: Host) -> None:
    busy = OtherWork(cores=1.5, share=0.75)
    for _ in range(FIRST_PASSES):
        assert "1.5 cores" in _judge(host, 5.0, other=busy).reason
    assert first_passes(host, "gemm", "A") == []
    for _ in range(FIRST_PASSES):
        _judge(host, 100.0)
    assert _judge(host, 5.0, other=busy).outcome == "pass"
    assert _judge(host, 5.0).outcome == "fail"
    assert _judge(host, 5.0, other=busy, known=Threshold(50.0, "published")).outcome == "fail"


def test_what_the_user_gives_comes_first(host: Host) -> None:
    given = replace(host, expected={"gemm": 200.0})
    result = _judge(given, 150.0, known=Threshold(10.0, "published"))
    assert (result.outcome, result.threshold_source) == ("fail", "given with --expect")


def test_other_work_is_read_from_proc(tmp_path: Path) -> None:
    assert busy_seconds("cpu  100 0 50 900 10 0 50 100 0 0\n") == pytest.approx(300 / 100, rel=0.9)
    assert busy_seconds("") == busy_seconds("intr 1 2") == 0.0
    write_tree(tmp_path, {"stat": "cpu  100 0 0 0 0 0 0 0 0 0"})
    with OtherWork(tmp_path) as other:
        write_tree(tmp_path, {"stat": "cpu  1000000 0 0 0 0 0 0 0 0 0"})
    assert other.share > 1
    with OtherWork(tmp_path / "nothing") as unknown:
        pass
    assert unknown.cores == 0.0


def test_unknown_hardware_has_no_published_figure() -> None:
    for find in (gemm_threshold, copy_threshold):
        assert find("NVIDIA GeForce RTX 4090") is None
        known = find("NVIDIA H100 80GB HBM3")
        assert known is not None
        assert known.source
    assert all_to_all_threshold("NVIDIA H200", 4) is None


@pytest.mark.parametrize(
    ("name", "file"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("A100-SXM4", "a100")]
)
def test_published_figures_are_those_of_the_data(name: str, file: str) -> None:
    path = _DATA / f"{file}_sxm_nccl.parquet"
    if not path.exists():
        pytest.skip(f"needs {path}")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(path).to_pylist()
    [row] = [
        row
        for row in rows
        if (row["op_name"], row["num_gpus"], row["nccl_dtype"], row["message_size"]) == ("alltoall", 8, "half", 1 << 28)
    ]
    measured = 2 * row["message_size"] * 7 / 8 / (row["latency"] / 1000) / 1e9
    threshold = all_to_all_threshold(name, 8)
    assert threshold is not None
    assert threshold.value == pytest.approx(0.8 * measured, rel=0.01)


def test_slow_hosts_are_held_against_the_others() -> None:
    assert slow_hosts({"a": 10.0, "b": 9.0, "c": 6.9, "d": 11.0}) == {"c": 10.0}
    assert slow_hosts({"a": 10.0, "b": 10.0, "c": 8.0}) == {}
