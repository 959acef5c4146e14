"""Which of the host's devices a worker computes on. Torch-free: the caller knows how many are visible."""

from __future__ import annotations

from phalanx.core.errors import UserError
from phalanx.launch.environment import Worker


def device_index(worker: Worker, visible: int, *, shared: bool = False) -> int:
    """Number of the device of `worker` among the `visible` ones: its local rank.

    Where Slurm was told to (``--gpus-per-task=1``, ``--gpu-bind``), it shows each task its own device alone; that is 0.

    Args:
        shared: ranks may share devices; they take turns.

    Raises:
        UserError: there are more ranks on this host than devices.
    """
    if shared:
        return worker.local_rank % visible
    if worker.local_rank < visible >= worker.local_world_size:
        return worker.local_rank
    if worker.launcher == "srun" and visible == 1:
        return 0
    raise UserError(
        f"{worker.local_world_size} ranks on this host cannot have a device each, {visible} visible",
        cure="start one rank per device (parallel, CUDA_VISIBLE_DEVICES), or use train.device=cpu; "
        "to try a layout, set parallel.share_device=true",
        field="train.device",
    )
