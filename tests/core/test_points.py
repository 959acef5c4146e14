from __future__ import annotations

import pytest

from phalanx.core.points import NO_POINTS, Points


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
