"""How a run is, seen from another process: whether its processes live, what they do, when it will be done.

The run's own files say how far it is; who lives is asked of this host (`phalanx.telemetry.run_presence`), and what a
rank does is on its page. Of processes on other hosts only the run's lock and the age of its figures tell.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.living_ranks import LIVING, RankStatus, State, rank_statuses
from phalanx.telemetry.run_list import is_run, read_config, read_run, read_tail
from phalanx.telemetry.run_log import ENDED, STARTED
from phalanx.telemetry.run_log_lines import LogLine, Wanted, last_lines
from phalanx.telemetry.run_presence import presences

_STEP_FOLDER = re.compile(r"step-(\d+)")
_NAMES_A_RANK = re.compile(r"rank \d+\b")


@dataclass(frozen=True)
class RunStatus:
    """How a run is. None, or empty: not known.

    Attributes:
        why: of a state that is no good one, and what to do.
        step_s: a usual step, from the last figures, or spans where there are none.
        left_s: to the last step, at that rate, without evaluations and checkpoints.
        figures_age_s: since figures were last written.
        checkpoint_step, checkpoint_age_s: of the newest durable checkpoint, and since it was made.
        start: how many times the run has been started.
        behind: ranks on this host that are steps behind the others.
        ranks: those of the newest start that have not ended, or were killed.
    """

    name: str
    folder: str
    state: State
    why: str
    step: int | None
    total_steps: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    step_s: float | None
    left_s: float | None
    figures_age_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    start: int | None
    began_unix_s: float | None
    world_size: int | None
    behind: tuple[int, ...]
    ranks: tuple[RankStatus, ...]
    note: str
    tags: tuple[str, ...]

    @property
    def lives(self) -> bool:
        """Whether a process of it is known to live."""
        return self.state in LIVING

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has not become null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def run_status(path: Path, *, stalled_after_s: float | None = None, below: Path | None = None) -> RunStatus:
    """How the run in `path` is now.

    Args:
        stalled_after_s: without a step for so long it counts as stalled; None: ten times a usual step, a minute at
            least, ten minutes for the first step.
        below: the folder that its name is relative to.

    Raises:
        UserError: there is no run.
    """
    if not is_run(path):
        raise UserError("is not a run", cure="give the folder of a run; `phalanx runs` lists them", value=str(path))
    row, tail = read_run(path, below, stalled_after_s=stalled_after_s), read_tail(path / "metrics.jsonl")
    here, step_s = presences(path), row.step_s
    ranks, state, why = rank_statuses(here), row.state, row.why
    if state in ("failed", "died") and not _NAMES_A_RANK.match(why):
        said = _first_error(path)
        if said is not None and said.text != f"{ENDED}{why}":
            why = f"{why}; first rank {said.rank} {said.text}"
    known = [rank.step for rank in ranks if rank.step is not None and rank.life != "elsewhere"]
    step = max([*known, *([] if row.step is None else [row.step])], default=None)
    lives = state in LIVING
    left = None if step is None or row.total_steps is None or step_s is None else (row.total_steps - step) * step_s
    saved, saved_age_s = _newest_checkpoint(path, tail.saved)
    return RunStatus(
        name=row.name,
        folder=row.folder,
        state=state,
        why=why,
        step=step,
        total_steps=row.total_steps,
        tokens=row.tokens,
        loss=row.loss,
        validation_loss=row.validation_loss,
        tokens_per_s=row.tokens_per_s,
        mfu=tail.step.get("mfu") if isinstance(tail.step.get("mfu"), float) else None,
        step_s=step_s,
        left_s=max(left, 0.0) if left is not None and lives else None,
        figures_age_s=None if tail.written is None else max(time.time() - tail.written, 0.0),
        checkpoint_step=saved,
        checkpoint_age_s=saved_age_s,
        start=here[0].start if here else None,
        began_unix_s=min((presence.began_unix_s for presence in here), default=None),
        world_size=here[0].world_size if here else None,
        behind=_behind(ranks, is_stalled=state == "stalled"),
        ranks=ranks,
        note=row.note,
        tags=row.tags,
    )


def _first_error(path: Path) -> LogLine | None:
    """What a rank of several said first of how the newest start ended; the others only lost it."""
    said = last_lines(path, 256, Wanted(pattern=re.compile(f"^{ENDED}|^{STARTED}")))
    newest = [line for line in said if line.host and line.start == max(one.start for one in said)]
    errors = [line for line in newest if line.level == "ERROR"]
    return errors[0] if errors else None


def _behind(ranks: tuple[RankStatus, ...], *, is_stalled: bool) -> tuple[int, ...]:
    """Ranks that are more than the step behind in which all are; of a run that stands still, any that is behind."""
    steps = {rank.rank: rank.step for rank in ranks if rank.step is not None and rank.life != "elsewhere"}
    most = max(steps.values(), default=0)
    return tuple(rank for rank, step in steps.items() if step < most - (0 if is_stalled else 1))


def _newest_checkpoint(path: Path, named: int | None) -> tuple[int | None, float | None]:
    """Step of the newest durable checkpoint, and its age where it lies in a folder."""
    config: Any = {}
    with suppress(UserError):
        config = read_config(path)
    elsewhere = config.get("checkpoint", {}).get("folder", "") if isinstance(config.get("checkpoint"), dict) else ""
    if isinstance(elsewhere, str) and "://" in elsewhere:
        return named, None
    folder, found = Path(elsewhere) if elsewhere else path / "checkpoints", (-1, 0.0)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _STEP_FOLDER.fullmatch(entry.name):
                with suppress(OSError):  # pruned meanwhile
                    found = max(found, (int(match[1]), entry.stat().st_mtime))
    if found[0] < 0:
        return named, None
    return found[0], max(time.time() - found[1], 0.0)
