"""How the command ends: what started it, such as a launcher of ranks, learns more than a status where there is more."""

from __future__ import annotations

import pytest

from phalanx.cli import main as command
from phalanx.launch.rank_failures import EndedWithPeer, failure_of_exception


def test_a_rank_that_ended_with_a_peer_says_so_through_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `phalanx run` takes several of them for ranks that failed alike by themselves, and ends the job."""
    exit_of_rank = EndedWithPeer(failure_of_exception(1, 0, RuntimeError("Connection reset by peer")))

    def ends(**_: object) -> None:
        raise exit_of_rank

    monkeypatch.setattr(command.group, "main", ends)
    with pytest.raises(EndedWithPeer) as ended:
        command.main(["train"])
    assert ended.value is exit_of_rank and ended.value.code == exit_of_rank.failure.status
