"""The tables are torch's; their routes agree on both sides; their bubbles are those of the papers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from ranks import peak_live
from rich.text import Text
from torch.distributed.pipelining import schedules as theirs

from phalanx.core.errors import UserError
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import Action, Table, channels, forward_table, make_table, placement_of, route
from phalanx.parallel.pipeline.timeline import Timeline, draw, simulate

COUNTS = [(r, m) for r in (1, 2, 3, 4, 5, 8) for m in (*range(r, 2 * r + 2), 3 * r, 4 * r, 4 * r + 2)]


def tables() -> list[Table]:
    """Every schedule over a range of sizes."""
    made = []
    for ranks, count in COUNTS:
        made.append(make_table("1f1b", ranks, 1, count))
        made.append(make_table("zbv", ranks, 2, count))
        if count % (count // ranks) == 0:
            for chunks in (1, 2, 3):
                made.append(make_table("interleaved_1f1b", ranks, chunks, count))
                made.append(make_table("interleaved_zero_bubble", ranks, chunks, count))
    return made


def written(table: Table, rank: int) -> list[str]:
    return [str(action) for action in table.actions[rank]]


def looped(schedule: type, ranks: int, chunks: int, count: int, rank: int) -> list[str]:
    """What torch's class computes on one rank; made without stages, of which the numbers alone matter."""
    made: Any = object.__new__(schedule)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, count
    made.num_stages = ranks * chunks
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    return [str(action) for action in made._calculate_single_rank_operations(rank) if action is not None]


class Recorder:
    """Stands in for torch's stage and writes down what its `Schedule1F1B` does."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.done = index, list[str]()

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{index}")

    def backward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}B{index}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def run_1f1b(ranks: int, count: int, rank: int) -> list[str]:
    made: Any = object.__new__(theirs.Schedule1F1B)
    made._stage, made._num_stages, made._n_microbatches = Recorder(rank), ranks, count
    made._check_inputs = lambda *_: ([None] * count, [{}] * count)
    made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = made._update_losses = lambda *_: None
    made.scale_grads = False
    made._step_microbatches()
    return list(made._stage.done)


@pytest.mark.parametrize(("ranks", "count"), COUNTS)
def test_tables_are_torchs(ranks: int, count: int) -> None:
    for rank in range(ranks):
        assert written(make_table("1f1b", ranks, 1, count), rank) == run_1f1b(ranks, count, rank)
        v_shaped = looped(theirs.ScheduleZBVZeroBubble, ranks, 2, count, rank)
        assert written(make_table("zbv", ranks, 2, count), rank) == v_shaped
        if count % (count // ranks) == 0:
            for chunks in (1, 2, 3):
                plain = looped(theirs.ScheduleInterleaved1F1B, ranks, chunks, count, rank)
                assert written(make_table("interleaved_1f1b", ranks, chunks, count), rank) == plain
                split = looped(theirs.ScheduleInterleavedZeroBubble, ranks, chunks, count, rank)
                assert written(make_table("interleaved_zero_bubble", ranks, chunks, count), rank) == split


def test_stages_are_placed_as_torch_places_them() -> None:
    for schedule, chunks, style in (("1f1b", 1, "loop"), ("interleaved_1f1b", 3, "loop"), ("zbv", 2, "v")):
        placement = placement_of(schedule, 4, chunks)  # type: ignore[arg-type]
        expected = theirs.generate_stage_to_rank_mapping(4, 4 * chunks, style=style)
        assert {stage: placement.rank_of(stage) for stage in range(4 * chunks)} == expected
    assert placement_of("zbv", 4, 2).stages_of(1) == [1, 6]


def test_every_table_computes_everything_once_in_ascending_order_and_never_blocks() -> None:
    for table in tables():
        simulate(table)  # raises where ranks wait for one another
        stages = range(table.placement.stages)
        last: dict[tuple[int, str], int] = {}
        for action in (action for row in table.actions for action in row):
            assert last.get((action.stage, action.kind), -1) == action.micro_batch - 1
            last[action.stage, action.kind] = action.micro_batch
        kinds = {kind for _, kind in last}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
        assert last == {(stage, kind): table.micro_batches - 1 for stage in stages for kind in kinds}


def test_bubbles_are_those_of_the_formulas() -> None:
    for ranks, count in ((4, 8), (4, 4), (2, 6), (8, 16), (1, 3)):
        plain = simulate(make_table("1f1b", ranks, 1, count)).bubble_fraction
        assert plain == pytest.approx((ranks - 1) / (count + ranks - 1))
        for chunks in (1, 2, 3):
            found = simulate(make_table("interleaved_1f1b", ranks, chunks, count)).bubble_fraction
            assert found == pytest.approx((ranks - 1) / (chunks * count + ranks - 1))
    halved = simulate(make_table("interleaved_zero_bubble", 4, 1, 8)).bubble_fraction
    assert halved == pytest.approx(Fraction(3, 8 * 3 + 3))  # ZB-H1: (p - 1)(F + I - W) idle units
    assert simulate(make_table("zbv", 4, 2, 64)).bubble_fraction < 0.01


def test_live_activations_are_what_the_schedules_promise() -> None:
    for ranks, count in COUNTS:
        plain = make_table("1f1b", ranks, 1, count)
        assert [peak_live(plain, rank) for rank in range(ranks)] == list(range(ranks, 0, -1))
        v_shaped = make_table("zbv", ranks, 2, count)
        assert all(peak_live(v_shaped, rank) <= 2 * ranks for rank in range(ranks))
        if count % (count // ranks) == 0:
            split = make_table("interleaved_zero_bubble", ranks, 1, count)
            assert all(peak_live(split, rank) <= ranks for rank in range(ranks))


def forwards() -> list[Table]:
    names: list[tuple[Schedule, int]] = [("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2)]
    return [forward_table(name, r, chunks, m) for name, chunks in names for r in (1, 2, 4) for m in (1, 3, 8)]


def test_a_forward_table_needs_no_minimum_and_never_blocks() -> None:
    for table in forwards():
        done = Counter(action for row in simulate(table).ranks for action, *_ in row)
        stages, counts = range(table.placement.stages), range(table.micro_batches)
        assert done == Counter(Action(stage, "F", m) for stage in stages for m in counts)


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_routes_of_both_sides_agree(look_ahead: int) -> None:
    for table in [table for table in tables() if table.ranks != 8 or table.micro_batches == 16] + forwards():
        routes = [route(table, rank, look_ahead) for rank in range(table.ranks)]
        for sender, receiver in channels(table.placement):
            sent = [s.give for s in routes[sender] if s.give and s.give.receiver == receiver]
            assert [message.order for message in sent] == list(range(len(sent)))
            posted = [m for s in routes[receiver] for m in s.post if m.sender == sender]
            assert posted == sent
        for rank, steps in enumerate(routes):
            check_steps(table, rank, steps, look_ahead)


def check_steps(table: Table, rank: int, steps: list[Any], look_ahead: int) -> None:
    """What is needed was posted or made before; what is confirmed was sent before; everything is used once."""
    posted, given, taken, confirmed = set[Any](), set[Any](), set[Any](), set[Any]()
    ahead = 0
    for step in steps:
        posted |= set(step.post)
        ahead = max(ahead, len(posted - taken) - (step.need in posted))
        if step.need is not None:
            assert step.need in (given if step.need.sender == rank else posted)
            taken.add(step.need)
        assert set(step.confirmed) <= given - confirmed
        confirmed |= set(step.confirmed)
        given |= {step.give} - {None}
    assert taken == posted | {message for message in given if message.receiver == rank}
    assert ahead <= look_ahead + 1


def test_a_message_is_confirmed_only_when_the_peer_had_it() -> None:
    table = make_table("1f1b", 2, 1, 3)
    steps = route(table, 0, 1)
    assert [str(step.action) for step in steps] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert [[m.micro_batch for m in step.confirmed] for step in steps] == [[], [], [0], [], [1], [2]]


def test_impossible_counts_are_refused_with_the_cure() -> None:
    with pytest.raises(UserError, match=r"parallel.pipeline = 4: 3 micro-batches .* lower train.micro_batch or raise"):
        make_table("1f1b", 4, 1, 3)
    with pytest.raises(UserError, match=r"9 micro-batches are not 2 equal rounds .* have 8 or 10 micro-batches"):
        make_table("interleaved_1f1b", 4, 2, 9)
    with pytest.raises(UserError, match=r"parallel.chunks = 3: .*'zbv' has 2 chunks .* parallel.chunks = 2"):
        make_table("zbv", 4, 3, 8)
    with pytest.raises(UserError, match=r"parallel.chunks = 2: .*'1f1b' has 1 chunk on"):
        make_table("1f1b", 4, 2, 8)


def test_a_table_that_blocks_is_found() -> None:
    table = make_table("1f1b", 2, 1, 2)
    turned = Table("1f1b", table.placement, 2, (tuple(reversed(table.actions[0])), table.actions[1]))
    with pytest.raises(ValueError, match="wait for one another: 0B1, 1F0"):
        simulate(turned)


def test_the_drawing_is_the_timeline() -> None:
    drawn = draw(make_table("1f1b", 2, 1, 3)).splitlines()
    assert drawn[0] == "1f1b: 2 ranks, 3 micro-batches, 12 units of time, 25.0 % bubble"
    assert drawn[2:5] == [
        "time    0         5         10",
        "rank 0  F0F1· · B0─ F2B1─ · B2─",
        "rank 1  · F0B0─ F1B1─ F2B2─ · ·",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_drawings_fit_the_terminal(schedule: Schedule) -> None:
    table = make_table(schedule, 8, 1 if schedule == "1f1b" else 2, 16)
    lines = draw(table).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("rank 3")]
    cells = Counter("".join(row[8:] for row in rows))
    assert sum(cells[letter] for letter in "FBIWfbiw") == len(table.actions[3])


def test_drawings_of_large_tables_leave_out_the_middle_and_colours_follow_the_kinds() -> None:
    table = make_table("1f1b", 64, 1, 512)
    lines = draw(table).splitlines()
    assert len(lines) < 150 and "… ranks 8 to 55 …" in lines
    assert any("units of time like these" in line for line in lines)
    small = make_table("zbv", 2, 2, 4)
    coloured = draw(small, markup=True)
    assert "[black on deep_sky_blue1]" in coloured
    plain = [line.rstrip() for line in Text.from_markup(coloured).plain.splitlines()]
    assert plain == draw(small).splitlines()


def test_the_drawings_of_the_docs_are_real() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    drawings = [part.removeprefix("text\n").strip() for part in page.split("```")[1::2]]
    names: list[tuple[Schedule, int]] = [
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
    ]
    assert drawings == [draw(make_table(name, 4, chunks, 8)) for name, chunks in names]
    for name, chunks in names:
        fraction = simulate(make_table(name, 4, chunks, 8)).bubble_fraction
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` | {chunks} |")]
        assert row.split("|")[4].strip() == f"{100 * fraction:.1f} %"


def test_timeline_counts_idle_time() -> None:
    timeline: Timeline = simulate(make_table("1f1b", 1, 1, 4))
    assert (timeline.length, timeline.bubble_fraction) == (12, 0.0)
