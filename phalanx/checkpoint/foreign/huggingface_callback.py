"""A callback for `transformers.Trainer`, which needs transformers and accelerate."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from phalanx.checkpoint.foreign.checkpointer import Checkpointer
from phalanx.checkpoint.foreign.training_state import generator_tensors, set_generators
from phalanx.core.errors import UserError

_STATE = "trainer_state"
_ORDER = "order_of_batches"
_DEPTH = 4
_NOTHING = "nothing.safetensors"


class PhalanxCheckpointCallback(TrainerCallback):
    """Takes checkpoints of a `transformers.Trainer` and resumes it.

    ::

        callback = PhalanxCheckpointCallback("runs/mine/checkpoints", every_steps=50)
        trainer = Trainer(…, args=TrainingArguments(…, save_strategy="no"), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume())

    Saved are the model, the optimizer, the scheduler, all random number generators and the trainer's state, after each
    step for which that is due. As with the Trainer's own checkpoints, a resumed run skips the batches that it has seen,
    and goes on with the generators where they were; the order of the batches is drawn again with the generators, that
    of the sampler among them, where they were when the epoch began. One process or DistributedDataParallel; the scale
    of fp16 is not saved (bf16 needs none).

    Args:
        folder: for the checkpoints: a folder that all hosts share, or a URL that fsspec knows.
        settings: as of `phalanx.checkpoint.Checkpointer`.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._made: Checkpointer | None = None
        self._has_begun = False
        self._model: Any = None
        self._remove_resume_folder: Callable[[], Any] = lambda: None
        self._metrics: dict[str, float] = {}
        self._awaits = ""
        self._resumed_step = 0
        self._generators: dict[str, Tensor] = {}
        self._knows_order = False
        self._order = BatchOrder()
        self._trainer_state = _TrainerState()

    def resume(self) -> str | None:
        """For ``trainer.train(resume_from_checkpoint=…)``; None where there is nothing to resume from.

        The folder that this names holds the trainer's state only: from it the Trainer knows how many batches to skip.
        The weights are put in place when training begins, and the folder is removed then; else with this callback, or
        when the process ends.
        """
        self._end_interrupted_training()
        saved = self._checkpoints.look()
        state = saved.get("objects", {}).get(f"extra.{_STATE}")
        if state is None:
            return None
        self._resumed_step = int(state["global_step"])
        self._knows_order = f"extra.{_ORDER}" in saved["objects"]  # earlier versions did not save it
        self._remove_resume_folder()
        folder = Path(tempfile.mkdtemp(prefix="phalanx-resume-"))
        self._remove_resume_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        (folder / "trainer_state.json").write_text(json.dumps(state))
        if self._model is None:  # not seen where the callback was added to a Trainer that had been made
            names = [name.removeprefix("model.") for name in saved["tensors"] if name.startswith("model.")]
        else:
            names = list(self._model.state_dict())
        # Weights in parts, none of which holds any, whose index yet names them all. The Trainer takes what an index
        # names for loaded. Of weights that it misses it warns with an attribute that only the models of transformers
        # have: `'…' object has no attribute '_keys_to_ignore_on_save'`.
        save_file({}, folder / _NOTHING)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, _NOTHING)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if hasattr(self._model, "peft_config"):  # of an adapted model the Trainer reads no weights in parts
            save_file({}, folder / "model.safetensors")
        return str(folder)

    def on_init_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The Trainer is made, of this model."""
        self._model = about.get("model")

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Everything is in place: take up the checkpoint, if there is one."""
        if not args.auto_find_batch_size:  # else the Trainer reads it again with each size that it tries
            self._remove_resume_folder()
        self._end_interrupted_training()
        self._has_begun = True
        self._trainer_state.state = state
        optimizer = getattr(about["optimizer"], "optimizer", about["optimizer"])  # accelerate wraps it
        extra = {"scheduler": about["lr_scheduler"]}
        self._checkpoints.add(model=about["model"], optimizer=optimizer, extra=extra)
        if not self._resumed_step:
            return
        if self._knows_order:
            self._checkpoints.extra[_ORDER] = self._order
        step = self._checkpoints.restore()
        if step != self._resumed_step or state.global_step != step:
            problem = f"the Trainer resumes at step {state.global_step}, but the newest good state is of step {step}"
            raise UserError(problem, cure="pass resume_from_checkpoint=callback.resume(), called just before")
        self._generators = {name: tensor.clone() for name, tensor in generator_tensors().items()}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The order of an epoch's batches is drawn next: once more, if the epoch is resumed in its middle."""
        self._take_awaited(state, control)
        self._checkpoints.extra[_ORDER] = self._order
        if self._generators:
            is_whole = args.ignore_data_skip or float(state.epoch).is_integer()
            if self._knows_order:
                self._order.resume(about["train_dataloader"], is_whole=is_whole)
            if is_whole:
                self._set_generators()
        self._order.begin(about["train_dataloader"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The batches of an epoch that is resumed in its middle have been skipped."""
        self._take_awaited(state, control)
        self._set_generators()

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """A step is done; what is logged and evaluated after it belongs to its checkpoint."""
        # What the strategy "epoch" asks for is asked for when this has returned.
        ends = float(state.epoch).is_integer()
        evaluates = ends and args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        logs = ends and args.logging_strategy == "epoch"
        self._awaits = (
            "evaluate" if control.should_evaluate or evaluates else "log" if control.should_log or logs else ""
        )
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
        self._made, self._has_begun = None, False
        self._remove_resume_folder()

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

    def _end_interrupted_training(self) -> None:
        """An error has ended the training before, and the Trainer begins anew, with steps of lower numbers."""
        if self._has_begun and self._made is not None:
            self._made.close(failed=True)
            self._made = None
        self._has_begun = False

    @property
    def _checkpoints(self) -> Checkpointer:
        # Not made before it is needed: TrainingArguments starts torch.distributed, perhaps after this callback is made.
        if self._made is None:
            self._made = Checkpointer(self._folder, extra={_STATE: self._trainer_state}, **self._settings)
        return self._made

    def _set_generators(self) -> None:
        set_generators(self._generators)
        self._generators = {}


class BatchOrder:
    """From what the order of the batches of an epoch is drawn: the generators where it began, and those that the loader
    and its samplers have by themselves also where they are now."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._began: dict[str, Tensor] = {}
        self._saved: dict[str, dict[str, Tensor]] = {}

    def begin(self, loader: Any) -> None:
        """An epoch begins, and its order is drawn next."""
        self._loader = loader
        self._began = {name: tensor.clone() for name, tensor in generator_tensors().items()} | self._now()

    def resume(self, loader: Any, *, is_whole: bool) -> None:
        """An epoch that is resumed begins. Where its first batches are skipped, it is drawn as it was; else
        (`is_whole`) its order is new."""
        saved = self._saved["now" if is_whole else "began"]
        set_generators(saved)
        for name, generator in _generators(loader).items():
            if name in saved:
                generator.set_state(saved[name])

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, of both moments."""
        return {"began": self._began, "now": self._now()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `resume`."""
        self._saved = state

    def _now(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in _generators(self._loader).items()}


def _generators(part: Any, name: str = "loader") -> dict[str, torch.Generator]:
    """Those of a loader, and of its samplers and what these wrap, by name."""
    if part is None or name.count(".") > _DEPTH:
        return {}
    own = getattr(part, "generator", None)
    found = {f"{name}.generator": own} if isinstance(own, torch.Generator) else {}
    for each in ("batch_sampler", "sampler"):
        found |= _generators(getattr(part, each, None), f"{name}.{each}")
    return found


class _TrainerState:
    """The trainer's state as something that is saved; the Trainer itself takes it up again."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else dict(json.loads(json.dumps(dataclasses.asdict(self.state))))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: see `PhalanxCheckpointCallback.resume`."""
