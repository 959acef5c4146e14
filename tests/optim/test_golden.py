"""Trajectories that unmodified reference code took, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.optim.came import CAME
from phalanx.optim.lamb import LAMB

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden"
KEYS = ("mat", "vec", "ten")
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def cases() -> list[str]:
    """Every trajectory that is there, or one placeholder so that the skip is seen."""
    return sorted(p.name for p in GOLDEN.glob("*.f??.npz")) or ["absent"]


def make_of(case: str, reference: str, kwargs: dict[str, Any], compiled: bool) -> Make:
    """Our optimizer with the reference's settings under our names."""
    wanted = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items() if k not in ("foreach", "clamp")}
    if reference == "CAME":
        return lambda ps: CAME(ps, compile=compiled, **wanted)
    if case.startswith("adamw"):
        return lambda ps: torch.optim.AdamW(ps, fused=True, **wanted)
    if case.startswith("lamb_cybertronai"):
        kept = {k: wanted[k] for k in ("lr", "betas", "eps", "weight_decay")}
        options = {"bias_correction": False, "always_adapt": True, "max_weight_norm": 10.0}
        return lambda ps: LAMB(ps, compile=compiled, **kept, **options)
    assert wanted.pop("grad_averaging", True)  # ours always averages
    wanted.setdefault("max_grad_norm", 1.0)
    return lambda ps: LAMB(ps, compile=compiled, **wanted)


def trajectory(make: Make, inputs: Any, dtype: torch.dtype) -> tuple[dict[str, np.ndarray], torch.optim.Optimizer]:
    ps = {key: torch.nn.Parameter(torch.tensor(inputs[f"p0_{key}"], dtype=dtype)) for key in KEYS}
    optimizer = make(list(ps.values()))
    path: dict[str, list[np.ndarray]] = {key: [] for key in KEYS}
    for step in range(len(inputs["g_mat"])):
        for key, p in ps.items():
            p.grad = torch.tensor(inputs[f"g_{key}"][step], dtype=dtype)
        optimizer.step()
        for key, p in ps.items():
            path[key].append(p.detach().numpy().copy())
    return {key: np.stack(steps) for key, steps in path.items()}, optimizer


def check(case: str, mode: str) -> None:
    if not GOLDEN.is_dir():
        pytest.skip(f"needs the golden trajectories in {GOLDEN}")
    entry = json.loads((GOLDEN / "manifest.json").read_text())["cases"][case]
    _, inputs, precision, _ = case.split(".")
    dtype = torch.float64 if precision == "f64" else torch.float32
    plain = make_of(case, entry["ref"], entry["kwargs"], mode == "compiled")

    def make(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = plain(ps)
        if mode == "masked":
            optimizer.as_on_device, optimizer.found_inf = True, torch.zeros(())
        return optimizer

    mine, _ = trajectory(make, np.load(GOLDEN / f"inputs_{inputs}.npz"), dtype)
    reference = np.load(GOLDEN / case)
    tolerance = {"rtol": 1e-10, "atol": 1e-14} if precision == "f64" else {"rtol": 0.0, "atol": 1e-6}
    for key in KEYS:
        np.testing.assert_allclose(mine[key], reference[f"p_{key}"], **tolerance)


@pytest.mark.parametrize("mode", ["plain", "masked"])
@pytest.mark.parametrize("case", cases())
def test_every_step_is_the_references(case: str, mode: str) -> None:
    check(case, mode)


@pytest.mark.campaign(but=("came_b95_clip05.main.f64.npz",))
@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases() if not c.startswith("adamw")])
def test_every_compiled_step_is_the_references(case: str) -> None:
    torch.compiler.reset()
    check(case, "compiled")
