"""Whether ranks stand still: what two looks at them, some time apart, say. No step for a while alone is no hang."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.run.judge.stack_text import main_stack, without_lines
from phalanx.run.messages import RankEvidence

IDLE_SHARE = 0.05
"""A process that used less of one core than this hardly used any CPU time."""

_PATIENCE = re.compile(
    r"^(?:evaluat\w*|evaluation_loop|validate|validation\w*|predict|generate|fsync|\w*backend_compile|sync_checkpoint)\b"
    r"|^\w*(?:save|load|write|dump|restore)\w*(?:checkpoint|state|model|pretrained)"
    r"|\((?:torch/serialization\.py|safetensors/|checkpoint/|importlib/|<frozen importlib"
    r"|_dynamo/convert_frame|_inductor/(?:compile_fx|graph|scheduler|async_compile)|triton/compiler)",
    re.IGNORECASE,
)
"""Functions and files that take long without a step: evaluation, checkpoints, compilation, imports."""


@dataclass(frozen=True)
class Stillness:
    """What two looks at the ranks say.

    Attributes:
        still: ranks whose stacks did not change, or that hardly used CPU time, or that did not answer.
        moving: the others.
        busy_with: what a rank does that may well take long, by its stack, such as ``save_checkpoint (train.py)``;
            empty: nothing of the kind.
    """

    still: tuple[int, ...]
    moving: tuple[int, ...]
    busy_with: str = ""

    @property
    def is_hang(self) -> bool:
        """Whether all stand still, and none in what may take long."""
        return bool(self.still) and not self.moving and not self.busy_with


def compare(first: Iterable[RankEvidence], second: Iterable[RankEvidence], elapsed_s: float) -> Stillness:
    """Hold a second look, `elapsed_s` after the first, against it; a rank that is in one alone stands still."""
    before = {evidence.rank: evidence for evidence in first}
    still: list[int] = []
    moving: list[int] = []
    busy_with = ""
    for after in sorted(second, key=lambda evidence: evidence.rank):
        (moving if _moves(before.get(after.rank), after, elapsed_s) else still).append(after.rank)
        busy_with = busy_with or _patient(after)
    seen = {*still, *moving}
    still += [rank for rank in before if rank not in seen]
    return Stillness(tuple(sorted(still)), tuple(moving), busy_with)


def _moves(before: RankEvidence | None, after: RankEvidence, elapsed_s: float) -> bool:
    if before is None:
        return False
    if after.step > before.step or (after.phase, after.step) != (before.phase, before.step):
        return True
    if before.is_silent or after.is_silent or after.cpu_s - before.cpu_s < IDLE_SHARE * elapsed_s:
        return False
    return main_stack(before.stacks) != main_stack(after.stacks)


def _patient(evidence: RankEvidence) -> str:
    if evidence.is_silent:
        return ""
    return next((frame for frame in without_lines(main_stack(evidence.stacks)) if _PATIENCE.search(frame)), "")
