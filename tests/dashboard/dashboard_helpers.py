"""Runs to look at, and a browser of TestClient's kind that has the token."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from support.browser import TOKEN

from phalanx.dashboard.dashboard_app import create_app
from phalanx.dashboard.data_source import DataSource
from phalanx.telemetry.loggers import metrics_line

BASE = "http://127.0.0.1:8642"


def client_of(folder: Path, *, enters: bool = True) -> TestClient:
    """A client of the dashboard of `folder`, which has used the token's URL."""
    app = create_app(DataSource.of_folder(folder), TOKEN)
    client = TestClient(app, base_url=BASE, follow_redirects=False)  # type: ignore[arg-type]
    if enters:
        assert client.get(f"/?token={TOKEN.reveal()}").status_code == 303
    return client


def write_log(
    run: Path, lines: Sequence[tuple[str, str]], *, rank: int | None = None, begin_unix_s: float = 1.8e9
) -> Path:
    """A log as training keeps it: lines of (level, text), a second apart; `rank`: of one of several ranks."""
    (run / "logs").mkdir(exist_ok=True)
    path = run / "logs" / ("train.log" if rank is None else f"rank-{rank}.host.log")
    with path.open("a") as file:
        for number, (level, text) in enumerate(lines):
            moment = datetime.fromtimestamp(begin_unix_s + number, UTC).isoformat(timespec="milliseconds")[:-6]
            file.write(f"{moment}Z {level} [rank {rank or 0} start 1] {text}\n")
    return path


def make_run(path: Path, *, steps: int = 20, total: int = 20, age_s: float = 0.0, **config: Mapping[str, Any]) -> Path:
    """A run folder as `phalanx train` leaves it, with an evaluation and a checkpoint each 10 steps."""
    path.mkdir(parents=True)
    settings = {"model": {"layers": 2}, "train": {"steps": total, "global_batch": 4}, "optim": {"lr": 1e-3}}
    (path / "config.json").write_text(json.dumps(settings | config))
    (path / "environment.json").write_text(json.dumps({"python": "3.12.0", "hosts": 1}))
    with (path / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            loss = 2 + 3 / math.sqrt(step)
            values = {"loss": loss, "tokens": step * 4096, "tokens_per_s": 1000.0, "step_s": 0.5, "grad_norm": 1.0}
            file.write(metrics_line("step", step, values))
            if step % 10 == 0:
                file.write(metrics_line("evaluation", step, {"validation_loss": loss + 0.1}))
                file.write(metrics_line("checkpoint", step, {"checkpoint/name": f"step-{step:08d}"}))
    os.utime(path / "metrics.jsonl", (time.time() - age_s,) * 2)
    return path
