"""GPUs: kernel logs of real machines, and what the driver may answer."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from checks_helpers import KnownGpus, empty_host, recorded, write_tree

from phalanx.checks.gpu import (
    COUNT,
    ECC,
    MEMORY,
    NVLINK,
    ROWS,
    THROTTLE,
    WINDOW_S,
    check_count,
    check_xid,
    find_xids,
    judge_ecc,
    judge_memory,
    judge_nvlink,
    judge_rows,
    judge_throttle,
    judge_xids,
)
from phalanx.checks.kernel_lines import parse_lines
from phalanx.checks.nvml import Gpu, Gpus, NoGpusError, SilentGpusError, count_files, count_on_bus, gpus_from_json

_GIB = 1 << 30
_GOOD = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * _GIB, ecc_uncorrected=0, links_up=18, links=18, temperature_c=40.0)
_HOST = [replace(_GOOD, index=index) for index in range(8)]


def test_a_gsp_timeout_in_a_real_log_asks_for_a_reset() -> None:
    lines = recorded("gpud-kmsg/xid_dmesg-with-xid-119.log").read_text().splitlines()
    found = find_xids(parse_lines(lines))
    assert [(xid.device, xid.number) for xid in found] == [("0000:9b:00", 119)] * 5
    result = judge_xids(found)
    assert result.outcome == "fail"
    assert "GPU 0000:9b:00: Xid 119" in result.reason
    assert "nvidia-smi -r" in result.action


def test_a_fault_of_a_day_ago_is_over() -> None:
    lines = recorded("gpud-kmsg/xid_dmesg-with-xid-119.log").read_text().splitlines()
    last_s = datetime(2025, 2, 23, 16, 30, 13).timestamp()
    recent = judge_xids(find_xids(parse_lines(lines, now_s=last_s + 3600)))
    assert recent.outcome == "fail"
    assert "the last one 1h00m ago" in recent.reason
    over = judge_xids(find_xids(parse_lines(lines, now_s=last_s + WINDOW_S + 3600)))
    assert (over.outcome, over.reason) == ("pass", "seen, but caused by programs or long past: 119")


def test_faults_of_programs_are_not_held_against_the_host() -> None:
    lines = recorded("gpud-kmsg/memory_dmesg.decode.iso.log").read_text().splitlines()
    found = find_xids(parse_lines(lines))
    assert [xid.number for xid in found] == [13] * 16 + [43]
    assert judge_xids(found).outcome == "pass"


@pytest.mark.parametrize("name", ["kmsg_kmsg.1.log", "kmsg_kmsg.2.peermem.log", "nccl_dmesg.decode.iso.log"])
def test_logs_without_xids_are_good(name: str) -> None:
    lines = parse_lines(recorded(f"gpud-kmsg/{name}").read_text().splitlines(), uptime_s=1e6)
    assert lines
    assert judge_xids(find_xids(lines)).outcome == "pass"


def test_times_of_kmsg_are_ages() -> None:
    [line] = parse_lines(["4,1,2000000,-;NVRM: Xid (PCI:0000:38:00): 79, GPU has fallen off the bus."], uptime_s=12.0)
    assert line.age_s == 10.0
    assert line.text.startswith("NVRM: Xid")


def test_xids_need_a_driver_and_a_log_that_may_be_read(tmp_path: Path) -> None:
    host = empty_host(tmp_path)
    assert "no NVIDIA driver" in check_xid(host).reason
    write_tree(tmp_path / "proc", {"driver/nvidia/version": "570"})
    assert "may not read" in check_xid(host).reason
    lines = parse_lines(["NVRM: Xid (PCI:0000:38:00): 79, GPU has fallen off the bus."])
    assert check_xid(replace(host, read_kernel_lines=lambda: lines)).outcome == "fail"


def links_up(text: str) -> dict[int, int]:
    """Links that are up, by GPU, from ``nvidia-smi nvlink --status``, as a bug report may contain it."""
    found: dict[int, int] = {}
    gpu = -1
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
            found[gpu] = 0
        elif re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            found[gpu] += 1
    return found


def test_links_of_a_real_a100_node() -> None:
    up = links_up(recorded("gpud-kmsg/fabric-manager_nvidia-smi.nvlink.status.a100").read_text())
    assert up == dict.fromkeys(range(8), 12)
    gpus = [replace(_GOOD, index=index, links_up=links, links=12) for index, links in up.items()]
    assert judge_nvlink(gpus).outcome == "pass"


def test_a_gpu_with_a_link_down_is_named() -> None:
    gpus = [*_HOST[:7], replace(_HOST[7], links_up=17)]
    result = judge_nvlink(gpus)
    assert (result.outcome, result.reason, result.value) == ("fail", "GPU 7: 17 of 18", 17.0)
    assert judge_nvlink([replace(gpu, links_up=0) for gpu in _HOST]).outcome == "skip"


def test_memory_errors_rows_and_clocks() -> None:
    for judge in (judge_ecc, judge_rows, judge_throttle, judge_memory):
        assert judge(_HOST).outcome == "pass"
    assert judge_ecc([*_HOST, replace(_GOOD, index=8, ecc_uncorrected=2)]).reason == "GPU 8: 2"
    assert judge_ecc([replace(_GOOD, ecc_uncorrected=None)]).outcome == "skip"
    assert "reset" in judge_rows([replace(_GOOD, rows_pending=True)]).action
    assert "replace" in judge_rows([replace(_GOOD, rows_failed=True)]).action
    hot = judge_throttle([replace(_GOOD, throttled=("power brake",), temperature_c=88.0)])
    assert (hot.outcome, hot.reason, hot.value) == ("fail", "GPU 0: power brake", 88.0)
    small = judge_memory([*_HOST, replace(_GOOD, index=8, memory_bytes=70 * _GIB)])
    assert small.outcome == "fail"
    assert small.reason.startswith("GPU 8")


def _bus(root: Path, count: int) -> None:
    for index in range(count):
        write_tree(root / f"bus/pci/devices/0000:{index:02x}:00.0", {"vendor": "0x10de", "class": "0x030200"})
    write_tree(root / "bus/pci/devices/0000:f0:00.0", {"vendor": "0x10de", "class": "0x068000"})  # an NVSwitch
    write_tree(root / "bus/pci/devices/0000:f1:00.0", {"vendor": "0x1a03", "class": "0x030000"})  # the board's VGA


def test_a_gpu_that_the_driver_lost_is_missed(tmp_path: Path) -> None:
    write_tree(tmp_path / "dev", {f"nvidia{index}": "" for index in range(8)} | {"nvidiactl": "", "nvidia-uvm": ""})
    assert count_files(tmp_path / "dev") == 8
    host = empty_host(tmp_path, gpus=KnownGpus(*_HOST))
    assert check_count(host).outcome == "pass"
    lost = check_count(replace(host, gpus=KnownGpus(*_HOST[:7])))
    assert (lost.outcome, lost.value, lost.threshold) == ("fail", 7.0, 8.0)
    # Off the bus as well, it is still missed: it was here before.
    gone = replace(host, gpus=KnownGpus(*_HOST[:7]), dev=tmp_path / "elsewhere")
    assert check_count(gone).threshold_source == "most that were seen here"
    no_driver = replace(host, gpus=Gpus(tmp_path / "nothing"))
    assert "8 GPUs should be here" in check_count(no_driver).reason


def test_a_container_with_some_of_the_gpus_is_fine(tmp_path: Path) -> None:
    _bus(tmp_path / "sys", 8)
    assert count_on_bus(tmp_path / "sys") == 8
    write_tree(tmp_path / "dev", {"nvidia2": "", "nvidia3": ""})
    result = check_count(empty_host(tmp_path, gpus=KnownGpus(*_HOST[:2])))
    assert (result.outcome, result.reason) == ("pass", "8 are on the bus")


def test_a_driver_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    class Silent(Gpus):
        def _ask(self) -> tuple[Gpu, ...] | Exception:
            return SilentGpusError("the driver gave no answer within 10 s")

    host = empty_host(tmp_path, gpus=Silent())
    for check in (COUNT, ECC, ROWS, THROTTLE, NVLINK, MEMORY):
        assert check.run(host).outcome == "fail"


def test_answers_of_the_process_that_asks() -> None:
    text = '{"gpus": [{"index": 0, "name": "X", "memory_bytes": 1, "throttled": ["power brake"]}]}'
    assert gpus_from_json(text) == (Gpu(0, "X", 1, throttled=("power brake",)),)
    with pytest.raises(NoGpusError, match="not installed"):
        gpus_from_json('{"absent": "NVML is not installed"}')
    with pytest.raises(SilentGpusError, match="Unknown Error"):
        gpus_from_json('{"problem": "NVML: Unknown Error"}')
    with pytest.raises(ValueError, match="Expecting value"):
        gpus_from_json("")


def test_the_process_that_asks_answers_here(tmp_path: Path) -> None:
    """With the driver's folder there, the process is started; without the library, or with it, it answers."""
    asked = Gpus(tmp_path)
    try:
        assert all(isinstance(gpu, Gpu) for gpu in asked.read())
    except NoGpusError as absent:
        assert "NVML" in str(absent)
