"""A callback for `transformers.Trainer`, which needs transformers and accelerate."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from phalanx.checkpoint.foreign.api import Checkpointer
from phalanx.checkpoint.foreign.generators import generator_tensors, set_generators
from phalanx.core.errors import UserError

_STATE = "trainer_state"


class PhalanxCheckpointCallback(TrainerCallback):
    """Takes checkpoints of a `transformers.Trainer` and resumes it.

    ::

        callback = PhalanxCheckpointCallback("runs/mine/checkpoints", every_steps=50)
        trainer = Trainer(…, args=TrainingArguments(…, save_strategy="no"), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume())

    Saved are the model, the optimizer, the scheduler, all random number generators and the trainer's state, after each
    step for which that is due. As with the Trainer's own checkpoints, a resumed run skips the batches that it has seen,
    and goes on with the generators where they were. One process or DistributedDataParallel; the scale of fp16 is not
    saved (bf16 needs none).

    Args:
        folder: for the checkpoints: a folder that all hosts share, or a URL that fsspec knows.
        settings: as of `phalanx.checkpoint.Checkpointer`.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._made: Checkpointer | None = None
        self._metrics: dict[str, float] = {}
        self._awaits = ""
        self._resumed_step = 0
        self._generators: dict[str, Tensor] = {}
        self._trainer_state = _TrainerState()

    def resume(self) -> str | None:
        """For ``trainer.train(resume_from_checkpoint=…)``; None where there is nothing to resume from.

        The folder that this names holds the trainer's state only: by it the Trainer knows how many batches to skip. It
        warns of missing weights; these are put in place when training begins.
        """
        objects = self._checkpoints.look().get("objects", {})
        state = objects.get(f"extra.{_STATE}")
        if state is None:
            return None
        self._resumed_step = int(state["global_step"])
        folder = Path(tempfile.mkdtemp(prefix="phalanx-resume-"))
        (folder / "trainer_state.json").write_text(json.dumps(state))
        save_file({}, folder / "model.safetensors")
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Everything is in place: take up the checkpoint, if there is one."""
        self._trainer_state.state = state
        optimizer = getattr(about["optimizer"], "optimizer", about["optimizer"])  # accelerate wraps it
        extra = {"scheduler": about["lr_scheduler"]}
        self._checkpoints.add(model=about["model"], optimizer=optimizer, extra=extra)
        if not self._resumed_step:
            return
        step = self._checkpoints.restore()
        if step != self._resumed_step or state.global_step != step:
            problem = f"the Trainer resumes at step {state.global_step}, but the newest good state is of step {step}"
            raise UserError(problem, cure="pass resume_from_checkpoint=callback.resume(), called just before")
        self._generators = {name: tensor.clone() for name, tensor in generator_tensors().items()}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """A resumed epoch that is new draws the order of its batches next."""
        if float(state.epoch).is_integer():
            self._set_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The batches of an epoch that is resumed in its middle have been skipped."""
        self._take_awaited(state, control)
        self._set_generators()

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """A step is done; what is logged and evaluated after it belongs to its checkpoint."""
        self._awaits = "evaluate" if control.should_evaluate else "log" if control.should_log else ""
        if not self._awaits:
            self._take(state, control)

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Figures of a step are in the trainer's state."""
        if self._awaits == "log":
            self._take(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Figures for `keep_best` (``best_metric="eval_loss"``)."""
        figures = about["metrics"].items()
        self._metrics = {name: float(value) for name, value in figures if isinstance(value, int | float)}
        if self._awaits == "evaluate":
            self._take(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The last checkpoint; not of the best model, which may have taken the place of the last one."""
        self._take_awaited(state, control)
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._checkpoints.close(last=not is_best)
        self._made = None

    def _take(self, state: Any, control: Any) -> None:
        """Take a checkpoint if one is due; end where the scheduler wants that."""
        self._awaits = ""
        ending = state.global_step >= state.max_steps
        if self._checkpoints.step(state.global_step, self._metrics, ending=ending):
            control.should_training_stop = True

    def _take_awaited(self, state: Any, control: Any) -> None:
        """What was to follow the last step (a Trainer may override `log` and `evaluate`) has not come."""
        if self._awaits:
            self._take(state, control)

    @property
    def _checkpoints(self) -> Checkpointer:
        # Not made before it is needed: TrainingArguments starts torch.distributed, perhaps after this callback is made.
        if self._made is None:
            self._made = Checkpointer(self._folder, extra={_STATE: self._trainer_state}, **self._settings)
        return self._made

    def _set_generators(self) -> None:
        set_generators(self._generators)
        self._generators = {}


class _TrainerState:
    """The trainer's state as something that is saved; the Trainer itself takes it up again."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """As the Trainer writes it, made only when a checkpoint is taken."""
        if self.state is None:
            return {}
        tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.state)))
        return tree

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: see `PhalanxCheckpointCallback.resume`."""
