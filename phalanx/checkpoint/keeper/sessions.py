"""What the keeper knows of each rank that is connected to it. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.checkpoint.format.plan import ALIGN_BYTES, JobPlan, ShardPlan
from phalanx.checkpoint.keeper.line import Line
from phalanx.checkpoint.keeper.vault import Cell, MemoryVault, Pin
from phalanx.checkpoint.persist.contract import Destination
from phalanx.checkpoint.replicas.contract import Endpoint


@dataclass
class Leased:
    """Memory that a rank has asked for.

    Attributes:
        number: the rank's.
        is_ready: whether it is allocated.
        told: the slot that the rank knows to be free.
        open: slots that it may be writing to.
    """

    number: int
    plan: ShardPlan
    job: JobPlan | None
    destination: Destination | None
    is_ready: bool = False
    told: int | None = None
    open: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Session:
    """A connection. `rank` is -1 until it has said hello, `attempt` 0 until it has begun."""

    line: Line
    rank: int = -1
    world_size: int = 0
    attempt: int = 0
    set_id: str = ""
    shards: int = 0
    lease: Leased | None = None
    peer: Endpoint | None = None
    pins: dict[int, Pin] = field(default_factory=dict)


def plan_problem(plan: ShardPlan, session: Session) -> str:
    """Why no memory is leased for a plan; empty if nothing is wrong with it."""
    if (plan.rank, plan.world_size) != (session.rank, session.world_size):
        return f"the plan is of rank {plan.rank} of {plan.world_size}, not {session.rank} of {session.world_size}"
    end = 0
    for piece in plan.pieces:
        if piece.start_bytes % ALIGN_BYTES or piece.start_bytes < end or piece.length_bytes < 0:
            return f"{piece.name} lies at {piece.start_bytes}, behind {end}: pieces begin at multiples of {ALIGN_BYTES}"
        end = piece.start_bytes + piece.length_bytes
    return ""


def allocate(
    vault: MemoryVault, plan: ShardPlan, slots: int, done: Callable[[list[Cell], str], None]
) -> threading.Thread:
    """Get memory in a thread of its own, which takes a while; `done` is called there with it, or with a problem."""

    def work() -> None:
        try:
            cells, problem = vault.lease(plan, slots), ""
        except OSError as error:
            cells, problem = [], error.strerror or str(error)
        done(cells, problem)

    thread = threading.Thread(target=work, name=f"allocate-{plan.rank}", daemon=True)
    thread.start()
    return thread
