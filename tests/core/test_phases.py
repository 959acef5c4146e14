"""Phases: seconds add up by name, also when the block raises, and inner phases are not counted twice."""

from __future__ import annotations

import pytest

from phalanx.core.phases import Phases


def test_phases_add_up_and_inner_ones_count_once() -> None:
    ticks = iter([0.0, 1.0, 3.0, 5.0, 10.0, 10.5])
    phases = Phases(clock=lambda: next(ticks))
    with phases.phase("mesh"), phases.phase("mesh/tensor"):
        pass
    with pytest.raises(KeyError), phases.phase("mesh/tensor"):
        raise KeyError
    phases.add("import", 2.0)
    assert phases.seconds == {"mesh": 5.0, "mesh/tensor": 2.5, "import": 2.0}
    assert phases.total_s == 7.0
    assert str(phases) == "7.00 s (mesh 5.00, mesh/tensor 2.50, import 2.00)"
    assert phases.metrics() == {"startup/mesh_s": 5.0, "startup/mesh/tensor_s": 2.5, "startup/import_s": 2.0}


def test_an_inner_phase_of_another_name_is_taken_from_the_outer_one() -> None:
    ticks = iter([0.0, 1.0, 4.0, 10.0])
    phases = Phases(clock=lambda: next(ticks))
    with phases.phase("model"), phases.phase("mesh/shard"):
        pass
    assert phases.seconds == {"model": 7.0, "mesh/shard": 3.0}
    assert phases.total_s == 10.0


def test_nothing_timed_is_zero() -> None:
    assert str(Phases()) == "0.00 s"
    assert Phases().metrics() == {}


def test_a_name_with_a_slash_and_nothing_around_it_counts_by_itself() -> None:
    phases = Phases()
    phases.add("mesh/tensor", 1.5)
    assert phases.total_s == 1.5
