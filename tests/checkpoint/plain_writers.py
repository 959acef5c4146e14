"""Checkpoints that torch.distributed.checkpoint itself writes: by one process, by ranks with FSDP2, by async_save."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH = 12


def save_alone(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 5, bias=False), nn.LayerNorm(5))


def save_sharded(path: Path, ranks: int, *, background: bool = False) -> None:
    """As torchtitan does: FSDP2, one step of Adam, optimizer state flattened; also all of it whole, in whole.pt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    multiprocessing.start_processes(
        _save_rank, (ranks, str(path), background), nprocs=ranks, join=True, start_method="fork"
    )


def _save_rank(rank: int, ranks: int, path: str, background: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}.store", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    model = make_model()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    adam.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, adam, options=options),
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "losses": [1.5, 2.5]},
        "dataloader": {f"dp_rank_{rank}": pickle.dumps({"at": rank})},
        "lr_scheduler": {"last_epoch": 7},
    }
    if background:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    whole = {f"model.{name}": tensor.full_tensor() for name, tensor in state["model"].items()}
    whole |= {
        f"optimizer.{name}": tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in state["optimizer"].items()
        if isinstance(tensor, Tensor)
    }
    if rank == 0:
        torch.save(whole, f"{path}.whole.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # forked: what the parent registered for its own end is not this process's business


class Attack:
    """Pickles to a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)
