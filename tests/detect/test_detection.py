"""The one shape of verdicts: sentences, statuses, who may be acted upon, JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.cli.detect_command import SUBCOMMANDS, command
from phalanx.cli.verdict_output import write_verdict
from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset

SLOW = Detection(
    "slow host",
    "host h3 is slow",
    (Culprit("host", "h3", (12, 13), ("h3",)),),
    Onset(1_700_000_000.0, 1200),
    0.9,
    ("its forward pass takes 0.5 s, that of others 0.2 s",),
    ("check it: `phalanx check`",),
    "evict",
    {"slowdown": 1.9},
)
STAGE = Detection(
    "unbalanced stage", "stage 3 is heavy", (Culprit("stage", "stage 3", (3,), ("h0",)),), advice="program"
)


def test_a_verdict_says_who_what_and_since_when(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = JudgeVerdict("stragglers", (SLOW, STAGE), ("no spans of h9; start its writer",))
    assert verdict.sentence == "Host h3 is slow."
    assert verdict.blamed_hosts == ("h3",) and verdict.blamed_ranks == (12, 13)
    assert write_verdict(verdict, as_json=False) == 1
    out = capsys.readouterr().out
    assert "slow host, confidence 90%, since step 1,200 (2023-11-14 22:13:20 UTC)" in out
    assert "next: check it: `phalanx check`" in out and "not judged: no spans of h9" in out


def test_no_machine_is_blamed_for_a_stage() -> None:
    assert STAGE.blamed_hosts == () and STAGE.blamed_ranks == ()


@pytest.mark.parametrize(
    ("verdict", "status", "sentence"),
    [
        (JudgeVerdict("x", looked_at="3 ranks"), 0, "Nothing wrong was found (3 ranks)."),
        (JudgeVerdict("x", abstains=("no spans; record some",)), 3, "No verdict: no spans; record some."),
        (JudgeVerdict("x", (SLOW,)), 1, "Host h3 is slow."),
    ],
)
def test_statuses(verdict: JudgeVerdict, status: int, sentence: str) -> None:
    assert verdict.exit_status == status and verdict.sentence == sentence


def test_json_holds_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"z": np.float32(2.5), "n": np.int64(3), "bad": math.nan, "who": ("a", "b")}]
    assert write_verdict(JudgeVerdict("x", (SLOW,), tables={"ranks": rows}), as_json=True) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["tables"]["ranks"] == [{"z": 2.5, "n": 3, "bad": None, "who": ["a", "b"]}]
    assert written["detections"][0]["since"] == {"unix_s": 1.7e9, "step": 1200}


def test_orders_to_a_terminal_in_names_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    write_verdict(JudgeVerdict("x", (Detection("hang", "rank \x1b[31m7 hangs"),)), as_json=False)
    assert "\x1b" not in capsys.readouterr().out


def test_help_lists_every_judge() -> None:
    shown = CliRunner().invoke(command, ["-h"])
    assert shown.exit_code == 0 and all(name in shown.output for name in SUBCOMMANDS)


def test_names_are_shown_as_they_are_and_words_begin_large(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("node03", "ßerver"):
        found = Detection("slow host", f"{name} is slow", who=(Culprit("host", name, hosts=(name,)),))
        assert JudgeVerdict("x", (found,)).sentence == f"{name} is slow."
    stage = Detection("slow stage", "stage 3 is slow", who=(Culprit("stage", "stage 3"),))
    assert JudgeVerdict("x", (stage,)).sentence == "Stage 3 is slow."
    write_verdict(JudgeVerdict("x", (Detection("hang", "rank \u202e7\u2066 hangs"),)), as_json=False)
    assert "\\u202e7\\u2066" in capsys.readouterr().out
