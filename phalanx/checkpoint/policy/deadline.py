"""When the scheduler will end the job, and whether the last checkpoint has to be taken now. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from phalanx.core.errors import UserError

_OURS, _SLURM = "PHALANX_DEADLINE", "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Deadline:
    """When the job will be ended.

    Attributes:
        unix_s: seconds since 1970.
        source: the environment variable that says so.
    """

    unix_s: float
    source: str


def find_deadline(environment: Mapping[str, str], now_unix_s: float) -> Deadline | None:
    """When the job will be ended, if that is known: PHALANX_DEADLINE, else SLURM_JOB_END_TIME.

    Slurm's is passed over where it is no time to come, as in a shell that outlived its job.

    Raises:
        UserError: PHALANX_DEADLINE is no time, or over already.
    """
    given = environment.get(_OURS, "")
    if given:
        return Deadline(_read(given, now_unix_s), _OURS)
    try:
        unix_s = float(environment.get(_SLURM, ""))
    except ValueError:
        return None
    return Deadline(unix_s, _SLURM) if now_unix_s < unix_s < float("inf") else None


def deadline_due(
    deadline: Deadline | None, now_unix_s: float, *, margin_s: float, durable_s: float, step_s: float
) -> bool:
    """Whether, at the end of a step, the last checkpoint has to be taken: after another step it would come too late.

    Args:
        deadline: from `find_deadline`; None: never.
        now_unix_s: now, by the clock of the host (seconds since 1970).
        margin_s: `CheckpointConfig.wall_time_margin_s`.
        durable_s: how long a checkpoint is expected to take until it is durable.
        step_s: how long the next step is expected to take.
    """
    return deadline is not None and now_unix_s + step_s + durable_s + margin_s > deadline.unix_s


def _read(text: str, now_unix_s: float) -> float:
    unix_s = _unix_s(text)
    if unix_s <= now_unix_s:
        raise UserError("is over already", cure="set it to when the job will end, or unset it", field=_OURS, value=text)
    return unix_s


def _unix_s(text: str) -> float:
    cure = "give seconds since 1970 (date +%s), or such as 2026-03-01T18:00:00+01:00"
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UserError("is no time", cure=cure, field=_OURS, value=text) from None
    if moment.tzinfo is None:
        raise UserError("does not say which time zone it is in", cure=cure, field=_OURS, value=text)
    return moment.timestamp()
