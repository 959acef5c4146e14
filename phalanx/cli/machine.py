"""Which cluster this machine is: the file that `phalanx plan calibrate` wrote here, or one that has its GPUs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

# A word of the driver's name for a GPU -> cluster of hosts with such GPUs; the first that is found holds.
_GPUS = {"A100-SXM4-80GB": "selene", "H100 80GB HBM3": "h100_400g", "H200": "h200_400g"}
_DRIVER = Path("/proc/driver/nvidia/gpus")


def known_cluster(environ: Mapping[str, str], driver: Path = _DRIVER) -> str | None:
    """The cluster that a run on this machine is predicted for; None where nothing is known of it."""
    return next((str(path) for path in calibrated_paths(environ) if path.is_file()), None) or _by_gpu(driver)


def calibrated_paths(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """``HOST.toml`` here, as `phalanx plan calibrate` writes it, or in ``$XDG_CACHE_HOME/phalanx/clusters``.

    By host, because a folder may be shared by many.
    """
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/") / ".cache")
    name = f"{socket.gethostname()}.toml"
    return Path(name), Path(base) / "phalanx" / "clusters" / name


def _by_gpu(driver: Path) -> str | None:
    """By the model that NVIDIA's driver tells of the first GPU, without asking the GPU."""
    told = next((path.read_text() for path in sorted(driver.glob("*/information"))), "")
    model = next((line.partition(":")[2] for line in told.splitlines() if line.startswith("Model:")), "")
    return next((cluster for word, cluster in _GPUS.items() if word in model), None)
