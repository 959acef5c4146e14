"""Tensors to save, and forged checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor a training run saves: weights, moments, counters, RNG bytes, views, an empty one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    merged = normal(12, 4)
    return {
        "model.layers.0.attention.q": merged[:4],
        "model.layers.0.attention.k": merged[4:8],
        "model.layers.0.attention.v": torch.nn.Parameter(merged[8:].clone()),
        "model.norm": normal(5).bfloat16(),
        "optim.layers.0.attention.q.exp_avg": normal(4, 4),
        "optim.layers.0.attention.q.step": torch.tensor(float(seed)),
        "optim.bad_steps": torch.tensor(seed, dtype=torch.int64),
        "optim.none_yet": torch.empty(0, 3),
        "optim.transposed": normal(3, 5).T,
        "optim.columns": normal(6, 6).double()[:, 1:4],
        "optim.flags": torch.tensor([True, False, True]),
        "rng.cpu": generator.get_state(),
    }


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def forge(path: Path, contents: Mapping[str, bytes], lengths: Mapping[str, int] | None = None) -> None:
    """Change files of a checkpoint and make every checksum fit again, as someone with bad intentions would."""

    def change(tree: dict[str, Any]) -> None:
        for entry in tree["files"]:
            if entry["name"] in contents:
                content = contents[entry["name"]]
                entry.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, length in (lengths or {}).items():
            tree["tensors"][name]["chunks"][0]["length"] = length

    for name, content in contents.items():
        (path / name).write_bytes(content)
    rewrite(path, change)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads((path / "manifest.json").read_text())
    change(tree)
    content = json.dumps(tree).encode()
    (path / "manifest.json").write_bytes(content)
    lines = [f"{entry['sha256']}  {entry['name']}\n" for entry in tree.get("files", [])]
    (path / "SHA256SUMS").write_text("".join(lines) + f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")
