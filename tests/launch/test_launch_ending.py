"""Which failure explains a job's end, how it is told, and when the other ranks are ended."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.core.peers import PeerError
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.launch_messages import RankSpec, Returned
from phalanx.launch.rank_failures import (
    Ending,
    Failure,
    describe,
    errors_named,
    failure_of_exception,
    failure_of_exit,
    find_culprit,
)
from phalanx.launch.rank_process import execute_rank


def raised(rank: int, time_s: float, error: BaseException | None = None) -> Failure:
    try:
        raise error or ValueError("wrong")
    except BaseException as caught:
        return failure_of_exception(rank, int(time_s * 1e9), caught)


CLOSED = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13006. GLHF!"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError("[../pair.cc:537] Read error [127.0.0.1]:2974: Connection reset by peer. GLHF!"),
        RuntimeError("[unbound_buffer.cc:88] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("[2]: Application timeout caused pair closure"),
        RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.29"),
        RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
        ConnectionResetError("whatever"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_errors_about_a_peer_follow_from_its_own(error: Exception) -> None:
    first, second = raised(0, 1.0, error), raised(1, 2.0)
    assert (first.follows, second.follows) == (True, False)
    assert find_culprit([first, second]) is second


def compiled(source: str, file: str) -> Exception:
    try:
        compile(source, file, "exec")
    except SyntaxError as error:
        return error
    raise AssertionError("it can be compiled")


def test_source_that_cannot_be_compiled_is_told_from_what_a_program_raises() -> None:
    assert raised(0, 1.0, compiled("def f(:", "/job/train.py")).kind == "syntax"
    assert raised(0, 1.0, compiled("if 1:\nx = 1", "/job/train.py")).kind == "syntax"  # an IndentationError
    # what a program compiles by itself is its data
    assert raised(0, 1.0, compiled("{1: ", "<unknown>")).kind == "raised"
    assert raised(0, 1.0, SyntaxError("of its own")).kind == "raised"


def test_an_error_raised_from_one_about_a_peer_follows_too() -> None:
    error = KeyError("state")
    error.__cause__ = RuntimeError(CLOSED)
    assert raised(0, 1.0, error).follows


def test_what_cannot_be_reached_because_a_peer_is_gone_follows_whoever_words_it() -> None:
    unreachable = UserError("no answer from the store", cure="check that rank 0 runs")
    unreachable.__cause__ = RuntimeError("Connection reset by peer")
    collective = type("CollectiveError", (RuntimeError,), {})("all_reduce failed: a member has ended")
    peer = PeerError("rank 1 on b was to meet: rank 0 on a has ended: its connection is closed")
    found = [raised(rank, 1.0, error).follows for rank, error in enumerate((unreachable, collective, peer))]
    assert found == [True, True, True]
    assert not raised(0, 1.0, UserError("is too large", cure="take 3")).follows


def test_the_first_explains_where_several_could() -> None:
    failures = [raised(2, 5.0), failure_of_exit(1, int(4e9), -9), raised(0, 6.0, RuntimeError(CLOSED))]
    assert find_culprit(failures).rank == 1
    assert find_culprit(failures[2:]).rank == 0


def test_the_traceback_comes_last_under_a_line_that_names_rank_host_and_layout() -> None:
    failures = [raised(0, 1.0, RuntimeError(CLOSED)), raised(3, 0.9)]
    text = describe(failures, 4, "host7", Layout(pipeline=2, tensor=2))
    lines = text.splitlines()
    assert lines[0] == "  rank 0 then: RuntimeError: Connection closed by peer [127.0.0.1]:13006. GLHF!"
    assert lines[2] == "rank 3 of 4 on host7 (layout pp2·tp2: pipeline 1, tensor 1): ValueError: wrong"
    assert lines[4] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: wrong"


def test_a_user_error_is_one_line_and_said_once_for_all_ranks() -> None:
    error = UserError("is too large", cure="take 3", field="model.layers", value=7)
    failures = [raised(rank, 1.0 + rank, error) for rank in range(4)]
    (line,) = describe(failures, 4, "host7", None).splitlines()
    assert line == ("error: model.layers = 7: is too large; take 3 [rank 0 of 4 on host7, and so did 3 more]")


def test_a_signal_is_named_with_the_last_lines() -> None:
    text = describe([failure_of_exit(1, 0, -11, ["one", "two"])], 2, "host7", None)
    assert "rank 1 of 2 on host7: killed by SIGSEGV" in text
    assert text.endswith("one\ntwo\n")
    assert failure_of_exit(1, 0, -11).status == 139


def test_an_error_that_explains_itself_ends_the_others_at_once() -> None:
    ending = Ending(settle_s=0.4, grace_s=0.9)
    assert (ending.due_s, ending.signal_due(1e9)) == (math.inf, None)
    ending.fail(raised(1, 10.0), 10.1)
    assert ending.signal_due(10.1) == signal.SIGTERM
    assert ending.signal_due(10.9) is None
    assert ending.due_s == pytest.approx(11.0)
    assert ending.signal_due(11.0) == signal.SIGKILL
    assert (ending.due_s, ending.signal_due(1e9)) == (math.inf, None)


def test_an_error_about_a_peer_waits_for_that_peer() -> None:
    ending = Ending(settle_s=0.4, grace_s=0.9)
    ending.fail(raised(0, 10.0, RuntimeError(CLOSED)), 10.0)
    assert ending.signal_due(10.3) is None
    ending.fail(raised(1, 10.3), 10.3)
    assert ending.signal_due(10.3) == signal.SIGTERM
    assert find_culprit(ending.failures.values()).rank == 1


def test_an_error_about_a_peer_that_stays_alone_ends_all() -> None:
    ending = Ending(settle_s=0.4, grace_s=0.9)
    ending.fail(raised(0, 10.0, RuntimeError(CLOSED)), 10.0)
    assert ending.signal_due(10.4) == signal.SIGTERM
    assert find_culprit(ending.failures.values()).rank == 0


def test_what_comes_of_being_ended_is_no_failure() -> None:
    ending = Ending()
    ending.fail(raised(0, 10.0), 10.0)
    ending.signal_due(10.0)
    ending.fail(failure_of_exit(1, int(10.1e9), -int(signal.SIGTERM)), 10.1)
    ending.fail(raised(2, 10.1), 10.1)
    ending.fail(raised(3, 9.9), 10.1)  # raised before, heard of after
    assert set(ending.failures) == {0, 3}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_crash_that_is_seen_after_its_followers_were_ended_still_counts(number: signal.Signals) -> None:
    """The kernel closes its connections at once, and reaps it when its memory and its devices are given back."""
    ending = Ending(settle_s=0.4, grace_s=0.9)
    ending.fail(raised(0, 10.0, RuntimeError(CLOSED)), 10.0)
    assert ending.signal_due(10.4) == signal.SIGTERM
    ending.fail(failure_of_exit(3, int(10.9e9), -number), 10.9)
    assert find_culprit(ending.failures.values()).rank == 3
    assert ending.due_s == pytest.approx(11.3), "the others have no more time for it"


def test_an_end_by_what_the_launcher_gave_out_is_no_crash() -> None:
    ending = Ending(settle_s=0.4, grace_s=0.9)
    ending.fail(raised(0, 10.0, RuntimeError(CLOSED)), 10.0)
    ending.signal_due(10.4)
    ending.fail(failure_of_exit(1, int(10.5e9), -signal.SIGTERM), 10.5)
    ending.fail(failure_of_exit(2, int(10.5e9), -signal.SIGABRT), 10.5)  # libraries do so where a peer is gone
    assert ending.signal_due(11.3) == signal.SIGKILL
    ending.fail(failure_of_exit(3, int(11.4e9), -signal.SIGKILL), 11.4)
    assert set(ending.failures) == {0}


def test_a_ranks_first_word_counts() -> None:
    ending = Ending()
    ending.fail(raised(0, 10.0), 10.0)
    ending.fail(failure_of_exit(0, int(10.1e9), 1), 10.0)
    assert ending.failures[0].kind == "raised"


def named(error: BaseException, launcher: str, layout: Layout | None = None) -> Callable[[], None]:
    def run() -> None:
        with errors_named(Worker(1, 1, 2, 2, "h", 1, launcher=launcher), layout or Layout(tensor=2)):  # type: ignore[arg-type]
            raise error

    return run


def test_under_torchrun_an_error_names_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        named(ValueError("wrong"), "torchrun")()
    shown = capsys.readouterr().err
    assert left.value.code == 1
    assert "rank 1 of 2 on " in shown
    assert "(layout tp2: tensor 1): ValueError: wrong" in shown
    assert shown.endswith("ValueError: wrong\n")


def test_before_the_layout_is_chosen_an_error_names_its_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        named(UserError("wrong", cure="mend it"), "torchrun", Layout())()
    (line,) = capsys.readouterr().err.splitlines()
    assert "wrong" in line and "[rank 1 of 2 on " in line and "layout" not in line


def test_under_srun_an_error_about_a_peer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        named(RuntimeError(CLOSED), "srun")()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1 ended with a peer: RuntimeError")


def reported_by(target: str) -> Failure | Returned:
    """What a rank of its own process reports of its end."""
    path = [str(Path(__file__).parent), *sys.path]
    worker, share = Worker(1, 0, 2, 1, "127.0.0.1", 1), Share(None, 1)
    spec = RankSpec(worker, share, None, f"launch_targets:{target}", (), dict(os.environ), path, ["rank"])
    process = execute_rank(spec, time.monotonic_ns())
    heard = process.reports.recv()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.poll() == 1
    return heard  # type: ignore[no-any-return]


def test_who_started_a_rank_hears_that_it_only_followed_a_peer() -> None:
    """Though it was started as by torchrun, so that its error is an exit status; other errors are no more than that."""
    heard = [reported_by(name) for name in ("without_its_peer", "with_an_error_of_its_own")]
    assert isinstance(heard[0], Failure) and heard[0].follows and heard[0].summary == "PeerError: rank 0 is gone"
    assert isinstance(heard[1], Returned) and heard[1].status == 1


def test_our_own_launcher_is_told_by_the_error_itself() -> None:
    with pytest.raises(ValueError, match="wrong"):
        named(ValueError("wrong"), "phalanx")()
