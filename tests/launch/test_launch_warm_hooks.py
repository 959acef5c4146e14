"""Which optimizer's steps count, and what happens after an import."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.fresh_rank import when_imported
from phalanx.launch.script_hooks import StepCounter


class Optimizer:
    """Something that can be referred to weakly."""


class Counted:
    """A counter of steps, and how many it has counted."""

    def __init__(self) -> None:
        self.steps = 0
        self.counter = StepCounter(self._count)

    def _count(self) -> None:
        self.steps += 1


def test_one_of_several_optimizers_counts() -> None:
    counted, optimizers = Counted(), [Optimizer() for _ in range(300)]  # one for each parameter
    for step in range(1, 6):
        for optimizer in optimizers:
            counted.counter(optimizer)
        assert counted.steps == step


def test_the_next_one_counts_when_the_first_is_gone() -> None:
    counted, first, second = Counted(), Optimizer(), Optimizer()
    counted.counter(first)
    counted.counter(second)
    assert counted.steps == 1
    del first
    gc.collect()
    counted.counter(second)
    assert counted.steps == 2


def test_the_next_one_counts_when_the_first_is_no_longer_used() -> None:
    counted, warm_up, main = Counted(), Optimizer(), Optimizer()
    for _ in range(5):
        counted.counter(warm_up)
    for _ in range(100):
        counted.counter(main)
    assert counted.steps == 5 + 100 - 16


@given(st.lists(st.integers(0, 3), max_size=200))
def test_whoever_steps_the_run_moves_and_no_step_counts_twice(order: list[int]) -> None:
    counted, optimizers = Counted(), [Optimizer() for _ in range(4)]
    for number in order:
        counted.counter(optimizers[number])
    assert counted.steps <= len(order)
    assert counted.steps >= (len(order) > 0)
    before = counted.steps
    for _ in range(18):  # in however odd an order: one that goes on alone is counted soon
        counted.counter(optimizers[0])
    assert counted.steps > before


def test_a_process_that_a_rank_forks_counts_nothing() -> None:
    counted, optimizer = Counted(), Optimizer()
    counted.counter(optimizer)
    child = os.fork()
    if child == 0:
        counted.counter(optimizer)
        os._exit(counted.steps)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


PROGRAM = """
import sys
sys.path[:0] = [sys.argv[1]]
from phalanx.launch.fresh_rank import when_imported
seen = []
when_imported("watched.inner", lambda module: seen.append(module.VALUE))
before = len(sys.meta_path)
import watched
assert seen == [7] and watched.inner.VALUE == 7 and len(sys.meta_path) == before - 1
when_imported("watched.inner", lambda module: seen.append(module.VALUE + 1))
assert seen == [7, 8]
"""


def test_something_happens_at_the_end_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "__init__.py").write_text("from watched import inner\n")
    (tmp_path / "watched" / "inner.py").write_text("VALUE = 7\n")
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True)


def test_what_is_imported_already_is_acted_on_at_once() -> None:
    seen: list[object] = []
    when_imported("json", seen.append)
    import json

    assert seen == [json]


@pytest.mark.parametrize("name", ["no_such_module_at_all", "no_such_package.inner"])
def test_a_module_that_is_never_there_fails_as_ever(name: str) -> None:
    program = (
        "from phalanx.launch.fresh_rank import when_imported\n"
        f"when_imported({name!r}, print)\n"
        f"try:\n    import {name}\nexcept ModuleNotFoundError: print('as ever')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "as ever\n"


def test_process_groups_end_without_the_interpreters_lock_held() -> None:
    """Whichever way the function is reached; a thread that needs the lock gets it before and after."""
    program = (
        "import threading, time\n"
        "from phalanx.launch.fresh_rank import when_imported\n"
        "from phalanx.launch.script_hooks import end_groups_well\n"
        "when_imported('torch.distributed', end_groups_well)\n"
        "import torch.distributed as dist\n"
        "from torch.distributed.distributed_c10d import destroy_process_group\n"
        "assert dist.destroy_process_group is destroy_process_group\n"
        "assert destroy_process_group.__name__ == 'destroy_process_group' and destroy_process_group.__wrapped__\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "slept = []\n"
        "real, time.sleep = time.sleep, lambda seconds: slept.append(dist.is_initialized())\n"
        "dist.destroy_process_group()\n"
        "assert slept == [True, False] and not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
