"""A rank that fails: whoever started it hears why before the other ranks see that it is gone."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_end_targets

from phalanx.core.errors import UserError
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.launch_messages import RankSpec, Returned
from phalanx.launch.rank_failures import Failure
from phalanx.train import session, start
from phalanx.train.ranks import Ranks

GUARD_S = 120.0


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("target", ["fail_under_our_launcher", "fail_under_another_launcher"])
def test_a_failure_is_reported_before_the_rank_closes_its_connections(target: str) -> None:
    """Whoever started it ends all ranks as soon as one of the others says that it has lost this one."""
    path = [str(Path(__file__).parent), *sys.path]
    worker = Worker(0, 0, 2, 1, "127.0.0.1", 1)
    name = f"{rank_end_targets.__name__}:{target}"
    spec = RankSpec(worker, Share(None, 1), None, name, (), dict(os.environ), path, ["rank"])
    context = multiprocessing.get_context("forkserver")  # that of `commands`, which has imported torch
    reports, sender = context.Pipe(duplex=False)
    process = context.Process(target=rank_end_targets.become, args=(spec, sender))
    process.start()
    sender.close()
    try:
        assert reports.poll(GUARD_S), "it waits for others, who only end when it is gone"
        heard = reports.recv()
    finally:
        process.kill()
        process.join()
    assert isinstance(heard, (Failure, Returned)) and heard.status == 2


class Noted:
    """Plays the tree of connections."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Noted:
    found = Noted()
    monkeypatch.setattr(session, "meet", lambda *_: Ranks(_tree=found))  # type: ignore[arg-type]
    return found


def run_rank(**options: Any) -> None:
    session.run_rank(Worker(0, 0, 2, 1, "127.0.0.1", 1), *[rank_end_targets.CONFIG] * 3, **options)  # type: ignore[arg-type]


def test_a_process_that_goes_on_has_closed_its_connections(tree: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose script catches what `phalanx.train` raises; and one that has trained, whoever has started it."""
    monkeypatch.setattr(session, "run_session", rank_end_targets.refuse)
    with pytest.raises(UserError):
        run_rank()
    assert tree.is_closed
    tree.is_closed = False
    monkeypatch.setattr(session, "run_session", lambda *_: None)
    run_rank(leaves=True)
    assert tree.is_closed


@pytest.mark.parametrize("raises", [True, False])
def test_a_rank_of_another_launcher_leaves_unless_what_it_raises_is_for_its_script(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(start, "check_early", lambda _: None)
    monkeypatch.setattr(start, "check_started", lambda *_: None)
    monkeypatch.setattr(start, "worker_environment", lambda: Worker(0, 0, 2, 1, "h", 1, launcher="srun"))
    monkeypatch.setattr(start, "load_target", lambda _: lambda *_, leaves: told.append(leaves))
    start.train_here(rank_end_targets.CONFIG, Path(), None, raises=raises)  # type: ignore[arg-type]
    assert told == [not raises]
