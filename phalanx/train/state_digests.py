"""Digests of the state of due steps: compared between ranks that hold copies, and written into the run's folder.

Gradients are taken after their reduction and before the update, weights and optimizer state after it. All of it is
compared at the end of the step and before a checkpoint of it is taken, so that no checkpoint holds what was found to be
wrong. See docs/detect_corruption.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.core.layout import Shard
from phalanx.detect.corruption.digest_file import (
    QUANTITIES,
    Quantity,
    StepDigests,
    UnlikeCopies,
    digest_text,
)
from phalanx.model.shapes import parameter_table
from phalanx.optim.groups import state_shards
from phalanx.parallel.digests import digests_of
from phalanx.parallel.state_copies import copy_axes, unlike_copies
from phalanx.train.config import RunConfig
from phalanx.train.corruption_response import CorruptionResponse, host_name, program_of, write_records
from phalanx.train.training_run import Run

USUALLY_EVERY = 100

_MOST_TENSORS = 32
"""Of those that differ, described by each rank: after a wrong factor that all share, it is every one."""


def digests_every(config: RunConfig) -> int:
    """Steps from check to check; 0: never. Where nobody holds a copy nothing is paid unless it is asked for."""
    given, layout = config.telemetry.digests_every, config.parallel.layout
    if given is not None:
        return given
    return USUALLY_EVERY if layout.replicate > 1 or layout.tensor > 1 else 0


class StateDigests:
    """One rank's side; all ranks call it alike."""

    def __init__(self, run: Run, response: CorruptionResponse) -> None:
        self._run, self._response = run, response
        self._every = digests_every(run.config)
        self._has_peers = run.ranks.size > 1  # alone there is nothing to compare before a checkpoint
        self._gradients: Tensor | None = None
        self._held: HeldState | None = None
        self._checked = -1  # the last step that was
        self.agreed = -1  # the last step of this start at which all copies were equal

    def is_due(self, step: int) -> bool:
        """Whether a step is checked, gradients too, whatever is saved."""
        if not self._every:
            return False
        return step % self._every == 0 or (self._has_peers and step == self._run.total_steps)

    def take_gradients(self, step: int) -> None:
        """After the reduction, and before the update, which may write to gradients."""
        if self.is_due(step):
            held = self._prepare()
            self._gradients = digests_of(held.tensors("gradient"), held.shards["gradient"])

    def check(self, step: int, *, saves: bool) -> None:
        """At the end of a step: compare and write, where it is due or a checkpoint is about to be made.

        Raises:
            SilentCorruptionError, PeerError: copies differ, see `CorruptionResponse`.
        """
        is_due = self.is_due(step) or (self._every and self._has_peers and saves)
        if not is_due or step == self._checked:
            return
        self._checked = step
        held, trainer, mesh = self._prepare(), self._run.trainer, self._run.ranks.mesh
        after = [digests_of(held.tensors(quantity), held.shards[quantity]) for quantity in QUANTITIES[1:]]
        # Counters of steps may lie on the host.
        parts = [torch.zeros_like(after[0]) if self._gradients is None else self._gradients, *after]
        digests, has_gradients = torch.cat([part.to(held.device) for part in parts]), self._gradients is not None
        self._gradients = None
        found = {} if mesh is None else unlike_copies(mesh, digests, held.axes)
        # One sum over all ranks says what the whole tensors are, and whether any rank has found something.
        sums = torch.zeros(len(held.places) + 1, 2, dtype=torch.int64, device=digests.device)
        sums[held.owned_places] = digests[held.owned]
        sums[-1, 0] = len(found)
        whole = trainer.add_over_ranks(sums)
        unlike = self._describe(step, held, found) if int(whole[-1, 0]) else None
        if self._run.ranks.is_first:
            record = self._record(step, held, whole[:-1], len(unlike or ()), has_gradients=has_gradients)
            write_records(self._run.folder.path, [*(unlike or ()), record], self._run.note)
        if unlike is None:
            self.agreed = step
        else:
            self._response.act(unlike)

    def _prepare(self) -> HeldState:
        if self._held is None:
            self._held = HeldState(self._run)
        return self._held

    def _record(self, step: int, held: HeldState, whole: Tensor, unlike: int, *, has_gradients: bool) -> StepDigests:
        of: dict[Quantity, dict[str, str]] = {quantity: {} for quantity in QUANTITIES}
        for (quantity, name), (plain, weighted) in zip(held.places, whole.tolist(), strict=True):
            of[quantity][name] = digest_text(plain, weighted)
        if not has_gradients:
            del of["gradient"]
        compared = sum(1 for axes in held.axes if axes)
        layout = str(self._run.config.parallel.layout)
        return StepDigests(step, self._run.saver.attempt, time.time(), layout, of, compared, unlike)

    def _describe(
        self, step: int, held: HeldState, found: Mapping[int, Mapping[int, tuple[int, int]]]
    ) -> list[UnlikeCopies]:
        """What differs on any rank, on the first; [] elsewhere."""
        mine = [
            [*held.order[index], {str(rank): digest_text(*sums) for rank, sums in found[index].items()}]
            for index in sorted(found)[:_MOST_TENSORS]
        ]
        collected = self._run.ranks.peers.collect([host_name(), program_of(held.device), mine])
        if collected is None:
            return []
        hosts, programs, described = zip(*collected, strict=True)
        start, now_s = self._run.saver.attempt, time.time()
        records: dict[tuple[Any, ...], UnlikeCopies] = {}
        for quantity, name, digests in (one for of_rank in described for one in of_rank):
            by_rank = {int(rank): digest for rank, digest in digests.items()}
            records[quantity, name, tuple(by_rank)] = UnlikeCopies(  # every member of a group describes the same
                step,
                start,
                now_s,
                quantity,
                name,
                by_rank,
                {rank: hosts[rank] for rank in by_rank},
                {rank: programs[rank] for rank in by_rank},
                self.agreed,
            )
        return list(records.values())


class HeldState:
    """What this rank holds of the state of a run, in an order that is the same on all ranks of a stage.

    Attributes:
        shards: what part of the whole each tensor is, by quantity.
        order: quantity and name of every tensor.
        axes: along which other ranks hold the same part of it.
        places: quantity and name of every tensor of all ranks, in the order of the model.
        owned: which of `order` this rank counts for the whole, and `owned_places`, where these are in `places`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        weights, states = run.trainer.shards, list(run.optimizer.state_tensors())
        of_states = state_shards(states, weights)
        self.shards: dict[Quantity, list[Shard]] = {
            "gradient": list(weights.values()),
            "weight": list(weights.values()),
            "optimizer": [of_states[name] for name in states],
        }
        # By the parameter that they belong to: of the parts of a split one, some may hold no row and count no steps.
        parameters = [*weights, *weights, *(name.rsplit(".", 1)[0] for name in states)]
        names: dict[Quantity, list[str]] = {"gradient": list(weights), "weight": list(weights), "optimizer": states}
        self.order = [(quantity, name) for quantity in QUANTITIES for name in names[quantity]]
        mesh = run.ranks.mesh
        self.axes = [() if mesh is None else copy_axes(mesh.layout, weights[name]) for name in parameters]
        self.places = _places(run, names)
        owners = [shard.owner for quantity in QUANTITIES for shard in self.shards[quantity]]
        self.device = next(iter(run.trainer.parameters.values())).device
        indices = [index for index, owner in enumerate(owners) if owner]
        self.owned = torch.tensor(indices, dtype=torch.int64, device=self.device)
        number = {key: place for place, key in enumerate(self.places)}
        owned = [number[key] for key, owner in zip(self.order, owners, strict=True) if owner]
        self.owned_places = torch.tensor(owned, dtype=torch.int64, device=self.device)

    def tensors(self, quantity: Quantity) -> list[Tensor]:
        """The present ones, in order; a gradient that there is none of is empty."""
        parameters = self._run.trainer.parameters.values()
        if quantity == "gradient":
            return [p.new_empty(0) if p.grad is None else p.grad for p in parameters]
        return list(parameters if quantity == "weight" else self._run.optimizer.state_tensors().values())


def _places(run: Run, names: Mapping[Quantity, list[str]]) -> list[tuple[Quantity, str]]:
    """All tensors of the run: stages of a pipeline hold different ones."""
    every = [names]
    mesh = run.ranks.mesh
    if mesh is not None and mesh.layout.pipeline > 1:
        leads = not any(mesh.layout.coordinates(mesh.rank)[1:])  # one rank of each stage speaks for it
        every = [one for one in run.ranks.peers.gather(names if leads else None) if one is not None]
    model_order = {name: number for number, name in enumerate(parameter_table(run.trainer.model_config))}

    def place(name: str) -> int:
        return model_order[name if name in model_order else name.rsplit(".", 1)[0]]

    # Sorting keeps the order of the states of one parameter.
    return [
        (quantity, name)
        for quantity in QUANTITIES
        for name in sorted(dict.fromkeys(name for one in every for name in one[quantity]), key=place)
    ]
