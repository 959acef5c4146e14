"""The benchmarks of logs and of repeat offenders work, and what they make is as they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import detect_logs, detect_offenders
from benchmarks.support.log_incidents import load_messages
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES

OURS = {
    "silent corruption",
    "loss not finite",
    "stopped by a person",
    "ended from outside",
}  # that the paper's table has not


def test_every_class_has_messages_of_every_set() -> None:
    messages = load_messages()["message"]
    for which in ("written", "held", "fresh"):
        assert {one["class"] for one in messages if one["set"] == which} == set(FAILURE_CLASSES) - OURS


def test_gathered_messages_have_a_source_and_are_halved() -> None:
    messages = load_messages()["message"]
    tuned, untouched = ([one for one in messages if one["set"] == which] for which in ("tuned", "untouched"))
    assert len(tuned) + len(untouched) >= 100 and abs(len(tuned) - len(untouched)) <= 1
    assert all(one["origin"].startswith("https://github.com/") for one in tuned + untouched)
    assert not {tuple(one["lines"]) for one in tuned} & {tuple(one["lines"]) for one in untouched}


def test_later_messages_are_of_every_class_and_have_sources_of_their_own() -> None:
    messages = load_messages()["message"]
    later = [one for one in messages if one["set"] in ("blind", "last", "third")]
    assert len([one for one in later if one["set"] == "third"]) > 60
    for which in ("blind", "last"):
        own = [one for one in later if one["set"] == which]
        assert {one["class"] for one in own} == set(FAILURE_CLASSES) - OURS and len(own) > 90
    origins = [one["origin"] for one in later]
    assert len(set(origins)) == len(origins) and all(one.startswith("https://github.com/") for one in origins)
    assert not set(origins) & {one.get("origin") for one in messages if one not in later}


def test_unseen_messages_have_sources_and_calm_lines_of_their_own() -> None:
    messages = load_messages()
    unseen = {which: [one for one in messages["message"] if one["set"] == which] for which in detect_logs.EACH_ONCE}
    assert [len(own) >= least for own, least in zip(unseen.values(), (100, 50, 60), strict=True)] == [True] * 3
    origins = [one["origin"] for own in unseen.values() for one in own]
    assert len(set(origins)) == len(origins) and all(one.startswith("https://") for one in origins)
    assert not set(origins) & {one.get("origin") for one in messages["message"] if one["set"] not in unseen}
    assert all(len(detect_logs.calm_lines(which)) > 10 for which in detect_logs.EACH_ONCE)


@pytest.mark.campaign
def test_the_benchmark_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["detect_logs.py", "--quick", "--json", str(out)])
    detect_logs.main()
    figures = json.loads(out.read_text())
    assert all(row["class_right"] and row["host_right"] for row in figures["written"])
    assert all(row["class_right"] and row["host_right"] for row in figures["outside"])
    assert figures["healthy"]["diagnoses"] == 0 and figures["speed"]["lines"] == 4000


def test_the_benchmark_of_offenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["detect_offenders.py", "--quick", "--json", str(out)])
    detect_offenders.main()
    figures = json.loads(out.read_text())
    assert figures["equal hosts, no offender"]["wrongly"] == 0
    assert figures["equal hosts, 5 offenders of 6 to 20 times"]["recall"] > 0.5
