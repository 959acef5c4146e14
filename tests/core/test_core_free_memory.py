"""What memory is to be had within all limits that a host and its control groups set."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.host import available_bytes

ON_HOST = 1000 * 1024
UNLIMITED = 9223372036854771712  # what version 1 shows


def write(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def told(root: Path) -> int | None:
    return available_bytes(root / "proc", root / "groups")


def test_this_host_has_some() -> None:
    available = available_bytes()
    assert available is not None and 0 < available < 2**50


def test_limits_of_control_groups_of_version_2(tmp_path: Path) -> None:
    assert told(tmp_path) is None
    # Of 100 kB that are cached, 40 kB are a tmpfs's or a memfd's, which nobody gives up.
    stat = "anon 5\nfile 100000\nshmem 40000\ninactive_anon 40005\ninactive_file 45000\nactive_file 15000\n"
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  1000 kB\n",
            "proc/self/cgroup": "0::/job/step\n",
            "groups/job/memory.max": "500000\n",
            "groups/job/memory.current": "300000\n",
            "groups/job/memory.stat": stat,
        },
    )
    assert told(tmp_path) == 260_000
    write(tmp_path, {"groups/job/memory.max": "max\n"})
    assert told(tmp_path) == ON_HOST
    (tmp_path / "proc/meminfo").unlink()
    assert told(tmp_path) is None
    write(tmp_path, {"groups/job/step/memory.max": "7", "groups/job/step/memory.current": "3"})
    assert told(tmp_path) == 4


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"slurm/job": 500_000, "slurm": UNLIMITED, ".": UNLIMITED}, 300_000),
        ({"slurm/job": UNLIMITED, "slurm": 500_000, ".": UNLIMITED}, 300_000),
        ({".": 500_000}, 300_000),  # a container: its path is that of the host
        ({"slurm/job": 100_000}, 0),
        ({"slurm/job": UNLIMITED, "slurm": UNLIMITED, ".": UNLIMITED}, ON_HOST),
    ],
)
def test_limits_of_control_groups_of_version_1(tmp_path: Path, limits: dict[str, int], left: int) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable:  1000 kB\n",
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job\n3:cpuset:/\n0::/\n",
        },
    )
    for group, limit in limits.items():
        folder = f"groups/memory/{group}"
        texts = {
            f"{folder}/memory.limit_in_bytes": f"{limit}\n",
            f"{folder}/memory.usage_in_bytes": "300000\n",
            f"{folder}/memory.stat": "cache 7\nrss 5\ntotal_inactive_file 60000\ntotal_active_file 40000\n",
        }
        write(tmp_path, texts)
    assert told(tmp_path) == left
