"""Reading on other layouts and devices than the one that wrote, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import assert_equal, blank, make_tensors
from support.open_checkpoint import open_checkpoint

from phalanx.checkpoint.session.blocking_session import save

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RESHARD = (
    f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})"
    + """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from support.open_checkpoint import newest

folder, out, world = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def rank_main(rank):
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    placements = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    shapes = {"rows": (5, 4), "columns": (5, 4), "all": (3,)}
    targets = {n: distribute_tensor(torch.zeros(shapes[n]), mesh, [p]) for n, p in placements.items()}
    newest(folder, print).load_into(targets)
    whole = {n: t.full_tensor() for n, t in targets.items()}
    local = {n: tuple(t.to_local().shape) for n, t in targets.items()}
    torch.save((whole, local), out / f"{rank}.pt")
    dist.destroy_process_group()

children = []
for rank in range(world):
    pid = os.fork()
    if pid == 0:
        rank_main(rank)
        os._exit(0)
    children.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""
)


@pytest.mark.slow
def test_sharded_tensors_are_filled_from_one_process_checkpoint(tmp_path: Path) -> None:
    """Two processes, tensors split unevenly by rows and by columns (DTensor): each reads its part."""
    tensors = {"rows": torch.randn(5, 4), "columns": torch.randn(5, 4), "all": torch.randn(3)}
    save(tmp_path / "checkpoints", 1, tensors)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", RESHARD, str(tmp_path / "checkpoints"), str(tmp_path / "out"), "2"]
    subprocess.run(command, check=True, timeout=120)
    for rank, rows in ((0, 3), (1, 2)):
        whole, local = torch.load(tmp_path / "out" / f"{rank}.pt")
        assert local == {"rows": (rows, 4), "columns": (5, 2), "all": (3,)}
        assert_equal(whole, tensors)


MEMORY = (
    f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})"
    + """
import resource, sys, torch
from pathlib import Path
from support.open_checkpoint import open_checkpoint
from phalanx.checkpoint.session.blocking_session import save

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder, action = Path(sys.argv[1]), sys.argv[2]
tensors = {f"w{i}": torch.full((2_000_000,), float(i)) for i in range(25)}  # 200 MB in 25 parts
save(folder, 1, {"warm": torch.zeros(1)})
open_checkpoint(folder / "step-00000001").read()
before = peak_bytes()
if action == "save":
    save(folder, 2, tensors)
else:
    checkpoint = open_checkpoint(folder / "step-00000002")
    for tensor in tensors.values():
        tensor.zero_()
    checkpoint.load_into(tensors)
    assert all(bool((tensors[f"w{i}"] == i).all()) for i in range(25))
print(peak_bytes() - before)
"""
)


@pytest.mark.campaign
@pytest.mark.slow
def test_saving_and_loading_take_the_memory_of_one_tensor_more(tmp_path: Path) -> None:
    for action in ("save", "load"):
        command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path), action]
        extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert extra < 60e6, f"{action} took {extra / 1e6:.0f} MB beyond the 200 MB of the tensors"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_are_saved_and_filled_there(tmp_path: Path) -> None:
    host = make_tensors(4)
    device = {name: tensor.detach().cuda() for name, tensor in host.items()}
    checkpoint = open_checkpoint(save(tmp_path, 1, device))
    targets = blank(device)
    checkpoint.load_into(targets)
    assert all(tensor.is_cuda for tensor in targets.values())
    assert_equal({name: tensor.cpu() for name, tensor in targets.items()}, host)
