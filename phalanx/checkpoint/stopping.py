"""Whether training has to end soon: a stop signal has come, or the scheduler's deadline is near."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers
from phalanx.ipc.stop_request import TIME_IS_UP, StopRequest

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

    Slurm's is passed over where it is not a time to come, as in a shell that outlived its job.

    Raises:
        UserError: PHALANX_DEADLINE is not a time, or over already.
    """
    given = environment.get(_OURS, "")
    if not given:
        try:
            unix_s = float(environment.get(_SLURM, ""))
        except ValueError:
            return None
        return Deadline(unix_s, _SLURM) if now_unix_s < unix_s < float("inf") else None
    cure = "give seconds since 1970 (date +%s), or such as 2026-03-01T18:00:00+01:00"
    if re.fullmatch(r"\d+(\.\d*)?", given):
        unix_s = float(given)
    else:
        try:
            moment = datetime.fromisoformat(given)
        except ValueError:
            raise UserError("is no time", cure=cure, field=_OURS, value=given) from None
        if moment.tzinfo is None:
            raise UserError("does not say which time zone it is in", cure=cure, field=_OURS, value=given)
        unix_s = moment.timestamp()
    if unix_s <= now_unix_s:
        cure = "set it to when the job will end, or unset it"
        raise UserError("is over already", cure=cure, field=_OURS, value=given)
    return Deadline(unix_s, _OURS)


def deadline_due(
    deadline: Deadline | None, now_unix_s: float, *, margin_s: float, durable_s: float, step_s: float
) -> bool:
    """Whether, at the end of a step, the last checkpoint has to be taken: after another step it would come too late.

    Args:
        deadline: from `find_deadline`; None: never.
        now_unix_s: now, by the clock of the host (seconds since 1970).
        margin_s: `CheckpointConfig.wall_time_margin_s`.
        durable_s: how long a checkpoint is expected to take until it is durable.
    """
    return deadline is not None and now_unix_s + step_s + durable_s + margin_s > deadline.unix_s


class Stopping:
    """Agreed among all ranks of a foreign loop at the end of each step, where there is something to agree on.

    Args:
        config: `wall_time_margin_s` counts.
        peers: the ranks; rank 0's deadline and clock count.
        environment: where the deadline is found.
        catch: whether to catch signals, on the main thread only.

    Raises:
        UserError: PHALANX_DEADLINE is not a time to come.
    """

    def __init__(
        self, config: CheckpointConfig, peers: Peers, environment: Mapping[str, str], now_unix_s: float, *, catch: bool
    ) -> None:
        self._margin_s = config.wall_time_margin_s
        self._deadline = find_deadline(environment, now_unix_s) if peers.rank == 0 else None
        self._asks = catch or bool(peers.broadcast(self._deadline is not None))
        self._last_s = time.monotonic()
        self._step_s = self._durable_s = 0.0
        self._request = StopRequest(peers, self._reason, catch=catch).__enter__()

    def agreed(self, durable_s: float) -> str:
        """Why the loop has to end now, the same on all ranks; empty: it goes on.

        Args:
            durable_s: how long a checkpoint is expected to take until it is durable.
        """
        now_s = time.monotonic()
        self._step_s, self._last_s = max(0.9 * self._step_s, now_s - self._last_s), now_s
        self._durable_s = durable_s
        if not self._asks:
            return ""
        self._request.ask()
        if not self._request.agreed():
            return ""
        is_time_up = self._request.number == TIME_IS_UP
        return "the scheduler will end the job soon" if is_time_up else self._request.name

    def close(self) -> None:
        """Give the signals back."""
        self._request.__exit__()

    def _reason(self) -> int:
        expected = {"margin_s": self._margin_s, "durable_s": self._durable_s, "step_s": self._step_s}
        return TIME_IS_UP if deadline_due(self._deadline, time.time(), **expected) else 0
