"""A run: its parts, its batches, and its state gathered into checkpoints and put back from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format import checkpoint_files as kept
from phalanx.checkpoint.format.shard_plan import Role
from phalanx.checkpoint.restoring.restore import Opened
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session import open_session
from phalanx.checkpoint.session.open_session import Saver
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.hardware import Peak
from phalanx.core.layout import Axis, Shard
from phalanx.data.batch import Batch
from phalanx.data.loader import Loader, LoaderState
from phalanx.data.tokens.prepared_corpus import Prepared
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.build import OptimizerSet
from phalanx.optim.groups import state_shards
from phalanx.parallel.mesh import GroupCopies
from phalanx.train.batches import Stream, on_device
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import AttentionChoice
from phalanx.train.derived.memory_fit import Choice, Fit, off_line
from phalanx.train.derived.resume_changes import changes_between, require_allowed
from phalanx.train.derived.run_numbers import batch_sizes, destination
from phalanx.train.device import Device
from phalanx.train.evaluate import Evaluation, HeldOut, Watched, evaluate, held_out
from phalanx.train.ranks import Ranks
from phalanx.train.run_folder import Refused, RunFolder, kept_config
from phalanx.train.system_errors import out_of_memory, too_big
from phalanx.train.trainer import Trainer


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: finished optimizer steps, skipped updates included.
        samples: sequences read; also the loader's state, since the order of samples is a function of the seed.
        tokens: tokens read.
        train_s: wall time spent training, over all starts.
        micro_batch: sequences per forward and backward pass, kept so that a resumed run repeats the same arithmetic.
        attention_kernel: of plain causal attention on a GPU, kept for the same reason; empty where none was chosen.
        recompute: what the backward pass computes again; it changes no bit, and is kept beside the former.
        evaluated: last step after which held-out text was looked at; a clean stop leaves that to the next start.
        evaluated_tokens: how much of it was asked for then, as `evaluate.tokens` or `evaluate.final_tokens` says it.
        metrics: held-out figures of then, such as ``{"validation_loss": 3.1}``.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    train_s: float = 0.0
    micro_batch: int = 0
    attention_kernel: str = ""
    recompute: str = ""
    evaluated: int = 0
    evaluated_tokens: int = -1
    metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, samples: int, length: int) -> None:
        """Count a finished step that read `samples` sequences of `length` tokens."""
        self.step += 1
        self.samples += samples
        self.tokens += samples * length

    @property
    def metrics_here(self) -> dict[str, float]:
        """Held-out figures of this very step; none where it was not evaluated."""
        return self.metrics if self.evaluated == self.step else {}

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """The counters of a checkpoint; names this version does not know are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known})


DATA_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""Ranks along these axes hold the same blocks wherever they do not split them: one reads, all have it (MegaScale 4)."""


def open_saver(
    config: RunConfig, run_folder: Path, ranks: Ranks, report: Callable[[str], None], points: Points = NO_POINTS
) -> Saver:
    """What keeps the state of a run; all ranks together, once their groups are opened.

    Raises:
        UserError: the storage cannot be reached or written.
    """
    copies = None
    if ranks.mesh is not None:
        copies = GroupCopies(ranks.mesh.group(*DATA_AXES), DATA_AXES, ranks.mesh.device)
    return open_session.open_saver(
        destination(config, run_folder),
        config.checkpoint,
        peers=ranks.peers,
        copies=copies,
        layout=config.parallel.layout,
        run_config=config.model_dump(mode="json"),
        report=report,
        points=points,
    )


def role_of(name: str) -> Role:
    """What a tensor of `phalanx.train.training_run.Run.state_tensors` is to training."""
    if name.startswith("model."):
        return "trained"
    return "optimizer" if name.startswith("optim.") else "other"


_TEXT = "data_fingerprint"
_TOKENIZER = "tokenizer"
_TOKENS = "train_tokens"
_TOLD = {_TEXT: "tokens", _TOKENIZER: "tokenizer"}
_COSTS = "checkpoint_costs"
# Updates after which a step has held all that it ever will: the first one begins without the optimizer's state.
_FULL_FROM = 2
_ENDED = "ended"  # well, or when asked to; otherwise the attempt failed after it


@dataclass
class Run:
    """What the training loop works on; `phalanx.train.assemble` makes it."""

    config: RunConfig
    folder: RunFolder
    device: Device
    peak: Peak | None
    prepared: Prepared
    loader: Loader
    ranks: Ranks
    trainer: Trainer
    stream: Stream
    optimizer: OptimizerSet
    judge: BadStepJudge
    total_steps: int
    saver: Saver
    progress: Progress = field(default_factory=Progress)
    only_in_memory: bool = False
    """The state that was taken up lies in the memory of hosts, and perhaps nowhere else."""
    attention: AttentionChoice | None = None
    """The kernel that was chosen for this run on a GPU, where one was to be chosen."""
    changes: tuple[str, ...] = ()
    """Settings that were others when the state that was taken up was kept, where the run folder has not told them."""
    choice: Choice = field(default_factory=lambda: Choice(0, "none"))
    """How the passes are run."""
    fit: Fit | None = None
    """What that was chosen from; None where no memory was predicted."""
    note: Callable[[str], None] = lambda _: None
    """Shows a line to a person."""
    _updates: int = 0
    _updated: int = 0
    _made: int = 0

    @contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """This rank's share of the global batches from the present step to the last, prepared in the background, on its
        device."""
        remaining = itertools.islice(batch_sizes(self.config), self.progress.step, self.total_steps)
        pinned = self.device.torch_device.type == "cuda"
        state = LoaderState(self.progress.samples)
        with self.stream(state, counts=remaining, pin_memory=pinned) as stream:
            yield on_device((batch for batch, _ in stream), self.device.torch_device)

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Gradients of one global batch, of which `batch` is this rank's share; returns its mean loss, nats."""
        train, progress = self.config.train, self.progress
        while True:
            try:
                return self.trainer.accumulate_gradients(
                    batch, micro_batch=progress.micro_batch, seed=train.seed, step=progress.step
                )
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                smaller = self.fit.smaller(self.choice) if self.fit else None
                if self.ranks.size > 1:
                    # The others may be waiting for this one in a collective: all end.
                    raise self._too_big_for_one(error, smaller) from error
                if smaller is None:
                    raise too_big(self.config, progress.micro_batch, error) from error
            # Only here, where the error no longer holds what the passes had made.
            self._take_smaller(smaller)

    def _too_big_for_one(self, error: BaseException, smaller: Choice | None) -> UserError:
        """Why all ranks end; keeps what this one had no memory for, if there is something smaller."""
        what = too_big(self.config, self.progress.micro_batch, error, f" of rank {self.ranks.rank}")
        if smaller is None:
            return what
        layout = str(self.config.parallel.layout)
        Refused(layout, self.choice.micro_batch, self.choice.recompute).write(self.folder)
        then = f"start again, and all take micro-batch {smaller.micro_batch}, recompute {smaller.recompute}"
        return UserError(str(what).removesuffix(f"; {what.cure}"), cure=f"{then}; or {what.cure}")

    def _take_smaller(self, smaller: Choice) -> None:
        assert self.fit is not None
        self.trainer.zero_grad()
        self.device.release_unused()
        self.note(f"out of memory, against the prediction; now {self.fit.line(smaller)}")
        self.take(smaller)

    def take(self, choice: Choice) -> None:
        """Run the passes like this from now on."""
        self.choice = choice
        self.progress.micro_batch, self.progress.recompute = choice.micro_batch, choice.recompute
        self.trainer.recompute(choice.recompute)

    def updated(self) -> None:
        """After an update: let go of all gradients, and make the new weights known."""
        self.trainer.zero_grad()
        self.trainer.weights_changed()
        self._updated += 1
        if self.fit is not None and self._updated == _FULL_FROM:
            measured_bytes = self.ranks.peers.ask_highest(self.device.memory_in_use_bytes())()
            if said := off_line(self.choice, measured_bytes):
                self.note(said)

    @property
    def evaluation_due(self) -> int | None:
        """Tokens to look at after the present step, 0 for all; None: none now, or it is done."""
        config, progress = self.config.evaluate, self.progress
        if not self.has_validation:
            return None
        if progress.step >= self.total_steps:
            done = progress.evaluated == progress.step and progress.evaluated_tokens == config.final_tokens
            return None if done else config.final_tokens
        return config.tokens if config.due(progress.step) and progress.evaluated < progress.step else None

    def held_out(self, tokens: int) -> HeldOut:
        """About `tokens` held-out tokens, spread over all of them, the same in every layout; 0: all."""
        return held_out(self.loader, max(self.progress.micro_batch, 1) * self.trainer.data_ranks, tokens)

    def as_written(self) -> AbstractContextManager[object]:
        """Within it a compiled model runs as it is written.

        Evaluation and sampling compute without gradients, and sampling in ever new shapes: for each, the compiler would
        make other kernels, in tens of seconds, that are used for next to nothing and that no step has tried.
        """
        return torch.compiler.set_stance("force_eager") if self.config.train.compile is True else nullcontext()

    def evaluate(self, text: HeldOut, watched: Watched) -> Evaluation:
        """What the model makes of `text`, as it is written; all ranks together."""
        with self.as_written():
            return evaluate(self.trainer.held_out_loss, text, self.prepared.tokenizer, watched)

    def samples_of(self, batch: Batch) -> int:
        """Samples of the global batch of which `batch` is this rank's share."""
        return len(batch) * self.trainer.data_ranks

    @property
    def has_validation(self) -> bool:
        """Whether there is held-out text."""
        return self.prepared.num_tokens("validation") > 0

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that decides how training goes on, by name: weights, optimizer, bad-step history, RNG."""
        return {
            **{f"model.{name}": parameter.detach() for name, parameter in self.trainer.parameters.items()},
            **{f"optim.{name}": tensor for name, tensor in self.optimizer.state_tensors().items()},
            **{f"bad_step.{name}": tensor for name, tensor in self.judge.state_tensors().items()},
            "rng.torch": torch.get_rng_state(),
        }

    def state_shards(self) -> dict[str, Shard]:
        """What part of the whole those of `state_tensors` are that may be spread over ranks."""
        weights = self.trainer.shards
        state = state_shards(self.optimizer.state_tensors(), weights)
        return {f"model.{n}": s for n, s in weights.items()} | {f"optim.{n}": s for n, s in state.items()}

    def watch(self) -> None:
        """Say what checkpoints consist of; all ranks together, once everything is where it stays."""
        self.saver.watch(self.state_tensors, self.state_shards(), role_of)

    def keep(self, before: Callable[[], None], *, ending: bool) -> None:
        """At the end of a step: take a checkpoint if one is due, and when `ending`.

        Args:
            before: called on rank 0 when one is taken, so that no checkpoint knows of steps that were not written down.
        """

        def state() -> dict[str, Any]:
            before()
            return self.state() | {_COSTS: self.saver.costs(), _ENDED: ending}

        self.saver.after_step(
            self.progress.step, state, stepped=self._has_stepped, metrics=self.progress.metrics_here, ending=ending
        )

    def evaluated(self, tokens: int, metrics: dict[str, float]) -> None:
        """Held-out text was looked at after the present step: kept with its checkpoint, if there is one.

        Args:
            tokens: as `evaluation_due` said.
            metrics: what was found.
        """
        before, progress = self.progress.to_json(), self.progress
        progress.evaluated, progress.evaluated_tokens, progress.metrics = progress.step, tokens, metrics
        changed = {name: value for name, value in progress.to_json().items() if before[name] != value}
        self.saver.evaluated(kept.Evaluation(progress.step, metrics, changed))

    def note_update(self, lr: float) -> None:
        """An update with this learning rate was made, or skipped by the bad-step policy."""
        self._updates += lr > 0

    def _has_stepped(self) -> bool:
        """Whether a parameter should have changed since this was last asked; reads a counter from the device."""
        made = self._updates - int(self.judge.skipped)
        before, self._made = self._made, made
        return made > before

    def state(self) -> dict[str, Any]:
        """What decides how training goes on besides `state_tensors`, as JSON values."""
        return self.progress.to_json() | self._text()

    def _text(self) -> dict[str, Any]:
        """What a state is bound to besides the settings: the tokenizer and every token of the text."""
        prepared = self.prepared
        return {_TOKENIZER: prepared.tokenizer_key, _TEXT: prepared.fingerprint, _TOKENS: prepared.num_tokens("train")}

    def restore(self) -> Restored | None:
        """Take up the newest good state there is, if there is one, and go on where it stands.

        Raises:
            UserError: it is of another model or optimizer, was made with other text or settings, or is past the last
                step; nothing is changed then.
        """
        tensors = self.state_tensors()
        with torch.no_grad():  # in place: these are the tensors that training works on
            restored = self.saver.restore(tensors, self.state_shards(), accept=self._accept)
        if restored is None:
            return None
        prefix = "bad_step."
        self.judge.load_state_tensors({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        torch.set_rng_state(tensors["rng.torch"])
        self.trainer.weights_changed()
        self.progress = Progress.from_json(restored.state)
        self._made = -int(self.judge.skipped)
        self.only_in_memory = restored.only_in_memory
        self.saver.recall(restored.state.get(_COSTS), failed=not restored.state.get(_ENDED, True))
        return restored

    def _accept(self, opened: Opened) -> None:
        if opened.config and self.ranks.is_first:  # the others do not know what the run folder held
            self.changes = self._allowed_changes(opened.config)
        self._require_steps_left(opened.step)
        state, now = opened.state, self._text()
        changed = [name for name in (_TOKENIZER, _TEXT) if state.get(name, now[name]) != now[name]]
        if not changed:
            return
        tokens = [units.count(text[_TOKENS]) if _TOKENS in text else "?" for text in (state, now)]
        was = ", ".join(f"{_TOLD[name]} {state[name][:8]}… -> {now[name][:8]}…" for name in changed)
        cure = f"put the former text back, or set run.folder to a new name, with train.init_from={self.folder.path} "
        cure += "to begin with its weights"
        if self.config.data.tokenizer.kind in ("bpe", "file"):
            cure += f" and data.tokenizer={{kind='file',path='{self.folder.tokenizer}'}} to keep what its ids mean"
        raise UserError(
            f"the text, or the tokenizer made of it, is not what it was at step {state.get('step')} "
            f"({was}; {tokens[0]} -> {tokens[1]} tokens to train on)",
            cure=cure,
            field="data.sources",
        )

    def _allowed_changes(self, kept: Mapping[str, Any]) -> tuple[str, ...]:
        """What differs from the config of a state, whatever has become of the run folder."""
        config, path = self.config, self.folder.path
        given, url = config.checkpoint.folder, destination(config, path)
        where = {"field": "checkpoint.folder", "value": given} if given else {"field": "run.folder", "value": str(path)}
        if config.run.resume == "never":
            cure = "choose another place, or set run.resume=same to go on with it"
            raise UserError("already holds the checkpoints of a run", cure=cure, **where)
        changes = changes_between(kept_config(kept, f"the newest checkpoint in {url}"), config)
        former = self.folder.former
        if former is not None and destination(former, path) == url:
            # What only a step behind this state was allowed, perhaps by a start before this one, is in config.json.
            changes = [change for change in changes if change.bound]
        elsewhere = "set run.folder to a new name" + (" and checkpoint.folder to another place" if given else "")
        return require_allowed(changes, config.run.resume, has_steps=True, elsewhere=elsewhere, **where)

    def _require_steps_left(self, step: int) -> None:
        if step > self.total_steps:
            train = self.config.train
            name, value = ("train.steps", train.steps) if train.steps else ("train.tokens", train.tokens)
            raise UserError(
                f"the run is at step {step} already, and this makes {self.total_steps}",
                cure=f"set train.steps={step} or more, or run.folder to a new name",
                field=name,
                value=value,
            )
