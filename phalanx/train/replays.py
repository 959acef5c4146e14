"""Micro-batches that neighbours compute again: corrupt arithmetic shows before gradients are added up.

Of weights and optimizer state all replicas hold copies, but a wrong gradient of one rank is added into the gradient of
all, whose copies then agree. So now and then every rank computes one micro-batch of its own and one of its neighbour
from the same weights, tokens and random masks, and the two digests have to be equal. Where any differ, the neighbour's
neighbour computes it too: of three results a majority names the rank, if not all are different.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.core.layout import Axis
from phalanx.data.batch import Batch
from phalanx.detect.corruption.digest_file import UnlikeReplays, digest_text
from phalanx.parallel.engine import Engine
from phalanx.parallel.group import Group
from phalanx.train.corruption_response import CorruptionResponse, host_name, program_of, write_records
from phalanx.train.training_run import Run

_SAMPLE_AXES: tuple[Axis, ...] = ("replicate", "shard")


class Replays:
    """One rank's side; all ranks call it alike."""

    def __init__(self, run: Run, response: CorruptionResponse) -> None:
        self._run, self._response = run, response
        self._every = run.config.telemetry.replay_every
        if self._every and (why := self._impossible()):
            self._every = 0
            if run.ranks.is_first:
                run.note(f"no micro-batch is computed again: {why}")

    def check(self, step: int, batch: Batch, agreed: int) -> None:
        """Before the passes of a step, where it is due.

        Args:
            batch: this rank's share of the step's.
            agreed: the last step at which copies of state were equal, for what is written.

        Raises:
            SilentCorruptionError, PeerError: results differ, see `CorruptionResponse`.
        """
        if not self._every or step % self._every:
            return
        engine, mesh = self._run.trainer, self._run.ranks.mesh
        assert isinstance(engine, Engine) and mesh is not None
        group = mesh.group(*_SAMPLE_AXES)
        mine = batch.rows(0, min(self._run.progress.micro_batch, len(batch)))
        found = [self._computed(engine, mine)]
        found.append(self._computed(engine, _of_neighbour(group, mine, 1)))
        results = _results(group, found)
        unlike = sum(len(set(by.values())) > 1 for by in results.values())
        if not self._any(engine, unlike):
            return
        if group.size > 2:  # all do it, also those whose results agree: layers may need them
            found.append(self._computed(engine, _of_neighbour(group, mine, 2)))
            results = _results(group, found)
        records = self._describe(step, agreed, results)
        if records and self._run.ranks.is_first:
            write_records(self._run.folder.path, records, self._run.note)
        self._response.act(records)

    def _impossible(self) -> str:
        trainer, config = self._run.trainer, self._run.config
        if not isinstance(trainer, Engine) or trainer.data_ranks < 2:
            return "there is no other data-parallel rank (parallel.replicate or parallel.shard)"
        if config.train.precision == "fp8":
            return "scales of 8 bits depend on what was computed before"
        return trainer.no_replay

    def _computed(self, engine: Engine, samples: Batch) -> Tensor:
        run = self._run
        return engine.replay(
            samples, micro_batch=run.progress.micro_batch, seed=run.config.train.seed, step=run.progress.step
        )

    def _any(self, engine: Engine, unlike: int) -> bool:
        count = torch.tensor([unlike], dtype=torch.int64, device=self._run.device.torch_device)
        return int(engine.add_over_ranks(count)) > 0

    def _describe(self, step: int, agreed: int, results: dict[int, dict[int, str]]) -> list[UnlikeReplays]:
        """What differs on any rank, on the first; [] elsewhere."""
        mine = {owner: by for owner, by in results.items() if len(set(by.values())) > 1}
        collected = self._run.ranks.peers.collect(
            [host_name(), program_of(self._run.device.torch_device), _texts(mine)]
        )
        if collected is None:
            return []
        hosts, programs, described = zip(*collected, strict=True)
        digests = {int(o): {int(r): d for r, d in by.items()} for of_rank in described for o, by in of_rank.items()}
        concerned = sorted({rank for by in digests.values() for rank in by})
        of_ranks = {rank: hosts[rank] for rank in concerned}, {rank: programs[rank] for rank in concerned}
        return [UnlikeReplays(step, self._run.saver.attempt, time.time(), digests, *of_ranks, agreed)]


def _texts(results: dict[int, dict[int, str]]) -> dict[str, Any]:
    return {str(owner): {str(rank): digest for rank, digest in by.items()} for owner, by in results.items()}


def _results(group: Group, found: Sequence[Tensor]) -> dict[int, dict[int, str]]:
    """Digests by owner and by who computed it; `found` are this rank's, of its own and of those before it."""
    mine = torch.stack(list(found))
    out = mine.new_empty((group.size * len(mine), 2))
    group.all_gather(out, mine).wait()
    results: dict[int, dict[int, str]] = {owner: {} for owner in group.ranks}
    for index, of_rank in enumerate(out.view(group.size, len(mine), 2).tolist()):
        for distance, (plain, weighted) in enumerate(of_rank):
            owner = group.ranks[(index - distance) % group.size]
            results[owner][group.ranks[index]] = digest_text(plain, weighted)
    return results


@dataclass(frozen=True)
class _Packed:
    """A batch as one matrix of numbers, and what is needed to take it apart again."""

    numbers: Tensor
    length: int
    has_documents: bool

    @staticmethod
    def of(batch: Batch) -> _Packed:
        columns = [batch.tokens_BS, batch.targets_BS, batch.weights_BS.contiguous().view(torch.int32)]
        columns += [] if batch.documents_BS is None else [batch.documents_BS]
        every = [*(column.to(torch.int64) for column in columns), batch.sample_index_B[:, None]]
        return _Packed(torch.cat(every, 1), batch.tokens_BS.shape[1], batch.documents_BS is not None)

    def unpacked(self, numbers: Tensor) -> Batch:
        tokens, targets, weights, *rest = torch.split(numbers, self.length, 1)
        return Batch(
            tokens.contiguous(),
            targets.contiguous(),
            weights.to(torch.int32).view(torch.float32),
            rest[0].to(torch.int32) if self.has_documents else None,
            rest[-1][:, 0].contiguous(),
        )


def _of_neighbour(group: Group, batch: Batch, distance: int) -> Batch:
    """The samples of the rank so far before this one in the group, which gets those of another."""
    packed = _Packed.of(batch)
    out = torch.empty_like(packed.numbers)
    to, source = (group.index + distance) % group.size, (group.index - distance) % group.size
    group.exchange(packed.numbers, to, out, source, tag=distance).wait()
    return packed.unpacked(out)
