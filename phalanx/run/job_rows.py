"""Jobs of `phalanx run` as rows of the table of runs: a script that keeps no figures has a row by its card alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.run.decide.actions import STOPPED, TIME_SHORT
from phalanx.run.job_folder import Card, life, read_card
from phalanx.telemetry.living_ranks import LIVING, State
from phalanx.telemetry.run_list import RunRow, is_locked, is_run, read_run

_SIGNAL = 128


def read_job(folder: Path, below: Path | None = None) -> RunRow:
    """The row of a run or job, as `phalanx.telemetry.run_list.read_run` gives it of a run."""
    row, card = read_run(folder, below), card_of(folder)
    return row if card is None else with_card(row, card, is_run(folder))


def card_of(folder: Path) -> Card | None:
    """The job's card; None: there is none, or a damaged one: what else lies there is shown."""
    try:
        return read_card(folder)
    except UserError:
        return None


def with_card(row: RunRow, card: Card, has_figures: bool) -> RunRow:
    """What the table says of a run that `phalanx run` looks after: the job knows better whether it goes on."""
    if card.status is None and life(card) != "dead":
        return row if row.state in LIVING else replace(row, state="running", why="")
    if has_figures and not is_locked(Path(row.folder)):
        return row if row.state == "finished" or card.status in (None, 0) else replace(row, why=card.ended or row.why)
    state = state_of(card.status)
    why = "its driver is dead" if card.status is None else card.ended
    return replace(row, state=state, why="" if state == "finished" else why)


def state_of(status: int | None) -> State:
    """Of the exit status of a job without a driver; None: the driver is gone without a word."""
    if status is None:
        return "died"
    if status == 0:
        return "finished"
    is_asked = status in (STOPPED, TIME_SHORT) or status > _SIGNAL
    return "stopped" if is_asked else "failed"
