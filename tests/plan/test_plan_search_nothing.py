"""Where no layout is left, the error says what took them away and what is cheapest to relax."""

from __future__ import annotations

import pytest
from search_costs import GPT3, FakeCosts

from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import Machine, parse
from phalanx.plan.search.search import search
from phalanx.plan.types import Job, Model

SMALL = Model(layers=4, hidden=64, heads=4, vocab_rows=256, max_sequence=2048)


def refused(words: list[str], devices: int = 16, batch: int = 16, memory: float = 80.0, model: Model = GPT3) -> str:
    job = Job(model, 2048, batch)
    with pytest.raises(UserError) as caught:
        search(job, Machine(devices, 8, memory), FakeCosts(job).costs, parse(words))
    return str(caught.value)


def test_the_word_that_leaves_nothing_is_named() -> None:
    said = refused(["tensor=5", "pipeline<=4"])
    assert "by 'tensor=5 (ranks that split every matrix)'" in said
    assert "; leave out tensor=5: " in said and said.endswith("layouts are left then")


def test_a_span_over_hosts_is_offered() -> None:
    said = refused(["tensor=16"])
    assert "tensor inside a host of 8 devices" in said and "write inside_host=none" in said


def test_choices_that_suit_no_layout_are_named() -> None:
    said = refused(["zero=3", "data=1", "context=1"])
    assert "a zero that fits, of 3" in said
    assert "leave out" in said


def test_what_no_word_can_mend_has_the_cure_of_its_rule() -> None:
    said = refused([], devices=7, batch=16, model=SMALL)
    assert "no layout of 7 devices" in said and said.endswith("take 4 or 8 devices")


def test_too_little_memory_says_how_much_is_needed() -> None:
    said = refused([], memory=1e-6)
    assert "the leanest needs" in said and "take more devices" in said


def test_too_little_memory_for_what_was_asked_says_what_to_leave_out() -> None:
    said = refused(["recompute=none", "micro_batch>=8"], batch=64, memory=2.5)
    assert "the leanest needs" in said
    assert "leave out" in said and "are enough then" in said


def test_no_devices_are_refused() -> None:
    assert refused([], devices=0).startswith("devices = 0: is no number of devices")
