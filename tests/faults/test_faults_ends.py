"""Ways in which a worker ends, each in a real process; and how often."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_helpers import PLAIN_LOOP, Job, incident, job_folder

from phalanx.core.errors import UserError
from phalanx.faults.fault_schedule import KINDS, Agenda, Memory, new_record, read_agenda, write_agenda
from phalanx.faults.inject import VARIABLE, install, install_from_environment
from phalanx.faults.worker_faults import (
    INJECTORS,
    RefusedError,
    Surroundings,
    is_limited,
    out_of_memory,
    own_cgroup_limits,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def folder() -> Iterator[Path]:
    with job_folder() as path:
        yield path


ENDS: list[tuple[str, dict[str, Any], int, str]] = [
    ("exception", {}, 1, "RuntimeError: DataLoader worker"),
    ("exception", {"error": "KeyError", "text": "input_ids"}, 1, "KeyError: 'input_ids'"),
    ("exit", {"status": 5}, 5, ""),
    ("signal", {}, -signal.SIGKILL, ""),
    ("signal", {"name": "SIGTERM"}, -signal.SIGTERM, ""),
    ("segfault", {}, -signal.SIGSEGV, "Segmentation fault"),
    ("abort", {}, -signal.SIGABRT, "Aborted"),
    ("out-of-memory", {"limit_mb": 64}, 1, "MemoryError"),
]


@pytest.mark.parametrize(("kind", "given", "code", "text"), ENDS, ids=[f"{k}-{c}-{len(g)}" for k, g, c, _ in ENDS])
def test_a_worker_ends_after_its_step(kind: str, given: dict[str, Any], code: int, text: str, folder: Path) -> None:
    job = Job(folder).prepare(incident(kind, **given))
    ended, out, err = job.run()
    assert ended == code
    assert out.splitlines()[-1] == "step 3"
    assert text in err
    (record,) = job.records
    assert (record.kind, record.rank, record.attempt, record.step, record.refused) == (kind, 0, 1, 3, "")


def test_another_rank_is_spared(folder: Path) -> None:
    job = Job(folder).prepare(incident("exit", 1, 3))
    assert [job.run(rank)[0] for rank in range(4)] == [0, 1, 0, 1]
    assert [record.rank for record in job.records] == [1, 3]


def test_once_stays_once_over_attempts(folder: Path) -> None:
    job = Job(folder).prepare(incident("signal"))
    assert [job.run(attempt=attempt)[0] for attempt in (1, 2)] == [-signal.SIGKILL, 0]
    assert len(job.records) == 1


def test_it_comes_back_in_every_attempt_if_so_wished(folder: Path) -> None:
    job = Job(folder).prepare(incident("exception", retrigger="attempt"))
    assert [job.run(attempt=attempt)[0] for attempt in (1, 2)] == [1, 1]
    assert [(record.attempt, record.step) for record in job.records] == [(1, 3), (2, 3)]


def test_what_belongs_to_a_host_stays_there(folder: Path) -> None:
    job = Job(folder).prepare(incident("exit", retrigger="host"))
    assert [job.run(attempt=n, PHALANX_HOST=h)[0] for n, h in ((1, "a"), (2, "a"), (3, "b"), (4, "a"))] == [1, 1, 0, 1]


def test_at_the_start_of_the_second_attempt(folder: Path) -> None:
    loop = PLAIN_LOOP.replace("    for step", "    time.sleep(0.2)\n    for step")
    job = Job(folder, loop).prepare(incident("exit", when={"phase": "recovery", "attempt": 2, "delay_s": 0.01}))
    assert job.run(attempt=1)[0] == 0
    code, out, _ = job.run(attempt=2)
    assert code == 1
    assert "done" not in out
    assert job.records[0].attempt == 2


def test_what_waits_at_the_end_of_the_script_does_not_happen(folder: Path) -> None:
    job = Job(folder).prepare(incident("exit", when={"step": 6, "delay_s": 3600}))
    code, out, _ = job.run()
    assert (code, out.splitlines()[-1], job.records) == (0, "done", [])


def test_inside_a_checkpoint(folder: Path) -> None:
    code, out, _ = Job(folder).prepare(incident("signal", when={"phase": "checkpoint", "step": 3})).run()
    assert code == -signal.SIGKILL
    assert out.splitlines()[-2:] == ["step 4", "saving"]


def test_two_incidents_of_one_rank(folder: Path) -> None:
    job = Job(folder).prepare(incident("signal"), incident("exit", status=9, when={"step": 5, "attempt": 2}))
    assert [job.run(attempt=attempt)[0] for attempt in (1, 2, 3)] == [-signal.SIGKILL, 9, 0]


def test_memory_is_not_taken_without_a_limit() -> None:
    job_order = _order_of(incident("out-of-memory"))
    if own_cgroup_limits():
        pytest.skip("this process is alone in a memory cgroup")
    with pytest.raises(RefusedError, match="no limit of memory"):
        out_of_memory(job_order, Surroundings(0, 1, lambda: 3))


def test_a_refusal_is_on_record_and_the_worker_goes_on(folder: Path) -> None:
    job = Job(folder).prepare(incident("exception", error="NoSuchError"))
    assert job.run()[0] == 0
    assert "NoSuchError" in job.records[0].refused


@pytest.mark.parametrize(
    ("limits", "limited"), [([-1], False), ([8 << 30], True), ([9 << 30], False), ([-1, 1 << 30], True), ([], False)]
)
def test_what_counts_as_a_limit(limits: list[int], limited: bool) -> None:
    assert is_limited(limits, 16 << 30) is limited


@pytest.mark.parametrize("version", [1, 2])
def test_a_memory_cgroup_counts_only_where_it_holds_nobody_else(version: int, tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "fs"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:memory:/box\n1:cpu:/other\n" if version == 1 else "0::/box\n")
    box = root / "memory" / "box" if version == 1 else root / "box"
    box.mkdir(parents=True)
    (box / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text("1048576\n")
    (box / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert own_cgroup_limits(proc, root) == [1048576]
    (box / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    assert own_cgroup_limits(proc, root) == []


def test_nothing_without_the_variable(folder: Path) -> None:
    assert install({}, 0, 1) is None
    assert install_from_environment({}) is None


def test_nothing_for_a_rank_without_incidents(folder: Path) -> None:
    Job(folder).prepare(incident("exit"))
    environ = {VARIABLE: str(folder / "notes.json"), "PHALANX_RANK": "3"}
    assert install_from_environment(environ) is None
    assert VARIABLE not in environ


@pytest.mark.parametrize("environ", [{}, {"RANK": "first"}, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "-1"}])
def test_a_rank_must_be_known(environ: dict[str, str], folder: Path) -> None:
    Job(folder).prepare(incident("exit"))
    with pytest.raises(UserError, match="start it with"):
        install_from_environment(environ | {VARIABLE: str(folder / "notes.json")})


@pytest.mark.parametrize(
    ("variables", "attempt"),
    [
        ({}, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 3),
        ({"PHALANX_ATTEMPT": "1", "TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"PHALANX_RUN_ATTEMPT": "7", "TORCHELASTIC_RESTART_COUNT": "2"}, 7),
    ],
)
def test_which_attempt_it_is(variables: dict[str, str], attempt: int, folder: Path) -> None:
    job = Job(folder).prepare(incident("log-lines", lasts={"unit": "forever"}))
    environ = {VARIABLE: str(folder / "notes.json"), "RANK": "0"} | variables
    made = install_from_environment(environ)
    assert made is not None
    made.advance(3)
    assert [record.attempt for record in job.records] == [attempt]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"seed": 1, "clock": "sun", "orders": []}', None])
def test_an_agenda_that_is_none(content: bytes | None, folder: Path) -> None:
    if content is not None:
        (folder / "notes.json").write_bytes(content)
    with pytest.raises(UserError, match=r"notes\.json"):
        read_agenda(folder / "notes.json")


def test_an_agenda_is_not_written_where_its_name_tells(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gives itself away"):
        write_agenda(Agenda(1, "calls", []), tmp_path / "fault.json")


def test_every_kind_of_a_worker_has_an_injector_and_no_other() -> None:
    assert {name for name, kind in KINDS.items() if kind.is_inside} == set(INJECTORS)


def test_only_one_of_many_claims(folder: Path) -> None:
    memory, order = Memory(folder / "notes.json"), _order_of(incident("exit"))
    claims = [memory.claim(new_record(order, 0, attempt, 3, "a"), "once") for attempt in (1, 2, 3)]
    assert claims == [True, False, False]
    assert [path.name for path in memory.folder.iterdir()] == ["0-0"]


def _order_of(one: Any) -> Any:
    from phalanx.faults.campaign import agenda_of
    from phalanx.faults.case_manifest import Manifest

    return agenda_of(Manifest(id="one", seed=1, incidents=(one,)), "calls").orders[0]
