"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair: a busy one must not make a test fail. The examples of a test are
# the same everywhere, so that what passed here passes there; HYPOTHESIS_PROFILE=explore looks for others, and more.
settings.register_profile("phalanx", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "phalanx"))


def _begin_anew() -> None:
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(1)  # of two, each waits for the other on a busy core


@pytest.fixture(autouse=True, scope="module")
def _module_begins_anew() -> None:
    """What a fixture of a whole file draws does not depend on which tests this process ran before."""
    _begin_anew()


@pytest.fixture(autouse=True)
def _test_begins_anew(_module_begins_anew: None) -> None:
    """A test draws the same numbers, with as many threads, alone and among ten thousand."""
    _begin_anew()


def pytest_configure(config: pytest.Config) -> None:
    """Signals that this process ignores would be ignored by all that it starts, too.

    Whoever runs the tests in the background of a script, or under nohup, has SIGINT, SIGQUIT or SIGHUP ignored: then
    no test of a Ctrl-C or of a terminal that is closed could pass.
    """
    sys.dont_write_bytecode = False  # pytest keeps the assertions that it has rewritten: 11 s of CPU for all files
    os.environ.setdefault("PHALANX_WARM_CACHE", "")  # what one test has learnt is not for the next
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, by whomever
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests wait for processes, limits and disks a third of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made while tests are collected stays: two million objects that nothing looks through for garbage again.

    Every training collects garbage before its first step, which took longer than all the rest of many a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down how the tests ended, for the second try of `.ci/run`: make tells no failed test from a broken run."""
    if not hasattr(session.config, "workerinput") and session.config.pluginmanager.has_plugin("cacheprovider"):
        cache = session.config.cache
        cache.set("phalanx/exit_statuses", [*cache.get("phalanx/exit_statuses", []), int(exitstatus)])


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Generator[None, object, object]:
    """Cases that a campaign mark excepts, `campaign(but=("id", …))`, belong to the tests.

    A misspelt id is an error: its case would leave the tests without a word.
    """
    made = yield
    cases = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    mark = cases[0].get_closest_marker("campaign") if cases else None
    if mark and not cases[0].name.endswith("[NOTSET]"):  # nor are there cases where the data they come from is not
        by_id = {item.name.partition("[")[2].removesuffix("]"): item for item in cases}
        excepted = mark.kwargs.get("but", ())
        if unknown := set(excepted) - by_id.keys():
            raise collector.CollectError(f"{name}: campaign(but=…): no case has the id {sorted(unknown)}")
        for case in excepted:
            by_id[case].own_markers.remove(mark)
    return made


def pytest_addoption(parser: pytest.Parser) -> None:
    """What share of the campaign is run."""
    parser.addoption("--campaign-share", type=int, default=1, metavar="N", help="run every N-th campaign test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--campaign-share` does; files with the most slow tests are handed out first.

    By itself pytest-xdist begins with the files that have the most tests, so that the few long ones, with several
    processes each, came last: one core worked for minutes while the others had nothing left to do. The Makefile has it
    leave this order as it is (--no-loadscope-reorder). What a file costs need not be written down for this: a test of
    more than about five seconds is marked as slow anyway.
    """
    campaign = [item for item in items if item.get_closest_marker("campaign")]
    left_out = set(campaign) - set(campaign[:: config.getoption("campaign_share")])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if not hasattr(config, "workerinput"):  # whoever runs tests by hand sees them in the order that they ask for
        return
    every = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -every[item.path]))
