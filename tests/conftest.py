"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair: a busy one must not make a test fail.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")


def pytest_configure(config: pytest.Config) -> None:
    """Signals that this process ignores would be ignored by all that it starts, too.

    Whoever runs the tests in the background of a script, or under nohup, has SIGINT, SIGQUIT or SIGHUP ignored: then
    no test of a Ctrl-C or of a terminal that is closed could pass.
    """
    os.environ.setdefault("PHALANX_WARM_CACHE", "")  # what one test has learnt is not for the next
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, by whomever
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down how the tests ended, for the second try of `.ci/run`: make tells no failed test from a broken run."""
    if not hasattr(session.config, "workerinput") and session.config.pluginmanager.has_plugin("cacheprovider"):
        session.config.cache.set("phalanx/exit_status", int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are handed out to several processes, those with the most slow tests come first.

    By itself pytest-xdist begins with the files that have the most tests, so that the few long ones, with several
    processes each, came last: one core worked for minutes while the others had nothing left to do. The Makefile has it
    leave this order as it is (--no-loadscope-reorder). What a file costs need not be written down for this: a test of
    more than about five seconds is marked as slow anyway.
    """
    if not hasattr(config, "workerinput"):  # whoever runs tests by hand sees them in the order that they ask for
        return
    every = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -every[item.path]))
