"""States, events and actions as JSON, and the state that a journal's events give. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phalanx.run.decide.actions import Action
from phalanx.run.decide.decide import decide
from phalanx.run.decide.events import Event
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State, initial


def to_json(value: State | Event | Action | Policy | Job) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value)


def event_from_json(text: bytes | str) -> Event:
    """The event that `to_json` was given.

    Raises:
        msgspec.ValidationError: it is none.
        msgspec.DecodeError: it is no JSON.
    """
    event: Event = msgspec.json.decode(text, type=Event)
    return event


def action_from_json(text: bytes | str) -> Action:
    """The action that `to_json` was given; raises as `event_from_json`."""
    action: Action = msgspec.json.decode(text, type=Action)
    return action


def state_from_json(text: bytes | str) -> State:
    """The state that `to_json` was given; raises as `event_from_json`."""
    return msgspec.json.decode(text, type=State)


def replay(policy: Policy, job: Job, events: Iterable[Event]) -> State:
    """The state of a driver that reads its journal again."""
    state = initial(policy, job)
    for event in events:
        state, _ = decide(state, event)
    return state
