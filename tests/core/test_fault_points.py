from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from phalanx.core.errors import UserError
from phalanx.core.fault_points import FAULTS, NO_POINTS, Points, points_from_environment


def test_an_action_happens_at_its_point_with_its_details() -> None:
    seen: list[object] = []
    points = Points({"train.step": lambda **details: seen.append(details)})
    points.reach("train.step", step=3)
    points.reach("train.other", step=4)
    assert seen == [{"step": 3}]


def test_what_an_action_raises_is_raised_at_the_point() -> None:
    def fail(**_: object) -> None:
        raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        Points({"here": fail}).reach("here")


def test_nothing_happens_by_default() -> None:
    NO_POINTS.reach("anywhere", step=1)


def test_later_changes_of_the_mapping_do_not_matter() -> None:
    actions: dict[str, object] = {}
    points = Points(actions)  # type: ignore[arg-type]
    actions["here"] = pytest.fail
    points.reach("here")


def test_faults_of_the_environment_kill_the_process_at_the_point_it_names() -> None:
    program = (
        "from phalanx.core.fault_points import points_from_environment\n"
        "points = points_from_environment()\n"
        "points.reach('other')\n"
        "for number in range(3):\n"
        "    points.reach('here', step=number)\n"
        "    print(number, flush=True)\n"
        "points.reach('there')\n"
    )
    for faults, printed, status in (
        ("here", [], -signal.SIGKILL),
        ("here:3 there", ["0", "1"], -signal.SIGKILL),
        ("there:1 here:4", ["0", "1", "2"], -signal.SIGKILL),
        ("nowhere", ["0", "1", "2"], 0),
        ("", ["0", "1", "2"], 0),
    ):
        command = [sys.executable, "-c", program]
        ended = subprocess.run(command, env=os.environ | {FAULTS: faults}, capture_output=True, text=True, check=False)
        assert (ended.stdout.split(), ended.returncode) == (printed, status), faults


@pytest.mark.parametrize("faults", ["here:0", "here:-1", "here:x", ":1", "fine here:1.5"])
def test_faults_that_make_no_sense_are_refused(faults: str) -> None:
    with pytest.raises(UserError, match=f"{FAULTS} = .*write name or name:n"):
        points_from_environment({FAULTS: faults})
