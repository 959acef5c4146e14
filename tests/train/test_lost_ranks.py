"""Of several ranks one is killed, or refuses: who says so, and that all who look at the run say the same."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.store_port import port_of
from torch.distributed import HashStore
from train_helpers import configured

from phalanx.core.errors import UserError
from phalanx.core.peers import PeerError
from phalanx.launch.environment import Worker
from phalanx.launch.rank_failures import failure_of_exception, failure_of_exit
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.rendezvous import Abort, open_store
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.run_list import Culprit, list_runs, note_end, read_culprit, read_run
from phalanx.telemetry.run_log_lines import last_lines
from phalanx.telemetry.run_presence import announce, presences
from phalanx.telemetry.run_status import run_status
from phalanx.train.lost_ranks import LostRanks
from phalanx.train.ranks import Ranks, meet
from phalanx.train.run_folder import RunFolder
from phalanx.train.running import seen
from phalanx.train.watching import watched

KILLED = "rank 1 (process {}) was killed by SIGKILL"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text('{"kind": "step", "step": 4, "loss": 1.0}\n')
    return path


def both_gone(run: Path) -> int:
    """Two ranks that were announced, and whose processes are gone; the number of rank 1's."""
    for rank in (1, 0):
        announce(run, rank=rank, world_size=2, start=1, page=None)
        (one,) = presences(run, [rank])
        gone = replace(one, started_ticks=1, pid=os.getpid() + rank)
        (run / "processes" / f"rank-{rank}.json").write_text(json.dumps(asdict(gone)))
    return os.getpid() + 1


def test_the_launcher_says_which_rank_was_killed_and_the_others_are_victims(run: Path) -> None:
    lost = LostRanks(run, 2, LoggingConfig())
    pid = both_gone(run)
    note_end(run, 4, "PeerError: connection reset", 1)
    lost.failed(failure_of_exit(1, 0, -9))
    note_end(run, 4, "stopped by SIGTERM", 1)  # rank 0, later: it only saw what came of that
    (run / "metrics.jsonl").touch()
    lost.close()
    assert read_culprit(run) == Culprit(1, pid, 1, "killed by SIGKILL")
    assert [one.rank for one in presences(run)] == [1]
    said = {line.rank: (line.level, line.text) for line in last_lines(run, 10)}
    assert said[1] == ("ERROR", "ended: killed by SIGKILL; the launcher ends the other ranks")
    assert said[0] == ("WARNING", f"ended: by the launcher, since {KILLED.format(pid)}")
    row, status = read_run(run), run_status(run)
    assert (row.state, row.why) == (status.state, status.why)
    assert row.state == "died" and row.why.startswith(f"{KILLED.format(pid)}; the launcher ended the others")
    note_end(run, 9, "all was done", 2)
    assert read_culprit(run) is None


def test_what_a_rank_could_say_itself_and_ranks_of_earlier_starts_are_left_alone(run: Path) -> None:
    both_gone(run)
    lost = LostRanks(run, 2, LoggingConfig())
    lost.failed(failure_of_exit(1, 0, -9))  # before any rank of this launch was there
    both_gone(run)
    lost.failed(failure_of_exception(1, 0, ValueError("wrong")))
    lost.close()
    assert not (run / "ended.json").exists() and not (run / "logs").exists()
    assert len(presences(run)) == 2


@pytest.mark.parametrize("content", ["3", '{"culprit": 3}', '{"culprit": {"rank": "x"}}', '{"culprit": {"rank": 1}}'])
def test_words_of_no_culprit(run: Path, content: str) -> None:
    (run / "ended.json").write_text(content)
    assert read_culprit(run) is None


def test_a_killed_run_is_the_same_in_the_table_and_in_its_status(run: Path) -> None:
    both_gone(run)
    (row,) = list_runs(run.parent)
    assert row.state == "died" and "all 2 ranks on this host are gone without a word" in row.why
    assert (row.state, row.why) == (run_status(run).state, run_status(run).why)


def told(run: Path, error: Exception, heard: str) -> dict[str, str]:
    """Who is told how the run ended, and what, where rank 0 ends with an error and rank 1 has said its own before."""
    store, found = HashStore(), dict[str, str]()
    Abort(store, 1, 2).cause(heard)
    ranks = Ranks(abort=Abort(store, 0, 2))
    config = configured(run.parent, {"alerts.watch": True})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
        heard_by = SimpleNamespace(end=lambda kind, why: found.update({kind: why}))
        patch.setattr("phalanx.train.watching.start_watcher", lambda *_: heard_by)
        with seen(config.logging, run, ranks, 1), watched(config, RunFolder(run), ranks, lambda _: None):
            raise error
    return found | {"row": read_run(run).why, "status": run_status(run).why}


def test_who_failed_first_is_told_everywhere_and_not_what_came_of_it(run: Path) -> None:
    lost = PeerError("connection closed by peer")
    why = told(run, lost, "ArithmeticError: rank 1 has come to step 5")
    assert set(why.values()) == {"rank 1: ArithmeticError: rank 1 has come to step 5"}


def test_what_all_refuse_alike_is_nobody_s(run: Path) -> None:
    refused = UserError("holds a run of another config", cure="set run.folder to a new name")
    assert set(told(run, refused, str(refused)).values()) == {str(refused)}


def test_who_failed_first_says_in_the_end_what_became_of_its_error() -> None:
    ranks = Ranks(abort=Abort(HashStore(), 0, 2))
    assert ranks.why_ended(MemoryError("no room")) == "MemoryError: no room"
    assert ranks.why_ended(UserError("there is no memory left", cure="take less")).startswith("there is no memory left")


def test_a_rank_that_comes_after_another_was_refused_says_its_words() -> None:
    """Rank 0 has announced why it ends, and left, before rank 1 connects to it."""
    store = open_store("127.0.0.1", 0, 0, 2, is_host=True)
    with socket.create_server(("127.0.0.1", 0)) as left:
        address = ["", left.getsockname()[1], "00" * 16, "here"]
    store.set("peers/0", json.dumps(address))
    worker = Worker(1, 1, 2, 2, "127.0.0.1", port_of(store))
    with pytest.raises(PeerError, match="cannot reach rank 0"):
        meet(worker, ParallelConfig())
    Abort(store, 0, 2).announce(UserError("holds a run of another config", cure="set run.folder to a new name"))
    with pytest.raises(UserError) as refused:
        meet(worker, ParallelConfig())
    assert str(refused.value) == "holds a run of another config; set run.folder to a new name"
    assert failure_of_exception(1, 0, refused.value).kind == "user"
