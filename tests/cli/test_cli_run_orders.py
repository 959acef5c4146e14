"""Whom a command that looks at a job asks: the driver while it answers, else what is written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.cli import run_orders
from phalanx.cli.run_orders import FoundJob, ask_or_read, find_job
from phalanx.core.errors import UserError
from phalanx.run.api.api_client import Client
from phalanx.run.config import RunConfig
from phalanx.run.job_folder import card_of_this_process, write_card


@pytest.fixture
def found(tmp_path: Path) -> FoundJob:
    """A job whose driver is this process, which lives and listens nowhere."""
    write_card(tmp_path, card_of_this_process(RunConfig(script="wait.py", folder=str(tmp_path)), tmp_path, 1.0))
    return find_job(tmp_path)


def ends(folder: Path) -> None:
    job = find_job(folder)
    write_card(folder, msgspec.structs.replace(job.card, status=0, ended="all ranks have ended"))


async def nobody(client: Client) -> str:
    raise ConnectionError("the driver does not answer")


def test_a_driver_that_answers_is_asked(found: FoundJob) -> None:
    async def answers(client: Client) -> str:
        return "from the driver"

    assert ask_or_read(found, answers, lambda found: "written") == "from the driver"


def test_a_job_that_is_over_is_read_though_its_driver_has_not_ended_yet(found: FoundJob) -> None:
    ends(found.folder)
    over = find_job(found.folder)
    assert (over.life, over.is_over) == ("lives", True)
    assert ask_or_read(over, nobody, lambda found: found.card.ended) == "all ranks have ended"


def test_a_job_that_ends_while_its_driver_is_asked_is_read(found: FoundJob) -> None:
    async def goes_away(client: Client) -> str:
        ends(found.folder)
        raise ConnectionError("closed")

    assert ask_or_read(found, goes_away, lambda found: found.card.ended) == "all ranks have ended"


def test_a_driver_that_lives_and_does_not_answer_is_an_error(found: FoundJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_orders, "_LAST_WORDS_S", 0.0)
    with pytest.raises(UserError, match="does not answer") as raised:
        ask_or_read(found, nobody, lambda found: "written")
    assert "try again" in str(raised.value)
