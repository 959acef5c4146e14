"""Two real training steps of a layout, as `phalanx train` does them, with the bytes of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import PrefixStore

from phalanx.data.batch import Batch
from phalanx.launch.environment import Worker
from phalanx.model.decoder import Decoder
from phalanx.model.shapes import parameter_table
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.parallel.engine import Engine
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.pipeline_executor import AutogradStage, _Mail
from phalanx.train.assemble import build_trainer
from phalanx.train.device import Device
from phalanx.train.ranks import Ranks
from phalanx.train.trainer import LocalTrainer, Trainer
from support.chunk_memory import memory_bytes, wait_for_weights
from support.memory.layouts import VOCABULARY, Layout
from support.memory.tracker import LiveBytes, bytes_of
from support.processes import from_processes, hand_back, meet

TIMEOUT_S = 300.0
_SETTLING_S = 0.02
_CPU = torch.device("cpu")


@dataclass
class Seen:
    """Bytes of one rank in its second step.

    Attributes:
        activations: and what else is kept between passes and is none of the others; most at the end of a pass.
        loss_head: what the last norm, the logits and the loss left when their forward pass was done.
        communication: of pipeline messages, at the end of a pass.
        peak: of everything, after any operator of forward and backward passes.
    """

    rank: int
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss_head: int = 0
    communication: int = 0
    peak: int = 0


@dataclass
class _Probe:
    """Weighs a rank at the end of every pass that leaves something behind."""

    live: LiveBytes
    trainer: Trainer
    optimizer: OptimizerSet
    seen: Seen
    mails: list[_Mail] = field(default_factory=list)
    standing: int = 0
    before_head: int = 0

    def begin_head(self) -> None:
        """The last norm begins."""
        self._reduced()
        self.before_head = self._settled()

    def note_peak(self) -> None:
        """All passes are done."""
        self.seen.peak = self.live.peak - self.standing

    def weigh(self, made: Any) -> None:
        """Most of each kind so far; `made` is about to be sent."""
        reducing = self._reduced()
        messages = self._under_way(made)
        parameters, gradients, optimizer = self.parameters(), self.gradients(), self.state()
        now = self._settled()
        head = now - self.before_head if self.before_head else 0
        found = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": now - parameters - gradients - optimizer - messages - self.standing - head,
            "loss_head": head,
            "communication": messages + reducing,
        }
        for name, size in found.items():
            setattr(self.seen, name, max(getattr(self.seen, name), size))
        self.before_head = 0

    def _reduced(self) -> int:
        """Ends the reductions that are on their way; gives what they held."""
        before = self.live.now
        if isinstance(self.trainer, Engine):
            for chunk in self.trainer.chunks:
                chunk._reductions.finish()
        return before - self._settled()

    def _settled(self) -> int:
        """Bytes that are alive once gloo's threads have let go of what they were done with."""
        least, since_s = self.live.now, time.monotonic()
        while isinstance(self.trainer, Engine) and time.monotonic() - since_s < _SETTLING_S:
            time.sleep(_SETTLING_S / 10)
            if (now := self.live.now) < least:
                least, since_s = now, time.monotonic()
        return least

    def parameters(self) -> int:
        """Weights and masters."""
        if isinstance(self.trainer, Engine):
            return sum(memory_bytes(chunk).parameters for chunk in self.trainer.chunks)
        return bytes_of(_model(self.trainer).parameters())

    def gradients(self) -> int:
        """Whole ones and sums."""
        if isinstance(self.trainer, Engine):
            return sum(memory_bytes(chunk).gradients for chunk in self.trainer.chunks)
        return bytes_of(p.grad for p in _model(self.trainer).parameters())

    def state(self) -> int:
        """Of the optimizer."""
        return bytes_of([*self.optimizer.state_tensors().values(), *_buffers(self.optimizer)])

    def norms(self) -> list[torch.nn.Module]:
        """The last norm, where it is here."""
        if not isinstance(self.trainer, Engine):
            return [_model(self.trainer).norm]
        parts = [held.stage.part for held in self.trainer._held.values()]
        return [part.norm for part in parts if part.norm is not None]

    def _under_way(self, made: Any) -> int:
        tensors = [made] if isinstance(made, torch.Tensor) and made.numel() > 1 else []
        for mail in self.mails:
            tensors += [x for x, _ in (*mail._expected.values(), *mail._sent.values())]
        return bytes_of(tensors)


def _model(trainer: Trainer) -> Decoder:
    assert isinstance(trainer, LocalTrainer)
    return trainer.model


def _buffers(optimizer: OptimizerSet) -> list[torch.Tensor]:
    """Memory that CAME works in, which it keeps."""
    return [b for o in optimizer._optimizers.values() for b in getattr(o, "_buffers", {}).values()]


def one_process(layout: Layout) -> list[Seen]:
    """A run of a single rank, here."""
    return [_run(layout, Ranks())]


def several_processes(layouts: Sequence[Layout]) -> list[list[Seen]]:
    """Runs of as many ranks each, by processes that are started once for all.

    Raises:
        RuntimeError: a rank failed; it has said why.
    """
    by_rank = from_processes(layouts[0].ranks, __name__, layouts)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def process_rank(worker: Worker, layouts: Sequence[Layout], folder: str) -> None:
    """One of the processes."""
    store = meet(worker, TIMEOUT_S)
    seen = []
    for number, layout in enumerate(layouts):
        axes = layout.config.parallel.layout
        mesh = Mesh(axes, worker.rank, PrefixStore(str(number), store), _CPU, TIMEOUT_S, TIMEOUT_S)
        seen.append(_run(layout, Ranks(mesh=mesh)))
        mesh.named("end", range(worker.world_size)).barrier()
        mesh.close()
    hand_back(worker, folder, seen)


def _run(layout: Layout, ranks: Ranks) -> Seen:
    """Two steps; the first one makes what stays."""
    config = layout.config
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    live = LiveBytes(resized=config.parallel.zero == 3)
    with live:
        trainer = build_trainer(config, VOCABULARY, Device(_CPU, "cpu", dtype, 1), ranks)
        optimizer = build_optimizer(
            config.optim,
            trainer.parameters,
            reduction=trainer.reduction,
            gradient_norm=trainer.gradient_norm,
            whole_shapes={name: p.shape for name, p in parameter_table(trainer.model_config).items()},
        )
        batch = _batch(layout, trainer)
        _step(layout, trainer, optimizer, batch, 0)
        if isinstance(trainer, Engine):  # gloo has copies of weights that are on their way
            for chunk in trainer.chunks:
                wait_for_weights(chunk)
        seen = Seen(0 if ranks.mesh is None else ranks.mesh.rank)
        probe = _Probe(live, trainer, optimizer, seen)
        probe.standing = live.now - probe.parameters() - probe.gradients() - probe.state()
        with _weighed(probe):
            live.forget_peak()
            _step(layout, trainer, optimizer, batch, 1, passed=probe.note_peak)
    return seen


@contextmanager
def _weighed(probe: _Probe) -> Iterator[None]:
    """Has the rank weighed at the end of passes, and before its last norm."""
    with ExitStack() as stack:
        for owner, name in ((AutogradStage, "forward"), (AutogradStage, "backward_input"), (Decoder, "loss")):
            stack.enter_context(patch.object(owner, name, _then(getattr(owner, name), probe.weigh)))
        stack.enter_context(patch.object(_Mail, "__init__", _then_self(_Mail.__init__, probe.mails.append)))
        for norm in probe.norms():
            stack.callback(norm.register_forward_pre_hook(lambda *_: probe.begin_head()).remove)
        yield


def _then(function: Callable[..., Any], weigh: Callable[[Any], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        weigh(out)
        return out

    return both


def _then_self(function: Callable[..., None], take: Callable[[Any], None]) -> Callable[..., None]:
    def both(made: Any, *args: Any, **kwargs: Any) -> None:
        function(made, *args, **kwargs)
        take(made)

    return both


def _step(
    layout: Layout,
    trainer: Trainer,
    optimizer: OptimizerSet,
    batch: Batch,
    step: int,
    passed: Callable[[], None] = lambda: None,
) -> None:
    """As `phalanx.train.loop.train` does one."""
    micro_batch = layout.config.train.micro_batch
    trainer.accumulate_gradients(batch, micro_batch=micro_batch, seed=0, step=step)
    passed()
    _, scale = optimizer.clip()
    optimizer.set_lr(1.0)
    optimizer.step(grad_scale=scale)
    trainer.zero_grad()
    trainer.weights_changed()


def _batch(layout: Layout, trainer: Trainer) -> Batch:
    config = layout.config
    rows = config.train.global_batch // trainer.data_ranks
    tokens = torch.randint(VOCABULARY, (rows, layout.sequence + 1))
    weights = torch.ones(rows, layout.sequence)
    borders = torch.rand(rows, layout.sequence) < 4 / layout.sequence
    documents = borders.cumsum(1).int() if layout.documents else None
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, documents, torch.arange(rows))
