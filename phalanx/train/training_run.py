"""A run: its parts, its batches, its state gathered into checkpoints and put back from them, and how it computes.

The last is settled before the first step. *Attention on a GPU:* the fastest kernel that passes a trial of the run's own
shape on every rank, outside of what is compiled. It is kept in the checkpoints: a run that goes on tries the kernel
that it had first, and reports it if it has to take another. *Passes:* how many sequences go through the model at once
and what is computed again, where the config leaves that open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format import checkpoint_files as kept
from phalanx.checkpoint.format.shard_plan import Role
from phalanx.checkpoint.restoring.restore import Opened
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.blocking_session import BlockingSession
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.hardware import Peak
from phalanx.core.layout import Shard
from phalanx.data.batch import Batch
from phalanx.data.loader import Loader, LoaderState
from phalanx.data.tokens.prepared_corpus import Prepared
from phalanx.detect.corruption.digest_file import SuspectSpan, suspect_spans
from phalanx.kernels.attention import CausalKernel
from phalanx.kernels.attention_trial import find_fault
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.build import OptimizerSet
from phalanx.optim.groups import state_shards
from phalanx.optim.schedule import batch_size
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import AttentionChoice, attention_lines, kernels_to_try, title
from phalanx.train.derived.memory_fit import LEVELS, Fit, Passes, off_line
from phalanx.train.derived.resume_changes import changes_between, require_allowed
from phalanx.train.derived.run_numbers import cpu_micro_batch, destination
from phalanx.train.device import Device, on_device
from phalanx.train.evaluation import Evaluation, HeldOut, Watched, evaluate, held_out
from phalanx.train.ranks import Ranks
from phalanx.train.run_folder import Refused, RunFolder, kept_config
from phalanx.train.run_progress import RunProgress
from phalanx.train.system_errors import out_of_memory, too_big
from phalanx.train.trainer import Trainer

# In a checkpoint's state: what it is bound to besides the settings, and what is not a counter of the run.
_TEXT = "data_fingerprint"
_TOKENIZER = "tokenizer"
_TOKENS = "train_tokens"
_COSTS = "checkpoint_costs"
_ENDED = "ended"  # well, or when asked to; otherwise the attempt failed after it
# Updates after which a step has held all that it ever will: the first one begins without the optimizer's state.
_FULL_FROM = 2
_NO_MEMORY = "no memory"


Stream = Callable[..., AbstractContextManager[Iterator[tuple[Batch, LoaderState]]]]


def role_of(name: str) -> Role:
    """What a tensor of `Run.state_tensors` is to training."""
    if name.startswith("model."):
        return "trained"
    return "optimizer" if name.startswith("optim.") else "other"


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
    stream: Stream  # opens this rank's share of the global batches (`phalanx.data.loader.Loader.stream`)
    optimizer: OptimizerSet
    judge: BadStepJudge
    total_steps: int
    saver: Session | BlockingSession
    progress: RunProgress = field(default_factory=RunProgress)
    only_in_memory: bool = False  # the state that was taken up lies in the memory of hosts, and perhaps nowhere else
    # the kernel that was chosen for this run on a GPU, where one was to be chosen
    attention: AttentionChoice | None = None
    # settings that were others when the state that was taken up was kept; none that the run folder has reported
    changes: tuple[str, ...] = ()
    passes: Passes = field(default_factory=lambda: Passes(0, "none"))  # how forward and backward passes are run
    fit: Fit | None = None  # what that was chosen from; None where no memory was predicted
    note: Callable[[str], None] = lambda _: None  # shows a line to a person
    _made_with_lr: int = 0
    _updated: int = 0
    _made: int = 0

    @contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """This rank's share of the global batches from the present step to the last, prepared in the background, on its
        device."""
        warmup, full = self.config.optim.batch_warmup, self.config.train.global_batch
        remaining = (batch_size(warmup, step, full) for step in range(self.progress.step, self.total_steps))
        pinned = self.device.torch_device.type == "cuda"
        # From the progress, not from the stream: batches that were only prepared ahead are not read yet.
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
                smaller = self.fit.smaller(self.passes) if self.fit else None
                if self.ranks.size > 1:
                    # The others may be waiting for this one in a collective: all end, and the next start takes less.
                    raise self._too_big_for_one(error, smaller) from error
                if smaller is None:
                    raise too_big(self.config, progress.micro_batch, error) from error
            # Outside of the handler: the error keeps alive what the passes had made, until its block is left.
            assert self.fit is not None
            self.trainer.zero_grad()
            self.device.release_unused()
            self.note(f"out of memory, against the prediction; now {self.fit.line(smaller)}")
            self.take(smaller)

    def _too_big_for_one(self, error: BaseException, smaller: Passes | None) -> UserError:
        """Why all ranks end; keeps what this one had no memory for, if there is something smaller."""
        what = too_big(self.config, self.progress.micro_batch, error, f" of rank {self.ranks.rank}")
        if smaller is None:
            return what
        layout = str(self.config.parallel.layout)
        Refused(layout, self.passes.micro_batch, self.passes.recompute).write(self.folder)
        then = f"start again, and all take micro-batch {smaller.micro_batch}, recompute {smaller.recompute}"
        return UserError(str(what).removesuffix(f"; {what.cure}"), cure=f"{then}; or {what.cure}")

    def take(self, passes: Passes) -> None:
        """Run the passes like this from now on."""
        self.passes = passes
        self.progress.micro_batch, self.progress.recompute = passes.micro_batch, passes.recompute
        self.trainer.recompute(passes.recompute)

    def updated(self) -> None:
        """After an update: drop all gradients, and update what is derived from the weights."""
        self.trainer.zero_grad()
        self.trainer.weights_changed()
        self._updated += 1
        if self.fit is not None and self._updated == _FULL_FROM:
            measured_bytes = self.ranks.peers.ask_highest(self.device.memory_in_use_bytes())()
            if line := off_line(self.passes, measured_bytes):
                self.note(line)

    def note_update(self, lr: float) -> None:
        """An update with this learning rate was made, or skipped by the bad-step policy."""
        self._made_with_lr += lr > 0

    @property
    def has_validation(self) -> bool:
        """Whether there is held-out text."""
        return self.prepared.num_tokens("validation") > 0

    @property
    def evaluation_due(self) -> int | None:
        """Tokens to evaluate after the present step, 0 for all; None: none now, or it is done."""
        config, progress = self.config.evaluate, self.progress
        if not self.has_validation:
            return None
        if progress.step >= self.total_steps:
            done = progress.evaluated == progress.step and progress.evaluated_tokens == config.final_tokens
            return None if done else config.final_tokens
        return config.tokens if config.due(progress.step) and progress.evaluated < progress.step else None

    def evaluation_samples_left(self, step: int) -> int:
        """Held-out samples to be evaluated from `step` on."""
        if not self.has_validation:
            return 0
        config = self.config.evaluate
        every = config.every_steps
        times = (self.total_steps - 1) // every - max(step - 1, self.progress.evaluated) // every if every else 0
        return max(times, 0) * self.held_out(config.tokens).samples + self.held_out(config.final_tokens).samples

    def held_out(self, tokens: int) -> HeldOut:
        """About `tokens` held-out tokens, spread over all of them, the same in every layout; 0: all."""
        return held_out(self.loader, max(self.progress.micro_batch, 1) * self.trainer.data_ranks, tokens)

    def evaluate(self, text: HeldOut, watched: Watched) -> Evaluation:
        """What the model makes of `text`; all ranks together."""
        # A compiled model runs as it is written. Evaluation computes without gradients, for which the compiler would
        # make other kernels, in tens of seconds, that are used for next to nothing and that no step has tried.
        with torch.compiler.set_stance("force_eager") if self.config.train.compile is True else nullcontext():
            return evaluate(self.trainer.held_out_loss, text, self.prepared.tokenizer, watched)

    def evaluated(self, tokens: int, metrics: dict[str, float]) -> None:
        """The present step was evaluated: kept with its checkpoint, if there is one.

        Args:
            tokens: as `evaluation_due` gave them.
            metrics: what was found.
        """
        before, progress = self.progress.to_json(), self.progress
        progress.evaluated, progress.evaluated_tokens, progress.metrics = progress.step, tokens, metrics
        changed = {name: value for name, value in progress.to_json().items() if before[name] != value}
        self.saver.evaluated(kept.Evaluation(progress.step, metrics, changed))

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

    def state(self) -> dict[str, Any]:
        """What decides how training goes on besides `state_tensors`, as JSON values."""
        return self.progress.to_json() | self._text()

    def _text(self) -> dict[str, Any]:
        """What a state is bound to besides the settings: the tokenizer and every token of the text."""
        prepared = self.prepared
        return {_TOKENIZER: prepared.tokenizer_key, _TEXT: prepared.fingerprint, _TOKENS: prepared.num_tokens("train")}

    def watch(self) -> None:
        """Declare what checkpoints consist of; all ranks together, once everything is where it stays."""
        self.saver.watch(self.state_tensors, self.state_shards(), role_of)

    def keep(self, before: Callable[[], None], *, ending: bool) -> None:
        """At the end of a step: take a checkpoint if one is due, and when `ending`.

        Args:
            before: called on rank 0 when one is taken, so that no checkpoint knows of steps that were not written down.
        """
        progress = self.progress

        def state() -> dict[str, Any]:
            before()
            return self.state() | {_COSTS: self.saver.costs(), _ENDED: ending}

        def stepped() -> bool:
            """Whether a parameter should have changed since this was last asked; reads a counter from the device."""
            made = self._made_with_lr - int(self.judge.skipped + self.judge.untrained)
            previous, self._made = self._made, made
            return made > previous

        # Figures of an earlier step say nothing about this one, by which the best checkpoints are kept.
        metrics = progress.metrics if progress.evaluated == progress.step else {}
        self.saver.after_step(progress.step, state, stepped=stepped, metrics=metrics, ending=ending)

    def restore(self) -> Restored | None:
        """Take up the newest good state there is, if there is one, and go on where it stands.

        Raises:
            UserError: it is of another model or optimizer, was made with other text or settings, or is past the last
                step; nothing is changed then.
        """
        tensors = self.state_tensors()
        with torch.no_grad():  # in place: these are the tensors that training works on
            restored = self.saver.restore(tensors, self.state_shards(), accept=self._accept, distrust=self._suspicion())
        if restored is None:
            return None
        prefix = "bad_step."
        self.judge.load_state_tensors({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        torch.set_rng_state(tensors["rng.torch"])
        self.trainer.weights_changed()
        self.progress = RunProgress.from_json(restored.state)
        # The judge's count goes back to the beginning of the training, that of updates to this start.
        self._made = -int(self.judge.skipped)
        self.only_in_memory = restored.only_in_memory
        self.saver.recall(restored.state.get(_COSTS), failed=not restored.state.get(_ENDED, True))
        return restored

    def _suspicion(self) -> Callable[[int, int], str]:
        """Which states, by attempt and step, are from after ranks last agreed on all that they hold alike."""
        asked = self.ranks.is_first and self.config.telemetry.at_corruption == "stop"
        rows = self.ranks.peers.broadcast(suspect_spans(self.folder.path) if asked else [])
        spans = [SuspectSpan(*row) for row in rows]

        def cause(attempt: int, step: int) -> str:
            return next((why for span in spans if (why := span.cause(attempt, step))), "")

        return cause

    def _accept(self, opened: Opened) -> None:
        """Refuse a state that this run cannot go on from."""
        if opened.config and self.ranks.is_first:  # the others do not know what the run folder held
            self.changes = self._allowed_changes(opened.config)
        train = self.config.train
        if opened.step > self.total_steps:
            name, value = ("train.steps", train.steps) if train.steps else ("train.tokens", train.tokens)
            raise UserError(
                f"the run is at step {opened.step} already, and this makes {self.total_steps}",
                cure=f"set train.steps={opened.step} or more, or run.folder to a new name",
                field=name,
                value=value,
            )
        state, now = opened.state, self._text()
        titles = {_TOKENIZER: "tokenizer", _TEXT: "tokens"}
        changed = [name for name in titles if state.get(name, now[name]) != now[name]]
        if not changed:
            return
        tokens = [units.count(text[_TOKENS]) if _TOKENS in text else "?" for text in (state, now)]
        was = ", ".join(f"{titles[name]} {state[name][:8]}… -> {now[name][:8]}…" for name in changed)
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


def settle_attention(run: Run, micro_batch: int) -> bool:
    """Choose the kernel of plain causal attention for `micro_batch` sequences at once, where the run needs one.

    All ranks call it together. Returns whether every rank has memory for one layer's attention. A kernel that
    `model.attention_backend` asks for and that fails is refused.
    """
    names = kernels_to_try(run.config)
    if not names or run.device.torch_device.type != "cuda":
        return True
    if run.attention is not None and run.attention.micro_batch == micro_batch:
        return True
    length, former = run.config.data.sequence_length, run.progress.attention_kernel
    trial = run.trainer.attention_trial(micro_batch, length)
    refused: list[str] = []
    if not set(names) & set(trial.kernels):
        raise UserError(
            "sequences that are split over a ring of ranks cannot be attended to by this kernel",
            cure=f"set it to auto, or one of {', '.join(trial.kernels[:-1])}",
            field="model.attention_backend",
            value=names[0],
        )
    # Kernels that can be tried, from the one on that the run had before: what it refused then is not tried again.
    possible = [kernel for kernel in trial.kernels if kernel in names]
    for kernel in possible[possible.index(former) if former in possible else 0 :]:
        attend = None if trial.attend is None else trial.attend(kernel)
        try:
            reason = find_fault(kernel, trial.shape, run.device.torch_device, attend)
        except torch.OutOfMemoryError:
            reason = _NO_MEMORY
        # A fault on one rank is a fault of all: with other kernels ranks would round differently. No memory counts
        # before other faults, because a smaller micro-batch mends it.
        first = run.ranks.peers.lowest([reason != _NO_MEMORY, run.ranks.peers.rank, reason] if reason else None)
        if first is not None and first[2] == _NO_MEMORY:
            return False
        if first is None:
            run.trainer.use_attention(CausalKernel(kernel, length))
            changed = former if former not in ("", kernel) else ""
            run.attention = AttentionChoice(kernel, micro_batch, str(trial.shape), tuple(refused), changed)
            return True
        refused.append(f"{title(kernel)} ({first[2]})")
    raise UserError(
        f"the kernel fails its self-test with {trial.shape}: {'; '.join(refused)}",
        cure="set it to auto, which takes the fastest kernel that passes",
        field="model.attention_backend",
        value=run.config.model.attention_backend,
    )


def require_attention(run: Run) -> None:
    """Settle the kernel for the run's own micro-batch, if that is not done yet, and keep its name with the progress."""
    micro_batch = run.progress.micro_batch
    if not settle_attention(run, micro_batch):
        raise too_big(run.config, micro_batch, MemoryError("one layer's attention"))
    if run.attention is not None:
        run.progress.attention_kernel = run.attention.kernel


def described_attention(run: Run) -> str:
    """The kernels of a run on a GPU, in words; empty on a CPU."""
    if run.device.torch_device.type != "cuda":
        return ""
    lines = attention_lines(run.config, "cuda")
    if run.attention is None:
        return "; ".join(f"{line.kernel} ({line.why.partition(';')[0]})" for line in lines)
    others = [f"{line.kernel} in {line.layers}" for line in lines if "window" in line.layers]
    return "; ".join([str(run.attention), *others])


def choose_passes(run: Run, say: Callable[[str], None], *, keep: bool = False) -> None:
    """Settle `run.progress.micro_batch` and ``recompute``; on a GPU by predicted memory, which is shown.

    The choice depends on sizes and memory alone, never on a stopwatch, so that a run repeated on the same machine does
    the same arithmetic. It is one for all ranks, and is kept in the checkpoints.

    Args:
        keep: the micro-batch of `run.progress` stays, and at least as much is computed again as it records.
    """
    progress, config = run.progress, run.config
    wanted = progress.micro_batch if keep else config.train.micro_batch
    if run.device.torch_device.type == "cpu":
        share = config.train.global_batch // run.trainer.data_ranks
        asked = config.train.recompute
        micro_batch = wanted or cpu_micro_batch(share, config.data.sequence_length)
        run.take(Passes(micro_batch, "none" if asked == "auto" else asked))
        return
    refused = None
    if run.ranks.size > 1:  # what a rank of this layout had no memory for in an earlier start
        found = Refused.read(run.folder) if run.ranks.is_first else None
        read = run.ranks.peers.broadcast(asdict(found) if found else None)
        refused = Refused(**read) if read and read["layout"] == str(config.parallel.layout) else None
    if refused is not None:  # then the checkpoint's micro-batch was too large
        keep, wanted = False, config.train.micro_batch
    run.fit = Fit.of(
        config,
        run.trainer.model_config,
        config.parallel,
        run.device.precision,
        device_bytes=run.ranks.peers.lowest(run.device.memory_bytes()),
        micro_batch=wanted,
    )
    fit = run.fit

    def decide() -> list[Any]:
        choice = fit.choose()
        if keep and progress.recompute in fit.levels:
            before = fit.predicted(wanted, progress.recompute)
            choice = max(choice, before, key=lambda passes: LEVELS.index(passes.recompute))
        smaller = refused and _smaller(fit, choice, refused)
        if refused and smaller:
            say(f"a rank had no memory for micro-batch {refused.micro_batch}, recompute {refused.recompute}: now less")
        choice = smaller or choice
        return [choice.micro_batch, choice.recompute]

    run.take(fit.predicted(*run.ranks.decide(decide)))
    run.device.release_unused()
    say(fit.line(run.passes))


def _smaller(fit: Fit, choice: Passes, refused: Refused) -> Passes | None:
    """The first choice after `choice` that takes less than what was refused; None: it does itself, or none does."""
    if fit.share % refused.micro_batch or refused.recompute not in LEVELS:
        return None  # of another batch
    too_much_bytes = fit.predicted(refused.micro_batch, refused.recompute).predicted_bytes
    found: Passes | None = choice
    # By predicted bytes, since of two choices neither need be smaller in both micro-batch and recompute.
    while found is not None and found.predicted_bytes >= too_much_bytes:
        found = fit.smaller(found)
    return None if found == choice else found
