"""What has happened to a job and what was decided, in order, for good: written by one driver, read by anybody."""

from phalanx.run.journal.journal_tables import (
    Draft,
    DriverStart,
    Entry,
    JournalError,
    JournalFullError,
    JournalLostError,
    JournalTakenError,
)
from phalanx.run.journal.writing import Journal, JournalReader, open_journal, read_journal

__all__ = [
    "Draft",
    "DriverStart",
    "Entry",
    "Journal",
    "JournalError",
    "JournalFullError",
    "JournalLostError",
    "JournalReader",
    "JournalTakenError",
    "open_journal",
    "read_journal",
]
