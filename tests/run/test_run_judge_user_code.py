"""Whether the program is at fault: a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.judge.rules import Matcher, load_rules
from phalanx.run.judge.user_code import judge_user_code, normalise
from phalanx.run.messages import WorkerEnded


def ended(rank: int, summary: str = "ValueError: bad", step: int = 10, **more: Any) -> WorkerEnded:
    return WorkerEnded(**{"attempt": 1, "code": 1, "kind": "raised", **more}, rank=rank, summary=summary, step=step)


def killed(rank: int) -> WorkerEnded:
    return ended(rank, "killed by SIGKILL", kind="signal", code=-9)


CASES = [
    ("nobody ended", [], [], 4, False),
    ("all raised", [ended(r) for r in range(4)], [], 4, True),
    ("most raised", [ended(r) for r in range(3)], [], 4, True),
    ("half raised", [ended(r) for r in range(2)], [], 4, False),
    ("one of one raised", [ended(0)], [], 1, True),
    ("one raised", [ended(2)], [], 4, False),
    ("one rank said it thrice", [ended(2), ended(2), ended(2)], [], 4, False),
    ("all raised, with other numbers", [ended(r, f"IndexError: {r} of 0x7f{r}") for r in range(4)], [], 4, True),
    ("all raised something else", [ended(r, f"ValueError: {'abcd'[r]}") for r in range(4)], [], 4, False),
    ("three follow from one", [ended(0), *(ended(r, "peer is gone", follows=True) for r in (1, 2, 3))], [], 4, False),
    ("all follow", [ended(r, "Connection closed by peer", follows=True) for r in range(4)], [], 4, False),
    ("three were killed by us", [ended(0), *(ended(r, by_us=True) for r in (1, 2, 3))], [], 4, False),
    ("all were killed", [killed(r) for r in range(4)], [killed(r) for r in range(4)], 4, False),
    ("it comes back", [ended(2)], [ended(2)], 4, True),
    ("it comes back on another rank", [ended(3, "IndexError: 7")], [ended(2, "IndexError: 3")], 4, True),
    ("it comes back at another step", [ended(2, step=11)], [ended(2, step=10)], 4, False),
    ("another one comes", [ended(2, "KeyError: 'x'")], [ended(2)], 4, False),
    ("it comes back before the first step", [ended(2, step=-1)], [ended(2, step=-1)], 4, True),
    ("a death comes back", [killed(1)], [killed(1)], 4, False),
    ("an exception after a death", [ended(1)], [killed(1)], 4, False),
    ("it comes back beside another", [ended(0, "KeyError: 1"), ended(2)], [ended(2)], 4, True),
    ("a UserError of all", [ended(r, "lr = -1: …", kind="user") for r in range(4)], [], 4, True),
    ("an exit without a word", [ended(r, "left", kind="status") for r in range(4)], [], 4, False),
]


@pytest.mark.parametrize(("name", "ends", "previous", "world", "expected"), CASES, ids=[case[0] for case in CASES])
def test_verdicts(name: str, ends: list[WorkerEnded], previous: list[WorkerEnded], world: int, expected: bool) -> None:
    verdict = judge_user_code(ends, world, previous)
    assert verdict.is_user_code is expected, verdict.why
    assert verdict.why and (not expected or verdict.summary)


def test_what_all_say_of_the_storage_is_not_the_program() -> None:
    matcher = Matcher(load_rules())

    def fault_of(summary: str) -> str | None:
        rule = matcher.find(summary, "output")
        return rule.fault if rule else None

    full = [ended(r, "OSError: [Errno 28] No space left on device: '/x'") for r in range(4)]
    verdict = judge_user_code(full, 4, full, fault_of)
    assert not verdict.is_user_code and "storage" in verdict.why
    assert judge_user_code(full, 4).is_user_code, "without the rules it looks like any other"
    memory = [ended(r, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB") for r in range(4)]
    assert judge_user_code(memory, 4, (), fault_of).is_user_code


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("IndexError: index 12 is out of bounds for size 10", "IndexError: index 3 is out of bounds for size 7"),
        ("RuntimeError: <f at 0x7f3aDE>", "RuntimeError: <f at 0x55>"),
        ("ValueError: loss 2.5 on cuda:3", "ValueError: loss 17 on cuda:0"),
        ("E: GPU-509665ad-b600-ac93-3616-d754b23d636d", "E: GPU-0a9665ad-b600-ac93-3616-d754b23d6300"),
        ("a  b\tc", "a b c"),
    ],
)
def test_numbers_and_addresses_do_not_count(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)
    assert normalise(one) != normalise(one + " x")


@given(st.lists(st.builds(ended, st.integers(), st.text(), st.integers()), max_size=8), st.integers(0, 8))
def test_no_end_is_too_wild(ends: list[WorkerEnded], world: int) -> None:
    judge_user_code(ends, world, ends)
