"""The session of a foreign training loop: what it saves is known only when the first step is done.

`Updates` hears from the optimizers themselves what happens to parameters between two calls of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.training_state import Table, TrainingState
from phalanx.checkpoint.restoring.restore import Wanted
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.open_session import open_saver
from phalanx.checkpoint.session.snapshot_outcomes import Event
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

_TENSORS = 16
_ELEMENTS = 4096
_LOOKS = 8


class Updates:
    """Calls `before` before each update of any of `optimizers`, and remembers whether one moved something.

    That an optimizer has stepped is no evidence: where training has converged, or all gradients are zero, a healthy
    step changes nothing. Whether it does is seen in some elements of some parameters, copied before the step and
    compared after it: in the first steps after each call of `stepped`, then ever more rarely.

    Args:
        optimizers: those of the loop.
        before: called before every update.
    """

    def __init__(self, optimizers: Iterable[Optimizer], before: Callable[[], None]) -> None:
        self._before = before
        self._steps: dict[Optimizer, int] = {}
        self._copies: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._moved: list[Tensor] = []
        self._hooks: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Listen to these instead of those before."""
        self.close()
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._on_step))
            self._hooks.append(optimizer.register_step_post_hook(self._on_stepped))

    def stepped(self) -> bool:
        """Whether, since the last call, a step of an optimizer was seen to change a parameter; waits for the device."""
        moved, self._moved = self._moved, []
        self._steps = {}
        return any(bool(each) for each in moved)

    def close(self) -> None:
        """Let the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before()
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step <= _LOOKS or step.bit_count() == 1:
            self._copies[optimizer] = [(some, some.clone()) for some in _some_elements(optimizer)]

    def _on_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        copies = self._copies.pop(optimizer, [])
        self._moved += [(some != before).any() for some, before in copies]


def _some_elements(optimizer: Optimizer) -> list[Tensor]:
    """Views of parameters that a step may change; of those with gradients, unless a closure is yet to make these."""
    parameters = [p for group in optimizer.param_groups if _can_move(group) for p in group["params"] if p.numel()]
    parameters = [p for p in parameters if p.grad is not None] or parameters
    return [_thinned(p.detach()) for p in parameters[:: -(-len(parameters) // _TENSORS) or 1]]


def _can_move(group: dict[str, Any]) -> bool:
    """A learning rate of None is one that the optimizer finds for itself."""
    rate = group.get("lr")
    return rate is None or float(rate) != 0.0


def _thinned(tensor: Tensor) -> Tensor:
    """Elements at equal distances, so many of each dimension that they are not too many in all."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kept = int(_ELEMENTS ** (1 / max(1, local.dim())))
    return local[tuple(slice(None, None, max(1, -(-size // kept))) for size in local.shape)]


class Saving:
    """All ranks make and call it alike.

    Args:
        url: of the checkpoints.
        config: when they are due, and which are kept.
        training: what is saved.
        peers: the ranks.
        about: kept in each checkpoint as its config.
        report: is given lines for people.

    Raises:
        UserError: the storage cannot be used, or no keeper can be started.
    """

    def __init__(
        self,
        url: str,
        config: CheckpointConfig,
        training: TrainingState,
        peers: Peers,
        about: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self._training, self._peers = training, peers
        layout = f"{peers.size} ranks" if peers.size > 1 else "1"
        self._session = open_saver(url, config, peers=peers, layout=layout, run_config=about, report=report)
        self._is_watched = False
        self._is_fenced = False
        self._table: Table = {}
        self._filled: list[int] = []
        self.only_in_memory = False
        """What was restored lies in the memory of hosts, and perhaps nowhere else."""

    def restore(self, wanted: Wanted) -> Restored | None:
        """See `phalanx.checkpoint.foreign.restore_objects.Restore`."""
        restored = self._session.restore(wanted, strict=False)
        self.only_in_memory = restored is not None and restored.only_in_memory
        return restored

    def fence(self) -> None:
        """Parameters and optimizer state may be changed after this."""
        self._is_fenced = True
        self._session.fence()

    def after_step(self, step: int, *, stepped: Callable[[], bool], metrics: Mapping[str, float], ending: bool) -> None:
        """Step `step` is done; with `ending` its checkpoint is durable when this returns."""
        if self._peers.size == 1 and self._filled != self._training.filled():
            self._is_watched = False  # a parameter was updated for the first time
        if not self._is_watched:
            self._watch()
        self._session.after_step(step, lambda: self._state(step), stepped=stepped, metrics=metrics, ending=ending)
        if not ending:
            self._session.ask(step + 1)

    def changed(self) -> None:
        """Names or shapes of tensors have changed."""
        self._is_watched = False

    def events(self) -> list[Event]:
        """What snapshots have cost that have ended since the last call."""
        return self._session.events()

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds; 0: unknown."""
        return self._session.expected_durable_s

    @property
    def status(self) -> str:
        """See `phalanx.checkpoint.session.background_session.Session.status`."""
        return self._session.status

    def close(self, *, clean: bool) -> None:
        """Nothing more will be saved; `clean`: training has ended well."""
        self._session.finish(clean=clean)

    def _state(self, step: int) -> dict[str, Any]:
        return self._training.plain(self._training.collect(), step)

    def _present(self) -> dict[str, Tensor]:
        """The tensors of this moment, as the ranks agreed on them.

        Raises:
            UserError: they are others.
        """
        found = self._training.collect()
        if found.table != self._table:
            names = sorted({name for name, _ in set(found.table.items()) ^ set(self._table.items())})
            problem = f"{len(names)} tensors have come, gone or changed their shapes since the first step"
            cure = "call changed() of the Checkpointer on all ranks after such a change"
            raise UserError(problem, cure=cure, field=names[0])
        return found.tensors

    def _watch(self) -> None:
        """Only now has the optimizer all of its state. A loop that does not call `fence` is not copied beside."""
        self._training.reserve(lambda room: self._peers.ask_highest(room)())
        found = self._training.collect()
        self._table, self._filled = found.table, self._training.filled()
        about = (self._present, found.shards, found.roles)
        self._session.watch(*about, overlap=None if self._is_fenced else False)
        self._is_watched = True
