"""A job out of its journal, for commands that look at it, or end it, while no driver lives. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.card import Card
from phalanx.run.decide.actions import Finish
from phalanx.run.decide.decide import decide, event_from_json
from phalanx.run.decide.events import HostGone, StopAsked
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State, initial
from phalanx.run.driver.book import Book, Header, Met, Note
from phalanx.run.driver.overview import Known
from phalanx.run.journal import JournalError, open_journal, read_journal


@dataclass(frozen=True)
class Past:
    """What the journal says.

    Attributes:
        last_unix_s: when the newest entry was written.
    """

    state: State
    addresses: dict[str, str]
    last_unix_s: float

    @property
    def is_over(self) -> bool:
        """The job has ended."""
        return self.state.phase == "ended"

    @property
    def known(self) -> Known:
        """For `phalanx.run.driver.overview.overview`."""
        return Known(self.state, self.addresses)


def remember(folder: Path, card: Card) -> Past | None:
    """The job of a run folder; None: its journal is not there, or empty.

    Raises:
        UserError: there is something else. JournalError: it cannot be reached.
    """
    url = card.journal_url(folder)
    if "://" not in url and not Path(url).exists():
        return None
    state, addresses, last_unix_s = initial(Policy(), Job(card.job, 1, 1)), {}, 0.0
    try:
        with read_journal(url, job=card.journal_job) as journal:
            for entry in journal.read():
                last_unix_s = entry.unix_s
                if entry.kind == "event":
                    state, _ = decide(state, event_from_json(entry.json_text))
                elif entry.kind == "note":
                    note = msgspec.json.decode(entry.json_text, type=Note)
                    if isinstance(note, Header):
                        state = initial(note.policy, note.job)
                    elif isinstance(note, Met):
                        addresses[note.host] = note.address
    except msgspec.DecodeError as error:
        cure = "read it with the version of Phalanx that wrote it"
        raise UserError(f"was written by another version ({error})", cure=cure, value=url) from None
    return Past(state, addresses, last_unix_s) if last_unix_s else None


def end_without_driver(folder: Path, card: Card, past: Past, who: str, unix_s: float) -> Finish | None:
    """Write down that a person has ended the job, none of whose processes is left; None: it had ended before.

    Whichever driver had the journal until now cannot write to it any more.

    Raises:
        JournalError: it cannot be written. UserError: another driver has it.
    """
    reason = f"{who}, while its driver was dead"
    with open_journal(card.journal_url(folder), job=card.journal_job) as journal:
        book = Book(journal, past.state.job, past.state.policy, unix_s)
        done = list(book.first_actions)
        if not any(isinstance(action, Finish) for action in done):
            done += book.apply(StopAsked(unix_s, reason, 0.0))
            for host in book.state.placement:
                done += book.apply(HostGone(unix_s, host, "it was ended with the job"))
    return next((action for action in done if isinstance(action, Finish)), None)


def is_over(folder: Path, card: Card) -> bool:
    """Whether the job of this card has ended; a driver may have died before it wrote so on the card."""
    if card.status is not None:
        return True
    try:
        past = remember(folder, card)
    except JournalError as error:
        raise UserError(f"the journal cannot be read ({error})", cure="try again", value=str(folder)) from error
    return past is not None and past.is_over
