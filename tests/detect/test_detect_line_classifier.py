"""Lines that no rule knows are classed by their words, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES
from phalanx.detect.logs.guessed_rules import GuessedRules
from phalanx.detect.logs.line_classifier import HARMLESS, LabelledLine, LineClassifier, read_labelled_lines, words_of
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.detect.logs.run_logs import judge_places


@pytest.fixture(scope="module")
def shipped() -> LineClassifier:
    return LineClassifier.shipped()


def test_words_are_without_numbers_paths_and_endings() -> None:
    assert words_of("ResourceExhausted: 12 failed at /a/b/c.py 0x7f") == [
        "resource", "exhaust", "fail", "at",
        "resource exhaust", "exhaust fail", "fail at",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("lustre client: the object server went away, the operation on the file system was aborted", "storage error"),
        ("jax: allocation on the device ran out of hbm memory while the program was loaded", "out of memory"),
        ("a peer task died and its heartbeat was missed, this task is shutting down", "connection error"),
    ],
)
def test_a_wording_that_nobody_has_seen_is_classed(shipped: LineClassifier, line: str, kind: str) -> None:
    guess = shipped.guess(line)
    assert guess is not None and guess.kind == kind and guess.sureness >= 0.6


def test_what_has_no_words_of_failures_is_left_alone(shipped: LineClassifier) -> None:
    assert shipped.guess("zzz qqq") is None
    guess = shipped.guess("the quick brown fox")
    assert guess is None or guess.sureness < 0.6


def test_labelled_lines_are_of_known_classes_and_each_left_out_is_mostly_right(shipped: LineClassifier) -> None:
    text = Path(__file__).parents[2].joinpath("phalanx/detect/logs/labelled_lines.txt").read_text()
    lines = read_labelled_lines(text, "labelled_lines.txt")
    assert {line.kind for line in lines} <= {*FAILURE_CLASSES, HARMLESS}
    assert shipped.left_out_right > 0.75


def test_how_sure_it_is_rises_with_the_lead_and_says_how_often_it_is_right() -> None:
    lines = [LabelledLine(f"alpha fault number {word}", "key error") for word in ("one", "two", "three", "four")]
    lines += [LabelledLine(f"beta crash {word} again", "type error") for word in ("five", "six", "seven", "eight")]
    classifier = LineClassifier(lines)
    clear, unclear = classifier.guess("alpha fault"), classifier.guess("alpha crash again")
    assert clear is not None and clear.kind == "key error"
    assert unclear is not None and unclear.sureness <= clear.sureness < 1
    assert classifier.left_out_right == 1


def test_a_particular_rule_is_never_overruled_and_calm_lines_are_no_failures(shipped: LineClassifier) -> None:
    matcher, guessed = Matcher(load_rules(of_failed_jobs=True)), GuessedRules(shipped)
    text = "RuntimeError: CUDA error: out of memory, storage bucket denied"
    rule = matcher.find(text, "output")
    assert rule is not None and not rule.general
    assert guessed.better(rule, text, "ERROR") is rule
    general = matcher.find("StorageError: the bucket is not reachable", "output")
    assert general is not None and general.general
    assert guessed.better(general, "StorageError: the bucket is not reachable", "WARNING") is None


def test_a_guess_keeps_to_what_a_line_names_and_leaves_announcements_alone(shipped: LineClassifier) -> None:
    guessed, matcher = GuessedRules(shipped), Matcher(load_rules(of_failed_jobs=True))
    line = "RuntimeError: world_size (1) is not divisible by 2"
    rule = guessed.better(matcher.find(line, "output"), line, "")
    assert rule is not None and rule.kind == "runtime error"
    assert guessed.better(None, "Error in call to target 'datasets.load.load_dataset':", "ERROR") is None


def test_a_wording_without_a_rule_is_no_cause_where_a_rule_shows_one(tmp_path: Path) -> None:
    """The words come first and on another host, and the rule is believed."""
    steps = [f"2026-11-25 10:00:{step:02d},000 step: {step} loss: 2.0" for step in range(20)]
    odd = "2026-11-25 10:00:20,000 ERROR the metrics sidecar lost its socket to the collector backend"
    fault = "2026-11-25 10:00:24,000 RuntimeError: CUDA error: an illegal memory access was encountered"
    (tmp_path / "gpu01_rank0.log").write_text("\n".join([*steps, odd]) + "\n")
    (tmp_path / "gpu02_rank1.log").write_text("\n".join([*steps, fault]) + "\n")
    verdict = judge_places([tmp_path])
    assert (verdict.detections[0].what, verdict.blamed_hosts) == ("CUDA error", ("gpu02",))


def test_a_line_before_any_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"mine\.txt: line 2.*has no class"):
        read_labelled_lines("# a remark\nCUDA error\n", "mine.txt")
