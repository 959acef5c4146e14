"""How a job ends: by itself, by a person, by time, or because it cannot go on. Torch-free."""

from __future__ import annotations

from phalanx.run.decide.actions import AskForHosts, Finish, IncidentResult
from phalanx.run.decide.state import Ending
from phalanx.run.decide.turn import Turn

DONE = 0
USER_CODE = 1
BAD_INPUT = 2
NO_HOSTS = 3
NO_PROGRESS = 4
STOPPED = 5
TIME_SHORT = 6


def finish(turn: Turn, ending: Ending) -> None:
    """The job is over; no process of it needs to be ended by hand any more."""
    turn.close_incident(
        f"the job has ended with status {ending.status}: {ending.reason}",
        result=_result(ending),
        status=ending.status,
    )
    if turn.state.asked:
        turn.act(AskForHosts(0))
    turn.enter("ended")
    turn.set(ending=ending, recovery=None, ways={}, checks={}, checks_due_s=None, asked=0, lacking_since_s=None)
    turn.act(Finish(ending.status, ending.reason, ending.requeue))


def _result(ending: Ending) -> IncidentResult:
    if ending.status == DONE:
        return "recovered"
    return "stopped" if ending.status in (STOPPED, TIME_SHORT) else "gave up"
