"""How many files a reader has to open to follow one thing through the house: those whose functions really run.

Each walk of docs/architecture.md that has a bar is driven in this process, and counted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from driver_helpers import Town, running
from msgspec.msgpack import encode
from train_helpers import begin, configured

import phalanx
from phalanx.api.planning import cluster_of, plan_of
from phalanx.core.config import load
from phalanx.ipc.codec import MessageDecoder
from phalanx.plan.predict import predict
from phalanx.run import messages
from phalanx.run.decide.policy import Job
from phalanx.run.wire import message_frames
from phalanx.train.config import RunConfig

HOUSE = Path(phalanx.__file__).parent


def files_passed(walk: Callable[[], None]) -> list[str]:
    """Files of the package whose functions run; bodies of modules and classes, and generated code, do not count."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return sorted(str(Path(name).relative_to(HOUSE)) for name in found if Path(name).is_relative_to(HOUSE))


def test_config_to_step_time() -> None:
    """From the file of a run, whose layout is open, to the seconds of its step on 64 GPUs."""
    steps_s: list[float] = []

    def walk() -> None:
        config = load(RunConfig, HOUSE.parent / "configs/plan/gpt-175b.toml", ("parallel.devices=64",)).value
        cluster, _ = cluster_of(config, "h100_400g", None)
        planned = plan_of(config, cluster)
        steps_s.append(predict(planned.job, planned.strategy, cluster).step_s)

    files = files_passed(walk)
    assert steps_s[0] > 0
    assert {"api/planning.py", "parallel/layout_choice.py", "plan/memory/rank.py", "plan/predict.py"} <= set(files)
    assert len(files) <= 35, "\n".join(files)


def test_heartbeat_to_restart(tmp_path: Path) -> None:
    """The driver's side, from the bytes of a frame to the messages that start the next attempt.

    The connection, the journal and the clock are passed in. A tick is within it, so judges look at the ranks too.
    """
    town = Town(tmp_path, ["a", "b"], Job("j", hosts=2, workers_per_host=2))
    for host in town.hosts.values():
        host.boot = f"boot of {host.name}"
    town.begin()
    town.until(running(1))
    town.go_on(20)
    town.journal.append_all = lambda drafts: 0  # type: ignore[method-assign, assignment]
    frames = MessageDecoder(message_frames.FromExecutorFrame)
    beats = [(host.name, encode(host.beat(town.now_s))) for host in town.hosts.values()]
    town.hosts["b"].ranks = [3]
    first = messages.WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL")
    kept: list[tuple[str, messages.FromExecutor]] = [("b", first)]

    def walk() -> None:
        town.driver.on_heartbeats([(host, frames.decode(content)) for host, content in beats])  # type: ignore[misc]
        town.driver.tick()
        while kept:
            host, message = kept.pop(0)
            frame = frames.decode(encode(message_frames.Kept(1, message)))  # type: ignore[arg-type]
            town.driver.on_message(host, frame.message)  # type: ignore[attr-defined]
            kept.extend(town.inbox)
            town.inbox.clear()

    try:
        files = files_passed(walk)
    finally:
        town.journal.close()
    starts = [message.attempt for _, message in town.sent(messages.Start) if isinstance(message, messages.Start)]
    assert starts == [1, 2, 1, 2]
    assert len(files) <= 15, "\n".join(files)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tokens_to_loss(tmp_path: Path, precision: str) -> None:
    """A step of one process, from the loader's batch to the loss and back; the second one, as the first sets things up.

    With so many logits that the loss takes them in chunks, as in any real run.
    """
    sizes = {"model.vocab_size": 4096, "data.sequence_length": 64, "train.global_batch": 16, "train.micro_batch": 16}
    run = begin(configured(tmp_path, sizes | {"train.precision": precision}))
    try:
        with run.batches() as batches:
            run.accumulate_gradients(next(batches))
            run.updated()
            batch = next(batches)
            files = files_passed(lambda: run.accumulate_gradients(batch) and None)
    finally:
        run.saver.finish(clean=False)
        run.folder.release()
    assert {"train/trainer.py", "model/decoder.py", "kernels/loss.py"} <= set(files)
    assert len(files) <= 14, "\n".join(files)
