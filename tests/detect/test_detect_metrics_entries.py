"""What judges refuse or leave out of a metrics.jsonl: no traceback, no waiting, the line named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.detect.drift import drift_judge, loss_judge
from phalanx.detect.drift.metrics_entries import figure, number_of
from phalanx.detect.drift.run_pair import read_pair
from phalanx.telemetry.loggers import metrics_line, parse_line

READERS: list[Callable[[Path], Any]] = [
    loss_judge.judge_run,
    drift_judge.judge_run,
    lambda run: read_pair(run, run),
]


def _write(run: Path, **odd: Any) -> None:
    lines = [{"kind": "step", "step": n, "loss": 2.0, "step_s": 1.0} for n in range(1, 51)]
    lines[6] |= odd
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"loss": 10**400}, r"loss in line 7 is 0x"),
        ({"step": 10**30}, r"step in line 7 is 10{30},"),
        ({"step": 2**63 - 1}, "step in line 7 is 9223372036854775807,"),
        ({"step": -(10**30)}, r"step in line 7 is -10{30},"),
    ],
)
def test_numbers_that_are_too_large_are_named_by_line(
    tmp_path: Path, read: Callable[[Path], Any], odd: dict[str, Any], told: str
) -> None:
    _write(tmp_path, **odd)
    with pytest.raises(UserError, match=told):
        read(tmp_path)


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_at_once(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(it is a FIFO"):
        read(tmp_path)


@pytest.mark.parametrize("value", [None, "high", {"a": 1}, [1], True])
def test_a_loss_that_is_no_number_is_left_out_and_counted(tmp_path: Path, value: Any) -> None:
    _write(tmp_path, loss=value)
    verdict = loss_judge.judge_run(tmp_path)
    assert not verdict.detections
    assert verdict.looked_at == "49 steps; 1 without a number as loss left out"


def test_what_training_writes_of_nan_is_a_number() -> None:
    entry = parse_line(metrics_line("step", 3, {"loss": float("nan"), "grad_norm": float("-inf")}))
    assert entry is not None
    loss = number_of(entry, "loss")
    assert loss is not None
    assert loss != loss
    assert figure(entry, "grad_norm") == float("-inf")
    assert number_of({"loss": None}, "loss") is None
