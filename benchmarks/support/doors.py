"""Every door through which a checkpoint comes back: what each makes, and whether what it gives is right.

A door makes checkpoints of steps 4 and 8, in the background as runs do, so that every file is there that a checkpoint
can have. `harm` spoils one; `Door.resume` then has to come back to step 8, or to 4 where that is damaged, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.checkpoint import Checkpointer, restore_checkpoint
from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.checkpoint.storage.checkpoint_store import step_of
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.config import load
from phalanx.train.assemble import assemble
from phalanx.train.config import RunConfig
from phalanx.train.loop import train
from phalanx.train.run_folder import open_for_training
from phalanx.train.training_run import Run
from support import tiny
from support.open_checkpoint import open_checkpoint

STEPS = (4, 8)
SPARED = (".metadata", "SHA256SUMS", "part-0.json", "evaluation.json")
"""Files of the newest checkpoint from which nothing is restored: damage to them is said, and step 8 is used."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Door:
    """One way in.

    Attributes:
        name: of it.
        make: makes what is resumed, in a folder.
        checkpoints: where in that folder.
        resume: gives the step that was gone on from, having seen that all is as it was there.
    """

    name: str
    make: Callable[[Path], None]
    checkpoints: str
    resume: Callable[[Path, Say], int]

    def harmed(self, pristine: Path, folder: Path, harm: Callable[[Path], str]) -> tuple[str, int, list[str]]:
        """Spoil a copy of `pristine`, made at `folder`, and come back: the file, the step and what was said."""
        shutil.copytree(pristine, folder)
        try:
            file, said = harm(folder / self.checkpoints), []  # type: tuple[str, list[str]]
            return file, self.resume(folder, said.append), said
        finally:
            shutil.rmtree(folder)


def newest_files(checkpoints: Path) -> list[Path]:
    """Those of the checkpoint of step 8, and the entry of the pointer that names it."""
    files = [path for path in sorted((checkpoints / f"step-{STEPS[1]:08d}").iterdir()) if path.is_file()]
    return [*files, max(checkpoints.glob("latest-*.json"))]


def flip(checkpoints: Path, chance: random.Random, file: int | None = None) -> str:
    """Change one bit of the newest checkpoint: of any byte of all its files, or of one file; the name of that file."""
    files = newest_files(checkpoints)
    path = files[file % len(files)] if file is not None else chance.choices(files, [p.stat().st_size for p in files])[0]
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return path.name


def expected_step(file: str) -> int:
    """Where a run comes back to whose `file` of the newest checkpoint is damaged."""
    return STEPS[1] if file in SPARED else STEPS[0]


@contextmanager
def a_keeper_at(address: Path) -> Iterator[None]:
    """All runs of this process have the keeper of that address, which ends with the context."""
    before = os.environ.get("PHALANX_KEEPER")
    os.environ["PHALANX_KEEPER"] = str(address)
    try:
        yield
    finally:
        end_keeper(address)
        if before is None:
            del os.environ["PHALANX_KEEPER"]
        else:
            os.environ["PHALANX_KEEPER"] = before


# A loop of somebody else's


class Loop:
    """A model, an optimizer and a plain value, the same in every process until it trains."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.extra: dict[str, Any] = {"position": -1}

    @property
    def given(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def train(self, step: int) -> None:
        self.model(torch.rand(6, 9)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.extra["position"] = step

    def tensors(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *states, torch.get_rng_state()]

    def require_step(self, step: int) -> int:
        """All is as it was at `step` of a loop that nobody disturbed."""
        if not step:
            return 0
        found, position = [tensor.detach().clone() for tensor in self.tensors()], self.extra["position"]
        other = Loop(0)
        for number in range(1, step + 1):
            other.train(number)
        expected = other.tensors()
        assert position == step and len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"step {step} has other bits"
        return step


def _make_loop(folder: Path) -> None:
    loop = Loop(0)
    with Checkpointer(folder / "c", **loop.given, every_steps=STEPS[0], wait=True) as checkpoints:
        for step in range(1, STEPS[1] + 1):
            loop.train(step)
            checkpoints.step(step)


def _resume_loop(folder: Path, say: Say) -> int:
    loop = Loop(1)
    checkpoints = Checkpointer(folder / "c", **loop.given, report=say)
    try:
        return loop.require_step(checkpoints.restore())
    finally:
        checkpoints.close(failed=True)


def _resume_blank(folder: Path, say: Say) -> int:
    checkpoints = Checkpointer(folder / "c", mode="blocking", report=say)
    with checkpoints.blank_weights():
        loop = Loop(1)
    checkpoints.add(**loop.given)
    loop.extra = checkpoints.extra
    try:
        return loop.require_step(checkpoints.restore())
    finally:
        checkpoints.close(failed=True)


def _resume_alone(folder: Path, say: Say) -> int:
    loop = Loop(1)
    return loop.require_step(restore_checkpoint(folder / "c", **loop.given, report=say))


# The Hugging Face Trainer


def _trained(folder: Path, say: Say, steps: int, **settings: Any) -> tuple[int, list[Tensor]]:
    """A `transformers.Trainer` trains to `steps`: where it began, and the weights at its end."""
    from transformers import Trainer, TrainingArguments

    from phalanx.checkpoint.foreign.huggingface_callback import PhalanxCheckpointCallback

    torch.manual_seed(3)
    model = _Regression()
    rows = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.rand(40, 9, generator=torch.Generator())]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
        logging_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        lr_scheduler_type="constant",
    )  # fmt: skip
    callback = PhalanxCheckpointCallback(folder / "c", report=say, **settings)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume())
    return callback._resumed_step, [parameter.detach().clone() for parameter in model.parameters()]


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 17), nn.Dropout(0.1), nn.Linear(17, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def _make_trainer(folder: Path) -> None:
    _trained(folder, print, STEPS[1], every_steps=STEPS[0], wait=True)
    (folder / "whole").mkdir()
    _, weights = _trained(folder / "whole", print, STEPS[1] + 2, mode="blocking", every_steps=100)
    torch.save(weights, folder / "weights.pt")


def _resume_trainer(folder: Path, say: Say) -> int:
    step, weights = _trained(folder, say, STEPS[1] + 2, mode="blocking", every_steps=100)
    expected = torch.load(folder / "weights.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True)), f"from step {step} to other weights"
    return step


# phalanx train


def _configured(folder: Path, data: Path) -> RunConfig:
    settings = tiny.SETTINGS | {
        "train.steps": STEPS[1], "checkpoint.every_steps": STEPS[0], "checkpoint.wait": True, "run.resume": "same",
        "train.garbage_collect_steps": 0,
    }  # fmt: skip
    return load(RunConfig, None, tiny.overrides(data, folder / "run", settings)).value


def _make_run(folder: Path) -> None:
    import io

    from rich.console import Console

    from phalanx.telemetry.loggers import open_loggers
    from phalanx.train.reports.display import make_display
    from phalanx.train.session import make_reporter

    (folder / "home").write_text(str(folder))
    run = _assembled(folder, lambda _: None)
    logger = open_loggers(run.config.logging, run.folder.path, 0)
    try:
        train(run, make_reporter(run, make_display(Console(file=io.StringIO(), width=200)), logger))
    finally:
        logger.close()
        run.folder.release()
    for step in STEPS:
        torch.save(open_checkpoint(folder / "run" / "checkpoints" / f"step-{step:08d}").read(), folder / f"{step}.pt")


def _assembled(folder: Path, say: Say) -> Run:
    config = _configured(folder, Path((folder / "home").read_text()))
    opened = open_for_training(config, folder / "run")
    try:
        return assemble(config, opened, say)
    except BaseException:
        opened.release()
        raise


def _resume_run(folder: Path, say: Say) -> int:
    run = _assembled(folder, say)
    try:
        found, step = run.state_tensors(), run.progress.step
        if not step:
            return 0
        expected = torch.load(folder / f"{step}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        wrong = [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor)]
        assert not wrong, f"step {step} has other bits: {wrong}"
        return step
    finally:
        run.saver.finish(clean=False)
        run.folder.release()


DOORS = {
    door.name: door
    for door in (
        Door("Checkpointer.restore", _make_loop, "c", _resume_loop),
        Door("blank_weights", _make_loop, "c", _resume_blank),
        Door("restore_checkpoint", _make_loop, "c", _resume_alone),
        Door("Trainer", _make_trainer, "c", _resume_trainer),
        Door("phalanx train", _make_run, "run/checkpoints", _resume_run),
    )
}


def made(door: Door, folder: Path, address: Path) -> Path:
    """What the door resumes, whole: step 8 is gone on from. Nothing of it is in the memory of a keeper."""
    folder.mkdir(parents=True)
    door.make(folder)
    end_keeper(address)
    assert [step_of(name) for name in open_store(folder / door.checkpoints).names()] == [*reversed(STEPS)]
    return folder
