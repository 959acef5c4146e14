"""What workers are told of a manifest: only what they do to themselves, nothing of the right answer. Torch-free."""

from __future__ import annotations

from phalanx.faults.agenda import Agenda, Clock, Order
from phalanx.faults.kinds import KINDS
from phalanx.faults.manifest import Incident, Manifest


def agenda_of(manifest: Manifest, clock: Clock = "optimizer") -> Agenda:
    """What workers have to do in this case; the rest is for the controller."""
    numbered = enumerate(manifest.incidents)
    return Agenda(manifest.seed, clock, [_order(number, one) for number, one in numbered if KINDS[one.kind].is_inside])


def _order(number: int, incident: Incident) -> Order:
    when, lasts = incident.when, incident.lasts
    return Order(
        number=number,
        kind=incident.kind,
        ranks=list(incident.place.numbers),
        step=when.step,
        phase=when.phase,
        attempt=when.attempt,
        delay_s=when.delay_s,
        unit=lasts.unit,
        amount=lasts.amount,
        retrigger=incident.retrigger,
        settings=dict(incident.settings),
    )
