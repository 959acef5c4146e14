"""Putting the newest good state back into a foreign training loop, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from phalanx.checkpoint.foreign.putting import Putting
from phalanx.checkpoint.foreign.state import FORMAT, TrainingState
from phalanx.checkpoint.restoring.restored import Restored
from phalanx.checkpoint.together import everywhere
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers
from phalanx.core.shard import Shard

_TRIES = 3
_SHOWN = 8


class Source(Protocol):
    """What fills tensors from the newest good state: a session, or storage alone."""

    def __call__(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Restored | None:
        """All ranks together; names on one side only are told, not refused. None: there is nothing."""
        ...


def put_back(
    source: Source, training: TrainingState, peers: Peers, report: Callable[[str], None], *, strict: bool
) -> int:
    """Restore; returns the step of the state, 0 where there is none.

    What to read depends on what was saved, so the state is looked at first, without its tensors; then the JSON of
    this rank is read, where it has its own; then all the rest. Should the state turn out to be damaged on the way,
    another is taken from the beginning.

    Args:
        report: is given lines for people.
        strict: see `phalanx.checkpoint.foreign.api.Checkpointer.restore`.

    Raises:
        UserError: it does not fit, or was written by something else.
    """
    for _ in range(_TRIES):
        seen = source({}, {})
        if seen is None:
            return 0
        if not isinstance(seen.state, dict) or seen.state.get("format") != FORMAT:
            problem = f"the checkpoint of step {seen.step} was not written by this interface"
            raise UserError(problem, cure="resume it with what wrote it, or give another folder")
        blob = training.blob_target(seen.state)
        if peers.size > 1 and not _is_same(source(blob, {}), seen):
            continue
        putting = _prepare(training, seen.state, blob, peers, strict)
        filled = source(*putting.targets())
        if filled is not None and _is_same(filled, seen):
            everywhere(peers, partial(_require_fit, filled, training, strict))
            everywhere(peers, putting.finish)
            _tell_left(putting, filled, report)
            return seen.step
    raise UserError("a state was found and lost again several times", cure="see the lines above for what was wrong")


def _prepare(
    training: TrainingState, state: Mapping[str, Any], blob: Mapping[str, Tensor], peers: Peers, strict: bool
) -> Putting:
    own = b"".join(tensor.numpy().tobytes() for tensor in blob.values())
    made: list[Putting] = []
    everywhere(peers, lambda: made.append(Putting(training, state, own, strict=strict)))
    return made[0]


def _is_same(restored: Restored | None, seen: Restored) -> bool:
    return restored is not None and (restored.step, restored.attempt) == (seen.step, seen.attempt)


def _require_fit(filled: Restored, training: TrainingState, strict: bool) -> None:
    """Refuse names on one side only, of the objects that are given."""
    prefixes = tuple(f"{key}." for key in training.models)
    unexpected = [name for name in filled.differences.unexpected if prefixes and name.startswith(prefixes)]
    both = (("missing in the checkpoint", filled.differences.missing), ("only in the checkpoint", unexpected))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
        for what, names in both
        if names
    ]
    if strict and problems:
        cure = "build the model as it was, or restore with strict=False"
        raise UserError(f"the checkpoint of step {filled.step} does not fit: {'; '.join(problems)}", cure=cure)


def _tell_left(putting: Putting, filled: Restored, report: Callable[[str], None]) -> None:
    for what, names in (("objects", putting.left), ("tensors", filled.differences.missing)):
        if names:
            shown = ", ".join(names[:_SHOWN])
            report(f"{len(names)} {what} not in the checkpoint, left as they were: {shown}")
