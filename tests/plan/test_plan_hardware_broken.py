"""Forty ways to break a cluster's files: each is refused with file, key and cure, and nothing is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.plan import hardware
from phalanx.plan.hardware import load_cluster, load_device

HERE = Path(hardware.__file__).parent


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a cluster's files: cluster.toml names device.toml and links.toml beside it."""
    cluster = (HERE / "clusters" / "selene.toml").read_text()
    cluster = cluster.replace('"a100_sxm_80gb"', '"device.toml"').replace('"a100_nvlink"', '"links.toml"')
    (tmp_path / "cluster.toml").write_text(cluster)
    (tmp_path / "device.toml").write_text((HERE / "devices" / "a100_sxm_80gb.toml").read_text())
    (tmp_path / "links.toml").write_text((HERE / "links" / "a100_nvlink.toml").read_text())
    return tmp_path


def value(key: str, new: str) -> tuple[str, str]:
    """Another number, or first numbers of a list, under `key`."""
    opening = r"\[\s*" * (len(new) - len(new.lstrip("[")))
    rest = r"[^\]]*\]" if new.endswith("]") else "[^,]*"
    return rf"(?m)^{key} = \{{ value = {opening}{rest}", f"{key} = {{ value = {new}"


CLUSTERS: list[tuple[tuple[str, str], str]] = [
    ((r"(?m)^devices = .*", ""), "devices: is missing"),
    ((r"(?m)^devices = .*", "devices = -1"), "devices = -1: is no count; write a whole number from 1"),
    ((r"(?m)^devices = .*", 'devices = "many"'), "devices = 'many': is no count"),
    ((r"(?m)^devices_per_host = .*", "devices_per_host = 0"), "devices_per_host = 0"),
    ((r"(?m)^devices_per_host = .*", "devices_per_host = 8.0"), "devices_per_host = 8.0"),
    ((r"(?m)^nics_per_host = .*", "nics_per_host = 100000000000"), "nics_per_host = 100000000000"),
    ((r"(?m)^device = .*", 'device = "a100"'), "device = 'a100': is none of the devices"),
    ((r"(?m)^device = .*", f'device = "{"a" * 300}"'), "is none of the devices"),
    ((r"(?m)^device = .*", 'device = "nowhere.toml"'), "nowhere.toml: cannot be read"),
    ((r"(?m)^device = .*", 'device = "a\\u0000.toml"'), "is no TOML"),
    ((r"(?m)^device = .*", "device = 3"), "device = 3: is no table"),
    ((r"(?m)^device = .*", 'device = { 0 = "device.toml" }'), "device: names no device"),
    ((r"(?m)^device = .*", 'device = { "²" = "device.toml" }'), "device: names no device"),
    ((r"(?m)^links = .*", 'links = "nvlink"'), "links = 'nvlink': is none of the links"),
    ((r"(?m)^links = .*", 'links = "device.toml"'), "send_latency_s: is missing"),
    ((r"(?m)^\[price\]", "[prices]"), "price: is missing; add it (prices is no known key"),
    ((r"(?m)^\[network\]", "[[network]]"), "network: is no table"),
    ((r"(?m)^\[loader\]", "[loader]\ntokens = 3"), "loader.tokens = 3: is no known key"),
    ((r"(?m)^date = .*", "date = 2024-02-03"), "is no text; write it in quotes"),
    ((r"(?m)^date = .*", 'date = "2024-13"'), "date = '2024-13': is no date; write it as"),
    ((r"(?m)^date = .*", 'date = "last May"'), "date = 'last May': is no date"),
    (value("latency_s", "18"), "network.latency_s = 18: cannot be right in s; give it in s: between 0 and 1"),
    (value("achieved_ratio", "0"), "network.achieved_ratio = 0"),
    (value("achieved_ratio", "95"), "network.achieved_ratio = 95"),
    (value("nic_bytes_per_s", "nan"), "network.nic_bytes_per_s = nan"),
    (value("nic_bytes_per_s", "inf"), "network.nic_bytes_per_s = inf"),
    (value("rank_sigma_ratio", "-0.01"), "stragglers.rank_sigma_ratio = -0.01"),
    (value("slow_host_excess_ratio", "-1"), "stragglers.slow_host_excess_ratio = -1"),
    (value("share_ratio", "[0, 0, 0]"), "network.ring.share_ratio = 0"),
    (value("share_ratio", "[0.5]"), "network.ring: lists differ in length"),
]
DEVICES: list[tuple[tuple[str, str], str]] = [
    (value("kernel_s", "5"), "kernel_s = 5: cannot be right in s"),
    (value("memory_bytes", "true"), "memory_bytes = True: is no number"),
    (value("memory_ratio", "0"), "gemm.half.memory_ratio = 0"),
    (value("softness", "-2"), "gemm.half.softness = -2"),
    (value("clock_to_s", "1e-6"), "gemm.half.clock_to_s = 1e-06: is no later than it begins"),
    (value("weight_gradient_ratio", "0"), "gemm.half.weight_gradient_ratio = 0"),
    (value("tiles", "[[0, 0, 0, 0, 0]"), "gemm.half.tiles = [0.0, 0.0, 0.0, 0.0, 0.0]: is no tile"),
    (value("correction_ratio", "[[-1"), "gemm.half.correction_ratio = -1"),
    (value("correction_waves", "[1e9"), "gemm.half.correction_waves: does not ascend"),
    (value("queries", "[0"), "does not ascend from above 0"),
    (value("head_dims", "[128, 64]"), "attention.half.head_dims = [128.0, 64.0]: does not ascend"),
    (value("head_dims", "[64.5, 128]"), "attention.half.head_dims = [64.5, 128.0]: are no whole numbers"),
    (value("head_dims", "[64]"), "attention.half.forward_flops_per_s: does not fit its axes; write 1 rows of"),
    ((r"(?m)^cores = .*", "cores = 1000000000000000000000"), "gemm.half.cores"),
    ((r"(?m)^\[stream\]\n", "[stream]\nkernel_bytes = 3\n"), "stream.kernel_bytes = 3: says not how it is known"),
]
LINKS: list[tuple[tuple[str, str], str]] = [
    (value("send_latency_s", "20"), "send_latency_s = 20"),
    (value("message_bytes", "[1e15"), "message_bytes: does not ascend"),
    (value("message_bytes", "[1024]"), "is too short to draw a line; give 2 values"),
    (value("ranks", "[8, 4, 2]"), "ranks = [8.0, 4.0, 2.0]: does not ascend"),
    (value("ranks", "[2]"), "time_s: does not fit its axes; write 1 rows of"),
    (value("time_s", "[[0"), "time_s = 0: cannot be right in s"),
    ((r"(?m)^\[all_reduce\]", "[allreduce]"), "all_reduce: is missing"),
]


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        *(("cluster", *row) for row in CLUSTERS),
        *(("device", *row) for row in DEVICES),
        *(("links", *row) for row in LINKS),
    ],
)
def test_a_broken_value_is_refused_with_file_key_and_cure(
    mine: Path, file: str, edit: tuple[str, str], said: str
) -> None:
    path = mine / f"{file}.toml"
    broken, found = re.subn(edit[0], lambda _: edit[1], path.read_text(), count=1)
    assert found
    path.write_text(broken)
    with pytest.raises(UserError) as refusal:
        load_cluster(mine / "cluster.toml", 16)
    assert said in str(refusal.value)
    assert ".toml" in str(refusal.value)


@pytest.mark.parametrize("file", ["cluster", "device", "links"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is missing"),
        (b"\x00" * 100, "is no TOML"),
        (bytes(range(256)), "is no TOML"),
        ("\ufeffdevice = 3".encode("utf-16"), "is no TOML"),
        (b"x = " + b"[" * 10_000, "is no TOML"),
        (b"x = " + b"1" * 10_000, "is no TOML"),
        ("folder", "Is a directory"),
        ("nothing", "No such file"),
        ("loop", "symbolic links"),
    ],
    ids=["empty", "zeros", "binary", "utf-16", "brackets", "digits", "folder", "nothing", "loop"],
)
def test_what_is_no_file_of_toml_is_refused(mine: Path, file: str, content: bytes | str, said: str) -> None:
    path = mine / f"{file}.toml"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path)
    with pytest.raises(UserError, match=f"{file}.toml.*{said}"):
        load_cluster(mine / "cluster.toml", 16)


@pytest.mark.parametrize("name", ["a100", "", "../devices/h100_sxm", "x" * 300])
def test_a_name_is_one_of_those_that_come_along(name: str) -> None:
    with pytest.raises(UserError, match=r"device = .*take one of a100_sxm_80gb"):
        load_device(name)
    with pytest.raises(UserError, match=r"--cluster = .*take one of cpu_host"):
        load_cluster(name)


def test_lists_are_not_printed_whole(mine: Path) -> None:
    path = mine / "links.toml"
    path.write_text(path.read_text().replace("[all_reduce]", "[[all_reduce]]", 1))
    with pytest.raises(UserError) as refusal:
        load_cluster(mine / "cluster.toml", 16)
    assert len(str(refusal.value)) < 200
