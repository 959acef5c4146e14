"""Devices of local ranks."""

from __future__ import annotations

import pytest

from phalanx.core.errors import UserError
from phalanx.launch.environment import Launcher, Worker, device_index


def worker(local_rank: int, ranks: int, launcher: Launcher = "phalanx") -> Worker:
    return Worker(local_rank + 8, local_rank, 16, ranks, "h", 1, launcher=launcher)


@pytest.mark.parametrize("launcher", ["phalanx", "torchrun", "srun"])
def test_a_rank_has_the_device_of_its_local_rank(launcher: Launcher) -> None:
    assert [device_index(worker(rank, 4, launcher), 8) for rank in range(4)] == [0, 1, 2, 3]


def test_slurm_may_show_a_task_its_own_device_alone() -> None:
    assert [device_index(worker(rank, 4, "srun"), 1) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("ranks", "visible"), [(4, 2), (2, 1), (1, 0)])
def test_ranks_without_a_device_are_refused(ranks: int, visible: int) -> None:
    with pytest.raises(UserError, match=f"{ranks} ranks on this host cannot have a device each, {visible} visible"):
        device_index(worker(0, ranks), visible)


def test_ranks_share_devices_where_that_is_asked_for() -> None:
    assert [device_index(worker(rank, 4), 2, shared=True) for rank in range(4)] == [0, 1, 0, 1]
    assert [device_index(worker(rank, 2), 1, shared=True) for rank in range(2)] == [0, 0]
