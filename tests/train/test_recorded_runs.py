"""`phalanx train` records what its ranks do: real ranks, the host's writer, and answers that add up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from train_helpers import Commands, entries, overrides

from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import PARTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

STEPS = 8
SETTINGS: dict[str, Any] = {
    "telemetry.spans": True,
    "train.steps": STEPS,
    "train.global_batch": 4,
    "train.micro_batch": 1,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 4,
    "evaluate.tokens": 64,
    "model.vocab_multiple": 64,
    "model.layers": 4,
    "model.tie_embeddings": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "two replicas": {"parallel.replicate": 2},
    "pipeline and tensor": {"parallel.pipeline": 2, "parallel.tensor": 2, "checkpoint.mode": "background"},
    "split backward": {"parallel.pipeline": 2, "parallel.schedule": "zbv", "parallel.chunks": 2},
}


def recorded(folder: Path, commands: Commands, changes: dict[str, Any], run: str = "run") -> Path:
    (folder / "tiny.toml").write_text("")
    found = commands.run(folder, "train", "tiny.toml", *overrides(folder, SETTINGS | changes, run))
    assert found.status == 0, found.err
    return folder / run


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Callable[[str], Trace]:
    """What a run in a layout recorded, which runs once."""
    return cache(lambda layout: Trace.open(recorded(tmp_path_factory.mktemp("run"), commands, LAYOUTS[layout])))


@pytest.mark.campaign(but=("pipeline and tensor",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_and_exposed_communication_add_up_to_the_step(trace_of: Callable[[str], Trace], layout: str) -> None:
    ranks = 1
    for axis in ("replicate", "pipeline", "tensor"):
        ranks *= LAYOUTS[layout].get(f"parallel.{axis}", 1)
    trace = trace_of(layout)
    times = trace.sql("select rank, step, sum(step_ns) as ns from steps group by all order by all").to_pylist()
    assert [(row["rank"], row["step"]) for row in times] == [
        (rank, step) for rank in range(ranks) for step in range(1, STEPS + 1)
    ]

    (breakdown,) = trace.step_breakdown().to_pylist()
    assert sum(breakdown[f"{part}_s"] for part in (*PARTS, "other")) == pytest.approx(breakdown["step_s"])
    assert breakdown["other_s"] >= -0.01 * breakdown["step_s"]
    assert breakdown["forward_s"] > 0 and breakdown["backward_s"] > 0 and breakdown["optimizer_s"] > 0
    for row in trace.between_spans().to_pylist():
        assert row["parts_s"] + row["between_s"] - row["twice_s"] == pytest.approx(row["step_s"])
        assert row["between_s"] >= 0 and abs(row["twice_s"]) <= 0.01 * row["step_s"]
    exposed = trace.exposed_communication().to_pylist()
    assert sum(row["exposed_s"] for row in exposed) == pytest.approx(breakdown["wait_s"], rel=0.01, abs=1e-9)
    assert bool(exposed) == (ranks > 1)

    # The steps of a rank follow one another: nothing is counted into two of them.
    overlaps = trace.sql(
        "select count(*) n from spans a join spans b using (rank) where a.kind = 'step' and b.kind = 'step'"
        " and a.step < b.step and a.end_ns > b.start_ns"
    )
    assert overlaps.to_pylist() == [{"n": 0}]


def test_passes_messages_and_groups_are_those_of_the_layout(trace_of: Callable[[str], Trace]) -> None:
    trace = trace_of("pipeline and tensor")
    passes = trace.sql(
        "select kind, chunk, min(micro_batch) first, max(micro_batch) last, count(*) / count(distinct (rank, step)) n"
        " from spans where kind in ('forward', 'backward') group by all order by all"
    )
    assert passes.to_pylist() == [
        {"kind": kind, "chunk": 0, "first": 0, "last": 3, "n": 4.0} for kind in ("backward", "forward")
    ]
    stages = {row["rank"]: row["stage"] for row in trace.groups().to_pylist()}
    assert stages == {0: 0, 1: 0, 2: 1, 3: 1}
    members = {(row["rank"], row["group"]): row["ranks"] for row in trace.groups().to_pylist()}
    assert members[0, "pipeline"] == [0, 2] and members[3, "tensor"] == [2, 3]

    # Every message has both its ends: 4 micro-batches, there and back, of two pairs of ranks.
    pairs = trace.transfers().to_pylist()
    assert len(pairs) == STEPS * 4 * 2 * 2
    assert {(row["from_rank"], row["to_rank"]) for row in pairs} == {(0, 2), (1, 3), (2, 0), (3, 1)}
    assert all(row["bytes"] > 0 for row in pairs)
    # On one host clocks are one: nothing is received before it was sent.
    assert all(row["receive_end_ns"] >= row["send_start_ns"] for row in pairs)

    kinds = trace.sql("select kind, count(distinct rank) n from spans group by kind order by kind").to_pylist()
    assert {row["kind"]: row["n"] for row in kinds} == dict.fromkeys(
        ("data", "step", "forward", "backward", "collective", "wait", "optimizer", "evaluation", "startup"), 4
    ) | {row["kind"]: row["n"] for row in kinds if row["kind"] in ("snapshot", "persist")}
    assert {"snapshot", "persist"} <= {row["kind"] for row in kinds}
    inside = trace.sql(
        "select count(*) n from spans e join spans s using (rank) where e.kind = 'evaluation' and s.kind = 'step'"
        " and s.start_ns < e.end_ns and s.end_ns > e.start_ns"
    )
    assert inside.to_pylist() == [{"n": 0}]


def test_recording_changes_no_figure_and_what_a_later_start_does_again_counts_once(
    tmp_path: Path, commands: Commands
) -> None:
    constant = {"optim.schedule.kind": "constant"}
    run = recorded(tmp_path, commands, constant | {"train.steps": STEPS // 2})
    recorded(tmp_path, commands, constant)  # goes on there
    plain = recorded(tmp_path, commands, constant | {"telemetry.spans": False, "telemetry.digests_every": 0}, "plain")
    assert not (plain / "telemetry").exists()
    assert [entry["loss"] for entry in entries(run)] == [entry["loss"] for entry in entries(plain)]
    trace = Trace.open(run)
    steps = trace.sql("select step, attempt, count(*) n from spans where kind = 'step' group by all order by all")
    assert steps.to_pylist() == [
        {"step": step, "attempt": int(step > STEPS // 2), "n": 1} for step in range(1, STEPS + 1)
    ]
    assert not list((run / "telemetry" / "live").iterdir())  # all of it is in Parquet when the command has ended
