"""What the kernel tells of a host in small files, and names of interfaces as settings give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.addresses import names_interface
from phalanx.core.host import (
    Mount,
    boot_id,
    list_folder,
    own_groups,
    parse_cpu_ticks,
    parse_meminfo,
    parse_mounts,
    read_number,
    read_text,
)


def test_files_that_are_not_there_or_hold_something_else_give_none(tmp_path: Path) -> None:
    (tmp_path / "number").write_text(" 17\n")
    (tmp_path / "words").write_text("none\n")
    assert read_number(tmp_path / "number") == 17
    assert (read_text(tmp_path / "words"), read_number(tmp_path / "words")) == ("none", None)
    assert (read_text(tmp_path), read_number(tmp_path / "absent"), list_folder(tmp_path / "absent")) == (None, None, [])
    assert [path.name for path in list_folder(tmp_path)] == ["number", "words"]
    assert boot_id(tmp_path) == ""


def test_memory_is_told_in_bytes() -> None:
    assert parse_meminfo("MemTotal:  1000 kB\nHugePages_Total:  3\nodd\n") == {
        "MemTotal": 1024_000,
        "HugePages_Total": 3,
    }


def test_of_the_time_of_all_cores_idleness_and_waiting_for_disks_are_not_busy() -> None:
    assert parse_cpu_ticks("cpu  100 20 50 900 10 1 2 30 40 5\ncpu0 1 2 3\n") == (203, 1113)  # guests are in the first
    assert parse_cpu_ticks("") is None
    assert parse_cpu_ticks("intr 1 2 3 4 5 6 7 8 9\n") is None


def test_groups_are_found_by_their_controllers(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("5:cpu,memory:/a:b\n1:name=systemd:/s\n0::/user/job\n")
    assert own_groups(tmp_path) == {"cpu": "/a:b", "memory": "/a:b", "name=systemd": "/s", "": "/user/job"}
    assert own_groups(tmp_path / "absent") == {}


def test_mounts_are_told_with_both_kinds_of_options() -> None:
    lines = [
        "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        "30 22 0:26 /docker/x /sys/fs/my\\040group ro - cgroup cgroup rw,freezer",
        "no mount",
    ]
    assert parse_mounts("\n".join(lines)) == [
        Mount("/", "/", ("rw", "relatime", "rw"), "ext4"),
        Mount("/docker/x", "/sys/fs/my group", ("ro", "rw", "freezer"), "cgroup"),
    ]


@pytest.mark.parametrize(
    ("pattern", "exact", "expected"),
    [
        ("eth, ib", False, ["eth0", "eth1", "ib0"]),
        ("=eth1", False, ["eth1"]),
        ("^eth", False, ["ib0"]),
        ("^=eth0,ib0", False, ["eth1"]),
        ("eth0,ib", True, ["eth0"]),
        ("=eth0", True, []),
        ("", False, []),
        ("^", False, []),
        ("=,", False, []),
    ],
)
def test_patterns_of_nccl_and_names_of_gloo(pattern: str, exact: bool, expected: list[str]) -> None:
    assert [name for name in ("eth0", "eth1", "ib0") if names_interface(pattern, name, exact=exact)] == expected
