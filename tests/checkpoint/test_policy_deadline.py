"""When the scheduler ends the job, and when the last checkpoint is due."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.stopping import Deadline, deadline_due, find_deadline
from phalanx.core.errors import UserError

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1800003600"}, Deadline(NOW + 3600, "SLURM_JOB_END_TIME")),
        ({"SLURM_JOB_END_TIME": "1700000000"}, None),
        ({"SLURM_JOB_END_TIME": "Unknown"}, None),
        ({"SLURM_JOB_END_TIME": "nan"}, None),
        ({"SLURM_JOB_END_TIME": "inf"}, None),
        ({"PHALANX_DEADLINE": "1800000060.5"}, Deadline(NOW + 60.5, "PHALANX_DEADLINE")),
        (
            {"PHALANX_DEADLINE": "1800000060", "SLURM_JOB_END_TIME": "1800003600"},
            Deadline(NOW + 60, "PHALANX_DEADLINE"),
        ),
        ({"PHALANX_DEADLINE": "2027-01-15T08:01:00Z"}, Deadline(NOW + 60, "PHALANX_DEADLINE")),
        ({"PHALANX_DEADLINE": "2027-01-15T10:01:00+02:00"}, Deadline(NOW + 60, "PHALANX_DEADLINE")),
    ],
)
def test_where_it_is_found(environment: dict[str, str], expected: Deadline | None) -> None:
    assert find_deadline(environment, NOW) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tomorrow", "PHALANX_DEADLINE = 'tomorrow': is no time; give seconds since 1970"),
        ("nan", "PHALANX_DEADLINE = 'nan': is no time"),
        ("2027-01-15T08:01:00", "does not say which time zone.*; give"),
        ("1799999999", "is over already; set it to when the job will end, or unset it"),
    ],
)
def test_refused_with_the_cure(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_deadline({"PHALANX_DEADLINE": text}, NOW)


def test_due_while_one_more_step_would_be_too_much() -> None:
    deadline = Deadline(1000.0, "")
    costs = {"margin_s": 60.0, "durable_s": 30.0, "step_s": 10.0}
    assert not deadline_due(None, 2000.0, **costs)
    assert not deadline_due(deadline, 900.0, **costs)
    assert deadline_due(deadline, 901.0, **costs)
    assert deadline_due(deadline, 2000.0, **costs)
