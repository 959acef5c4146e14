"""The rules that come with the package: their examples, real kernel logs, innocent lines, wild lines."""

from __future__ import annotations

import pkgutil
import re
import re._parser as parser
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.detect.logs.log_rules import (
    FLAGS,
    LONGEST_LINE,
    LogRule,
    Matcher,
    load_rules,
    may_explode,
    required_texts,
    shorten,
)
from phalanx.run import judge
from phalanx.run.judge.line_watch import KERNEL_RANK, Watcher

LOGS = Path(__file__).parents[3] / "shared" / "data" / "nodes" / "gpud-kmsg"
RULES = load_rules()
MATCHER = Matcher(RULES)


def sources(rule: LogRule) -> list[Any]:
    return ["output", "kernel"] if rule.where == "any" else [rule.where]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_example_is_found_as_its_own_rule(rule: LogRule) -> None:
    assert rule.spares
    for source in sources(rule):
        for line in rule.matches:
            found = MATCHER.find(line, source)
            assert found is not None and found.name == rule.name
        for line in rule.spares:
            found = MATCHER.find(line, source)
            assert found is None or found.name != rule.name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_limits_and_passes_through_the_prefilter(rule: LogRule) -> None:
    assert required_texts(rule.pattern) is not None
    assert not may_explode(rule.pattern)
    assert all(high <= 200 for high in highs(parser.parse(rule.pattern, FLAGS)))


def highs(items: Any) -> list[int]:
    """Upper limits of all repetitions but those of one character class at the end of a number."""
    found = []
    for code, value in items:
        if str(code).endswith("REPEAT"):
            found += [] if is_digits(value[2]) else [value[1]]
            found += highs(value[2])
        elif str(code) == "SUBPATTERN":
            found += highs(value[3])
        elif str(code) == "BRANCH":
            found += [high for branch in value[1] for high in highs(branch)]
    return found


def is_digits(part: Any) -> bool:
    return str(part) == str(parser.parse(r"\d+", FLAGS)[0][1][2])


def test_what_is_asked_for_is_covered() -> None:
    by_fault = Counter(rule.fault for rule in RULES)
    assert set(by_fault) == {"user", "process", "host", "network", "storage", "unknown"}
    assert len(RULES) >= 55


REAL = [
    ("kmsg_kmsg.1.log", {}),
    ("kmsg_kmsg.2.peermem.log", {"peer-memory": 7}),
    ("memory_dmesg.decode.iso.log", {"xid-user-code": 17, "oom-of-others": 3, "oom-host": 2, "oom-cgroup": 2}),
    ("nccl_dmesg.decode.iso.log", {"segfault-kernel": 2}),
    ("xid_dmesg-with-xid-119.log", {"xid-firmware": 5}),
    ("pstore_7530486857247_dmesg.txt", {"nic-unplugged": 1, "kernel-crash": 1}),
    ("pstore_dmesg-erst.txt", {"kernel-crash": 2}),
    ("fabric-manager_fabricmanager.log", {"sxid-nonfatal": 1}),
]


@pytest.mark.parametrize(("name", "expected"), REAL, ids=[name for name, _ in REAL])
def test_real_logs_of_nodes(name: str, expected: dict[str, int]) -> None:
    if not LOGS.is_dir():
        pytest.skip(f"the recorded kernel logs are not at {LOGS}")
    lines = (LOGS / name).read_text(errors="replace").splitlines()
    found = [MATCHER.find(line, "kernel") for line in lines]
    assert Counter(rule.name for rule in found if rule) == expected
    assert not any(MATCHER.find(line, "output") for line in lines), "a rank that prints a kernel log proves nothing"


def test_lines_of_healthy_nodes_raise_nothing() -> None:
    folder = LOGS.parent / "gcm-health-slurm"
    if not folder.is_dir():
        pytest.skip(f"the recorded outputs are not at {folder}")
    for path in folder.glob("*.txt"):
        for line in path.read_text(errors="replace").splitlines():
            assert MATCHER.find(line, "output") is None and MATCHER.find(line, "kernel") is None


@pytest.mark.parametrize(
    "line",
    [
        "our loss is NaN-safe",
        "validation nan_to_num(loss) applied to 3 tensors",
        "INFO loss 2.3140 | grad norm inf-clipped 0",
        "gloss: nano",
        "loss scale info: 65536",
        "step 4 loss 3.2 (no NaN, no Inf)",
        "NCCL INFO cudaDev 0 nvmlDev 0 busId 1b000 commId 0x9f - Init COMPLETE",
        "evaluating … this takes 300 s",
        "checkpoint: writing 14 GB, 31 s",
        "WARNING: timeout of the store is 300 s",
        "RuntimeWarning: invalid value encountered in log",
        "CUDA error checking is on (TORCH_USE_CUDA_DSA)",
        "retrying: 0 failed, 12 completed",
        "Loading model… out of memory safeguards: on",
        "data/segfaults.txt tokenized",
    ],
)
def test_innocent_lines_say_nothing(line: str) -> None:
    assert MATCHER.find(line, "output") is None


@pytest.mark.parametrize(
    "line",
    [
        "loss: nan",
        "step 3 loss=NaN grad_norm=inf",
        "{'loss': nan}",
        "train loss -> -inf",
        "loss tensor(nan, device='cuda:0')",
    ],
)
def test_a_loss_that_is_not_finite_is_only_a_note(line: str) -> None:
    found = MATCHER.find(line, "output")
    assert found is not None and (found.name, found.severity) == ("loss-not-finite", "note")


def test_notes_are_never_about_what_ends_training() -> None:
    severities = {rule.name: rule.severity for rule in RULES}
    for name in ("xid-lost", "xid-ecc", "cuda-error", "nccl-timeout", "disk-full", "segfault", "import-error"):
        assert severities[name] == "fatal"


LINES = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from([text for rule in RULES for text in [*rule.matches, *rule.spares]]), min_size=1, max_size=2
    ).map(" ".join),
    st.builds(
        lambda text, cut, times: (text[: cut % (len(text) + 1)]) * times,
        st.sampled_from([text for rule in RULES for text in rule.matches]),
        st.integers(0, 400),
        st.integers(0, 50),
    ),
)


@given(LINES)
def test_no_line_is_too_wild_and_the_prefilter_loses_nothing(line: str) -> None:
    for source in ("output", "kernel"):
        plain = [rule for rule in RULES if rule.where in (source, "any")]
        expected = next((rule for rule in plain if re.search(rule.pattern, shorten(line), FLAGS)), None)
        assert MATCHER.find(line, source) is expected  # type: ignore[arg-type]


def test_the_end_of_a_long_line_counts() -> None:
    bar = "\r".join(f"{i} it/s" for i in range(10_000))
    line = f"{bar}\rRuntimeError: CUDA error: an illegal memory access was encountered"
    assert len(shorten(line)) == LONGEST_LINE
    found = MATCHER.find(line, "output")
    assert found is not None and found.name == "cuda-error"


def test_what_repeats_is_left_out_for_a_while() -> None:
    watcher = Watcher(MATCHER, window_s=60)
    line = "RuntimeError: CUDA error: an illegal memory access was encountered"
    first = watcher.look(3, line, 100.0)
    assert first is not None and (first.rank, first.rule, first.fault) == (3, "cuda-error", "process")
    assert watcher.look(3, line, 159.9) is None
    assert watcher.look(4, line, 159.9) is not None, "another rank"
    assert watcher.look(3, line, 160.0) is not None, "later"
    assert watcher.left_out == {"cuda-error": 1}
    watcher.forget()
    assert watcher.look(3, line, 161.0) is not None, "a new attempt"


def test_another_device_is_another_thing() -> None:
    watcher = Watcher(MATCHER)
    first, second = (f"NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off the bus." for bus in ("3b", "9b"))
    assert watcher.look(KERNEL_RANK, first, 0.0) and watcher.look(KERNEL_RANK, second, 0.0)
    assert watcher.look(KERNEL_RANK, first, 1.0) is None
    watcher.forget()
    assert watcher.look(KERNEL_RANK, first, 1.0) is not None, (
        "what the kernel says in a new attempt is evidence of that"
    )


@given(st.lists(st.tuples(st.integers(-1, 5), LINES), max_size=30))
def test_what_is_remembered_has_a_limit(said: list[tuple[int, str]]) -> None:
    watcher = Watcher(MATCHER, capacity=3)
    for index, (rank, line) in enumerate(said):
        watcher.look(rank, line, float(index))
        assert len(watcher._seen_s) <= 3


def test_judges_do_not_load_torch() -> None:
    names = [module.name for module in pkgutil.iter_modules(judge.__path__)]
    assert {"interface_traffic", "line_watch", "stragglers", "suspects"} <= set(names)
    imports = "; ".join(f"import phalanx.run.judge.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
