"""One writer for both modes: the same bytes on every kind of storage, and nothing is lost where a process is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from persist_helpers import Job, roles
from session_helpers import AskingPeers, asking_ranks
from storage_helpers import Place, place_fixture, s3_place_fixture, s3_server_fixture  # noqa: F401
from support.open_checkpoint import newest
from thread_ranks import ThreadPeers, succeed
from torch import Tensor

from phalanx.checkpoint import restore_checkpoint, save_checkpoint
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.keeper_contract import PersistOutcome
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.session.blocking_session import write_checkpoint
from phalanx.checkpoint.session.open_session import Saver, open_session
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.latest import claim, read_latest
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.peers import ALONE

SIZE = 2
Write = Callable[[Job, Store, int, Points], None]


def in_background(job: Job, store: Store, step: int, points: Points = NO_POINTS) -> None:
    """What the persister does for each rank, in threads of this process."""
    told: list[PersistOutcome] = []

    def work(rank: int) -> None:
        with job.task(rank, step) as task:
            own = replace(task, descriptor=os.dup(task.descriptor))  # it closes it
            PersistWork(own, points, told.append, open_storage=lambda _: store).run()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(job.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [outcome.problem for outcome in told if outcome.problem]


def inline(job: Job, store: Store, step: int, points: Points = NO_POINTS) -> None:
    """What the ranks do while training stands still."""

    def body(peers: ThreadPeers) -> str:
        return write_checkpoint(
            store,
            step,
            job.tensors(peers.rank, step),
            {"step": step},
            Meta({"c": 1}, job.attempt, layout="x"),
            roles=roles,
            points=points,
            shards=job.shards(peers.rank),
            peers=peers if job.size > 1 else ALONE,
        )

    succeed(job.size, body)


MODES: dict[str, Write] = {"background": in_background, "blocking": inline}


def written(place: Place, mode: str) -> tuple[str, dict[str, bytes]]:
    """The files of a checkpoint that ranks write in `mode`."""
    here = Place(place.kind, f"{place.url}/{mode}", place.options, place.gate)
    store = here.open()
    job = Job(Path("/nowhere"), SIZE, attempt=claim(store))
    MODES[mode](job, store, 7, NO_POINTS)
    [name] = store.names()
    latest = read_latest(store)
    assert latest is not None and (latest.step, latest.name) == (7, name)
    return name, {file: store.at(name).open(file).read() for file in store.files(name)}


def test_both_modes_write_the_same_bytes(place: Place) -> None:
    (name, background), (other, blocking) = (written(place, mode) for mode in MODES)
    assert name.partition("-")[0] == other.partition("-")[0]
    assert sorted(background) == sorted(blocking)
    assert [file for file in blocking if file.endswith(".distcp")] == ["__0_0.distcp", "__1_0.distcp"]
    for file in ("__0_0.distcp", "__1_0.distcp"):
        assert background[file] == blocking[file]
    assert said(background, "manifest.json") == said(blocking, "manifest.json")
    for rank in range(SIZE):
        assert said(background, f"part-{rank}.json") == said(blocking, f"part-{rank}.json")


def said(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON file without what differs from write to write: times, names of the write, sums of files that have these,
    and what only examining a slot tells."""
    tree = json.loads(files[name])
    for changing in ("created", "writing"):
        tree.pop(changing, None)
    for entry in tree.get("files", []):
        if not entry["name"].endswith(".distcp"):
            entry.update(sha256="", size_bytes=0)
    record = tree.get("record", {})
    for changing in ("unix_ns", "changed", "state", "state_sum"):  # the spaces of its JSON; the manifest has it too
        record.pop(changing, None)
    return dict(tree)


POINTS = (
    "persist.shard-half",
    "persist.shard-written",
    "persist.part-written",
    "persist.manifest-written",
    "persist.before-publish",
    "checkpoint.before-rename",
    "checkpoint.after-rename",
    "checkpoint.published",
    "persist.published",
    "persist.pointer-moved",
)
"""Of the one writer, into a folder."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [2, 3], ids=["same-step", "next-step"])
@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_where_the_writer_is_killed(tmp_path: Path, point: str, step: int, mode: str) -> None:
    folder = Place("folder", str(tmp_path / "checkpoints"))
    job = Job(Path(folder.url), attempt=claim(folder.open()))
    for before in (1, 2):
        MODES[mode](job, folder.open(), before, NO_POINTS)
    died = Points({point: lambda **_: os.kill(os.getpid(), signal.SIGKILL)})
    pid = os.fork()
    if pid == 0:
        try:
            MODES[mode](job, folder.open(died), step, died)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found = job.latest()
    job.require(found)
    if point == "persist.pointer-moved":
        assert found.step == step
    elif step == 3 or POINTS.index(point) < POINTS.index("checkpoint.after-rename"):
        assert found.step == 2
    else:  # what took the place of step 2 is not known to be of the attempt in charge
        assert found.step == 1
    job.attempt = claim(folder.open())  # the run is started again, and goes on
    MODES[mode](job, folder.open(), 4, NO_POINTS)
    assert job.latest().step == 4
    job.require(job.latest())
    assert not [path for path in Path(folder.url).iterdir() if path.name.startswith(".")]


class _Death(BaseException):
    """Stands for SIGKILL where the storage is a server within this process."""


@pytest.mark.campaign(but=("persist.shard-half",))
@pytest.mark.parametrize("point", ["persist.shard-half", "persist.manifest-written", "checkpoint.before-rename"])
def test_death_while_an_object_store_is_written(s3_place: Place, point: str) -> None:
    job = Job(Path("/nowhere"), attempt=claim(s3_place.open()))
    inline(job, s3_place.open(), 1)

    def die(**_: object) -> None:
        raise _Death

    points = Points({point: die})
    with pytest.raises(_Death):
        inline(job, s3_place.open(points), 2, points)
    store = s3_place.open()
    found = newest(store, pytest.fail)
    assert found is not None and found.step == 1
    job.require(found)
    job.attempt = claim(store)
    inline(job, store, 2)
    found = newest(store, pytest.fail)
    assert found is not None and found.step == 2
    job.require(found)


def saver(place: Place, peers: Any = ALONE, said: list[str] | None = None, **settings: Any) -> Saver:
    options = place.options if "://" in place.url else {}
    config = CheckpointConfig(
        mode="blocking", folder=place.url, storage_options=options, **{"every_steps": 1, "keep_last": 2, **settings}
    )
    return open_session(place.url, config, peers=peers, report=(said if said is not None else []).append)


def step_of(session: Saver, step: int, tensors: dict[str, Tensor]) -> None:
    session.ask(step)
    session.fence()
    for tensor in tensors.values():
        tensor += 1
    session.after_step(step, lambda: {"step": step}, metrics={"validation_loss": 1.0 / step})


def test_a_blocking_session_on_every_storage(place: Place) -> None:
    def body(peers: AskingPeers) -> None:
        tensors = {f"model.{peers.rank}": torch.full((5,), float(peers.rank))}
        first = saver(place, peers)
        assert first.restore(tensors) is None and not first.has_states()
        first.watch(tensors, None, lambda _: "trained")
        for step in range(1, 5):
            step_of(first, step, tensors)
        assert [event.step for event in first.events()] == [1, 2, 3, 4]
        first.evaluated(Evaluation(4, {"validation_loss": 0.1}))
        first.finish(clean=True)
        blank = {name: torch.zeros(5) for name in tensors}
        again = saver(place, peers)
        assert again.attempt == first.attempt + 1 and again.has_states()
        restored = again.restore(blank)
        assert restored is not None and restored.step == 4 and restored.state == {"step": 4}
        assert torch.equal(blank[f"model.{peers.rank}"], tensors[f"model.{peers.rank}"])

    asking_ranks(SIZE, body)
    assert len(place.open().names()) == 2, "older ones are deleted"


def test_a_leftover_of_an_earlier_attempt_is_refused(place: Place) -> None:
    tensors = {"w": torch.zeros(3)}
    leftover, said = saver(place), list[str]()
    leftover.restore(tensors)
    leftover.watch(tensors, None, lambda _: "trained")
    step_of(leftover, 1, tensors)
    later = saver(place, said=said)
    assert later.restore(tensors) is not None
    with pytest.raises(
        UserError, match=r"a later attempt of this run has begun .* must not write checkpoints any more"
    ):
        step_of(leftover, 2, tensors)
    assert len(place.open().names()) == 1


def test_one_checkpoint_into_an_object_store(s3_place: Place) -> None:
    layer = torch.nn.Linear(3, 2)
    save_checkpoint(s3_place.url, 5, model=layer, storage_options=s3_place.options)
    other = torch.nn.Linear(3, 2)
    step = restore_checkpoint(s3_place.url, model=other, report=pytest.fail, storage_options=s3_place.options)
    assert step == 5
    assert torch.equal(layer.weight, other.weight) and torch.equal(layer.bias, other.bias)
