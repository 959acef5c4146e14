"""Slow machine, unbalanced stage, uneven lengths: told apart on jobs of which it is known, and on a published trace."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.straggler_traces import BEGIN_NS, MadeUpJob, groups_of, make_spans, write_made_up_run
from support.traced_runs import traced_run

from phalanx.core.errors import UserError
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.stragglers.job_places import place_ranks
from phalanx.detect.stragglers.odd_steps import slow_now_and_then
from phalanx.detect.stragglers.slow_since import begins_above, last_level
from phalanx.detect.stragglers.span_columns import SpanColumns
from phalanx.detect.stragglers.step_graph import build_graph
from phalanx.detect.stragglers.straggler_facts import StragglerFacts, gather_facts
from phalanx.detect.stragglers.straggler_judge import StragglerPolicy, judge_stragglers
from phalanx.detect.stragglers.straggler_run import judge_run, run_facts
from phalanx.detect.stragglers.what_if import worker_slowdowns
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import SPANS
from phalanx.telemetry.spans import KINDS
from phalanx.telemetry.trace_imports.importing import import_traces

TRACE = Path(__file__).parents[3] / "shared/data/traces/straggler-analysis"
published = pytest.mark.skipif(not TRACE.exists(), reason="the published job trace is not at hand")


def facts_of(job: MadeUpJob) -> StragglerFacts:
    return gather_facts(SpanColumns.of(make_spans(job)), groups_of(job))


def verdict_of(job: MadeUpJob, policy: StragglerPolicy | None = None) -> JudgeVerdict:
    return judge_stragglers(facts_of(job), policy or StragglerPolicy())


@pytest.fixture(scope="module")
def published_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("published") / "AR"
    import_traces([TRACE / "trace-AR.parquet"], run)
    return run


@published
def test_the_published_what_if_is_reproduced(published_run: Path) -> None:
    expected = json.loads((TRACE / "result-AR.json").read_text())
    facts = run_facts(Trace.open(published_run), 0, 10_000)
    assert facts is not None
    what_if = facts.what_if
    assert len(what_if.steps) == 44
    assert what_if.slowdown == pytest.approx(expected["blocking_slowdown"], rel=0.02)
    assert what_if.launch_slowdown == pytest.approx(expected["launch_slowdown"], rel=0.02)
    assert what_if.ideal_s.mean() == pytest.approx(np.mean(list(expected["step_t_noblk"].values())), rel=0.02)
    for part, found in (("stage", what_if.by_stage_s), ("dp_rank", what_if.by_column_s)):
        slowdowns = what_if.part_slowdowns(found)
        for number, slowdown in expected[f"blocking_decompose_by_{part}"].items():
            assert slowdowns[int(number)] == pytest.approx(slowdown, rel=0.02), (part, number)
    by_operation = dict(zip(what_if.operations, what_if.part_slowdowns(what_if.by_operation_s), strict=True))
    names = {"forward": "forward-compute", "backward": "backward-compute"}
    names |= {"forward messages": "forward-pp-comm", "backward messages": "backward-pp-comm"}
    for ours, theirs in names.items():
        assert by_operation[ours] == pytest.approx(expected["blocking_decompose_by_optype"][theirs], rel=0.02)
    assert facts.mw[0] == pytest.approx(json.loads((TRACE / "mw-AR.json").read_text())["Mw"], abs=0.02)
    assert facts.ms[0] == pytest.approx(json.loads((TRACE / "ms-AR.json").read_text())["Ms"], abs=0.02)


@published
def test_the_slow_worker_of_the_published_trace_is_evicted_and_no_other(published_run: Path) -> None:
    verdict = judge_run(published_run)
    (found,) = verdict.detections
    assert (found.what, verdict.blamed_ranks, found.advice) == ("slow rank", (0,), "evict")
    assert found.figures["slowdown"] == pytest.approx(1.973, rel=0.02)
    assert found.since.step == 16 and found.since.unix_s is None  # the trace does not say when it was
    assert float(found.figures["waited_least_share"]) > 0.3
    assert json.loads(json.dumps(verdict.as_json()))["tables"]["workers"][0]["slowdown"] > 1.9


@published
def test_the_ranks_that_are_left_of_the_published_trace_are_not_blamed(published_run: Path) -> None:
    trace = Trace.open(published_run)
    table = trace.ask("select * from spans where rank not in (0, 16, 32, 48)")
    groups = [
        (row["group"], tuple(rank for rank in row["ranks"] if rank % 16))
        for row in trace.ask('select distinct "group", ranks from groups').to_pylist()
    ]
    facts = gather_facts(SpanColumns.of(table), [(axes, ranks) for axes, ranks in groups if ranks])
    assert judge_stragglers(facts, StragglerPolicy()).blamed_ranks == ()


LAYOUTS = [
    MadeUpJob(columns=4, stages=4),
    MadeUpJob(columns=8, stages=1),
    MadeUpJob(columns=3, stages=2, tensor=2),
    MadeUpJob(columns=4, stages=4, chunks=2, schedule="interleaved_1f1b"),
    MadeUpJob(columns=4, stages=2, chunks=2, schedule="zbv"),
    MadeUpJob(columns=4, stages=2, chunks=2, schedule="interleaved_zero_bubble"),
]


def with_(job: MadeUpJob, **more: object) -> MadeUpJob:
    return MadeUpJob(**{**job.__dict__, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: f"{job.schedule}-{job.columns}x{job.stages}x{job.tensor}")
def test_a_step_replayed_with_its_delays_is_the_step(job: MadeUpJob) -> None:
    spans = SpanColumns.of(make_spans(job))
    places = place_ranks(spans.hosts, groups_of(job), spans.lockstep)
    graph = build_graph(spans, places)
    assert (places.stages, places.columns, places.workers) == (job.stages, job.columns, job.columns * job.stages)
    assert graph.step_times(graph.operations.duration_s, delays=True) == pytest.approx(graph.recorded_s, rel=2e-3)
    # nothing but dependencies holds a made-up rank up
    assert graph.step_times(graph.operations.duration_s) == pytest.approx(graph.recorded_s, rel=0.02)


@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: f"{job.schedule}-{job.columns}x{job.stages}x{job.tensor}")
def test_a_slow_rank_is_named_with_its_onset_and_nobody_else(job: MadeUpJob) -> None:
    rank = job.rank(job.stages - 1, 1, job.tensor - 1)
    healthy, verdict = verdict_of(job), verdict_of(with_(job, slow={rank: (1.3, 12)}))
    assert healthy.detections == () and healthy.exit_status == 0
    assert verdict.blamed_ranks == (rank,)
    found = verdict.detections[0]
    assert found.since.step is not None and abs(found.since.step - 12) <= 2
    assert float(found.figures["excess"]) == pytest.approx(0.3, abs=0.03)
    assert float(found.figures["waited_least_share"]) > 0
    assert found.since.unix_s is not None and found.since.unix_s > 1.7e9


def test_a_job_is_faster_by_what_was_said_when_the_slow_rank_is_replaced() -> None:
    job = MadeUpJob(noise=0.005, tail=0.0, lasting=0.0)
    slow = facts_of(with_(job, slow={5: (1.5, 1)}))
    share = float(judge_stragglers(slow, StragglerPolicy()).detections[0].figures["lost_share"])
    real = 1 - facts_of(job).what_if.recorded_s.mean() / slow.what_if.recorded_s.mean()
    assert share == pytest.approx(real, abs=0.01)


def test_several_slow_ranks_are_all_named_though_each_hides_the_others() -> None:
    job = MadeUpJob(columns=8, stages=2, slow={1: (1.4, 1), 3: (1.4, 1), 12: (1.4, 1)})
    assert sorted(verdict_of(job).blamed_ranks) == [1, 3, 12]


def test_one_of_two_ranks_of_a_host_is_named_by_nobody() -> None:
    """A healthy laptop: which cores a process got makes such a difference for minutes."""
    job = MadeUpJob(columns=2, stages=1, slow={1: (1.15, 1)})
    verdict = verdict_of(job)
    assert verdict.detections == () and verdict.blamed_hosts == ()
    assert any(re.search(r"rank 1 computes 1[0-9]% longer than the only other rank", one) for one in verdict.abstains)
    assert verdict_of(with_(job, ranks_per_host=1)).blamed_ranks == (1,)


def test_the_only_host_has_no_spare_for_one_of_its_ranks() -> None:
    job = MadeUpJob(columns=4, stages=1, slow={2: (1.75, 1)})
    (found,) = verdict_of(job).detections
    assert (found.advice, found.who[0].ranks) == ("evict", (2,))
    assert found.then[1].startswith("in a job with spares `phalanx run evict h0`")
    assert found.then[0].startswith("look at what else runs on h0, and at the cores and the device of rank 2")
    (elsewhere,) = verdict_of(with_(job, ranks_per_host=1)).detections
    assert elsewhere.advice == "evict"


def test_what_rounding_leaves_is_not_lost() -> None:
    verdict = verdict_of(MadeUpJob(columns=3, stages=1, micro_batches=1, seed=1))
    lost = {row["cause"]: row["lost_s"] for row in verdict.tables["lost"]}
    assert lost["transfers and the rest"] == 0 and all(one == 0 or one > 1e-9 for one in lost.values())


def test_a_host_whose_ranks_are_all_slow_is_named_as_one() -> None:
    job = MadeUpJob(columns=4, stages=2, tensor=2, ranks_per_host=2, slow={4: (1.2, 1), 5: (1.2, 1)})
    verdict = verdict_of(job)
    (found,) = verdict.detections
    assert (found.what, verdict.blamed_hosts, verdict.blamed_ranks) == ("slow host", ("h2",), (4, 5))


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_a_heavy_stage_is_the_program_s_fault(columns: int) -> None:
    verdict = verdict_of(MadeUpJob(columns=columns, stages=4, heavy={3: 2.07}))
    (found,) = verdict.detections
    assert (found.what, found.advice, verdict.blamed_ranks, verdict.blamed_hosts) == (
        "unbalanced stage", "program", (), (),
    )  # fmt: skip
    assert found.who[0].name == "stage 3"
    assert bool(verdict.abstains) == (columns == 1)  # its machine may be slow instead, and that is said


def test_a_stage_without_peers_that_became_slow_is_checked() -> None:
    verdict = verdict_of(MadeUpJob(columns=1, stages=4, ranks_per_host=1, slow={2: (1.5, 15)}))
    found = verdict.detections[0]
    assert (found.what, found.advice, verdict.blamed_hosts) == ("slow stage", "check", ("h2",))
    assert found.since.step is not None and abs(found.since.step - 15) <= 1


@pytest.mark.parametrize(("columns", "stages", "micro_batches"), [(8, 2, 8), (32, 2, 4), (4, 4, 16)])
def test_uneven_sequence_lengths_are_the_program_s_fault(columns: int, stages: int, micro_batches: int) -> None:
    job = MadeUpJob(columns=columns, stages=stages, micro_batches=micro_batches, lengths=0.3)
    verdict = verdict_of(job)
    assert [found.what for found in verdict.detections] == ["uneven sequence lengths"]
    assert verdict.detections[0].advice == "program" and verdict.blamed_ranks == ()


def test_uneven_lengths_hide_no_slow_rank() -> None:
    verdict = verdict_of(MadeUpJob(columns=8, stages=2, steps=60, lengths=0.2, slow={3: (1.6, 1)}))
    assert verdict.blamed_ranks == (3,)


def test_a_rank_that_waits_for_its_batches_is_checked() -> None:
    verdict = verdict_of(MadeUpJob(late={5: 0.1}))
    assert [(found.what, found.advice) for found in verdict.detections] == [("slow loading", "check")]
    assert verdict.blamed_ranks == (5,)


def test_slow_loading_is_found_since_it_began() -> None:
    verdict = verdict_of(MadeUpJob(late={5: 0.1}, steps=60, late_from=36))
    (found,) = verdict.detections
    assert (found.what, found.who[0].ranks) == ("slow loading", (5,)) and found.since.step == 36
    few = verdict_of(MadeUpJob(late={5: 0.1}, steps=60, late_from=46))  # a large file may be slow once
    assert not few.detections


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_slow_now_and_then_is_told_and_not_blamed(seed: int) -> None:
    verdict = verdict_of(MadeUpJob(columns=4, stages=1, steps=120, odd={2: (3.0, 0.25)}, seed=seed))
    (found,) = verdict.detections
    assert (found.what, found.advice, found.who[0].ranks) == ("slow now and then", "watch", (2,))
    assert verdict.blamed_ranks == () and found.figures["lost_share"] > 0.2
    assert 0.15 < found.figures["share_of_steps"] < 0.35


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_which_each_stalls_by_chance_are_well(seed: int) -> None:
    verdict = verdict_of(MadeUpJob(columns=4, stages=1, steps=200, tail=0.5, seed=seed))
    assert not verdict.detections, verdict.sentence
    everyone = dict.fromkeys(range(4), (2.0, 0.1))
    verdict = verdict_of(MadeUpJob(columns=4, stages=1, steps=200, odd=everyone, seed=seed))
    assert not verdict.detections, verdict.sentence


def odd_in(steps: Sequence[int], count: int = 120) -> list[str]:
    """What is said of three ranks of which one takes three times as long in these steps."""
    facts = facts_of(MadeUpJob(columns=3, stages=1, steps=count, tail=0.0))
    own_s = facts.own_s.copy()
    own_s[list(steps), 1] *= 3
    return [one.what for one in slow_now_and_then(dataclasses.replace(facts, own_s=own_s), 0.75, set())]


def test_an_evaluation_on_one_rank_and_a_slow_while_are_no_habit() -> None:
    random = np.random.default_rng(1)
    chosen = sorted(random.choice(120, 30, replace=False).tolist())
    assert odd_in(chosen) == ["slow now and then"]
    assert odd_in(range(4, 120, 5)) == [] and odd_in(range(50, 80)) == []
    assert odd_in(chosen[:7]) == []  # too few
    assert odd_in([one for one in chosen if one < 80]) == []  # it is over


def test_who_was_slow_for_a_while_and_is_well_again_is_not_blamed() -> None:
    job = MadeUpJob(steps=40, slow={5: (1.5, 1)})
    first, second = facts_of(with_(job, steps=20)), facts_of(with_(job, slow={}, steps=40))
    verdict = judge_stragglers(first.joined(second.since(20), 200), StragglerPolicy())
    assert verdict.detections == ()


def test_ranks_whose_spans_were_dropped_make_nobody_look_slow() -> None:
    job = MadeUpJob(columns=4, stages=2)
    spans = make_spans(job)
    # of the second half of a step three of the four ranks of a stage have lost their passes, in every step
    is_lost = np.isin(spans["rank"].to_numpy(), (4, 5, 6)) & (spans["micro_batch"].to_numpy() >= 4)
    facts = gather_facts(SpanColumns.of(spans.filter(pa.array(~is_lost))), groups_of(job))
    assert judge_stragglers(facts, StragglerPolicy()).blamed_ranks == ()


def test_fewer_passes_of_others_are_said_and_count_where_none_was_lost() -> None:
    """The slow one does something more within a span of its own, so that its peers have one pass less."""
    job = MadeUpJob(columns=3, stages=1, micro_batches=2, slow={2: (1.7, 1)})
    spans = make_spans(job)
    fewer = (spans["rank"].to_numpy() < 2) & (spans["micro_batch"].to_numpy() == 1)
    spans = SpanColumns.of(spans.filter(pa.array(~fewer)))
    unknown = judge_stragglers(gather_facts(spans, groups_of(job)), StragglerPolicy())
    assert unknown.blamed_ranks == () and unknown.exit_status == 3
    assert "of rank 0, 1 fewer passes are recorded than of others of stage 0" in unknown.abstains[0]
    known = judge_stragglers(gather_facts(spans, groups_of(job), is_whole=True), StragglerPolicy())
    (found,) = known.detections
    assert known.blamed_ranks == (2,) and found.advice == "check" and found.confidence < 0.7
    assert any("it may have been given more work" in why for why in found.why)


def test_of_few_ranks_one_is_named_only_if_it_stands_out_among_them() -> None:
    """The rule of `phalanx trace slow`."""
    fast = {0: (0.8, 1)}
    assert verdict_of(MadeUpJob(columns=3, stages=1, slow=fast | {2: (1.75, 1)})).blamed_ranks == (2,)
    unsure = verdict_of(MadeUpJob(columns=3, stages=1, slow=fast | {2: (1.2, 1)}))
    assert unsure.detections == ()
    assert re.search(r"rank 2 computes \d+% longer than its stage, but its 3 ranks differ by", unsure.abstains[0])


def test_too_little_is_said_and_blames_nobody() -> None:
    few = verdict_of(MadeUpJob(steps=4, slow={5: (3.0, 1)}))
    assert few.detections == () and few.exit_status == 3
    assert "4 steps have spans, 5 are needed" in few.abstains[0]
    alone = verdict_of(MadeUpJob(columns=1, stages=1))
    assert alone.exit_status == 3 and "no peer" in alone.abstains[0]


def test_a_run_without_passes_abstains(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no telemetry"):
        judge_run(tmp_path)
    (tmp_path / "telemetry" / "spans").mkdir(parents=True)
    assert judge_run(tmp_path).exit_status == 3


def test_steps_whose_spans_contradict_each_other_are_left_out() -> None:
    def collectives(rank: int, step: int, order: str) -> list[dict[str, object]]:
        base = {"host": "h0", "attempt": 0, "rank": rank, "step": step, "chunk": -1, "micro_batch": 0, "peer": -1}
        rows = [base | {"kind": "forward", "name": "", "group": "", "bytes": 0, "start_ns": 0, "end_ns": 10}]
        for at, name in enumerate(order, 1):
            times = {"start_ns": 20 * at, "end_ns": 20 * at + 10}
            rows.append(base | {"kind": "collective", "name": name, "group": "shard", "bytes": 8} | times)
        return [row | {name: 10**6 * (1000 * step + row[name]) for name in ("start_ns", "end_ns")} for row in rows]

    def columns(orders: Sequence[tuple[str, str]]) -> SpanColumns:
        each = [(rank, step, pair[rank]) for step, pair in enumerate(orders, 1) for rank in (0, 1)]
        rows = [row for one in each for row in collectives(*one)]
        return SpanColumns.of(pa.Table.from_pylist(rows, schema=SPANS))

    # members of a group that meet in "a" first and in "b" first each wait for the other
    facts = gather_facts(columns([("ab", "ab"), ("ab", "ba"), ("ba", "ba")]), [("shard", (0, 1))])
    assert facts.steps.tolist() == [1, 3] and facts.unordered == 1
    with pytest.raises(UserError, match="wait for each other"):
        gather_facts(columns([("ab", "ba")]), [("shard", (0, 1))])


def rows_of(rank: int, spans: Sequence[tuple[str, str, str, float, float]], step: int = 1) -> list[dict[str, object]]:
    """Spans as ``(kind, name, group, start, end)``, in milliseconds."""
    base = {"host": "h0", "attempt": 0, "rank": rank, "step": step, "chunk": -1, "micro_batch": 0, "peer": -1}
    base |= {"bytes": 8}
    times = ((round(start * 1e6), round(end * 1e6)) for *_, start, end in spans)
    return [
        base | {"kind": kind, "name": name, "group": group, "start_ns": start_ns, "end_ns": end_ns}
        for (kind, name, group, *_), (start_ns, end_ns) in zip(spans, times, strict=True)
    ]


def columns_of(*rows: list[dict[str, object]]) -> SpanColumns:
    return SpanColumns.of(pa.Table.from_pylist([row for part in rows for row in part], schema=SPANS))


def test_an_update_is_cut_at_the_waits_inside_and_ends_for_all_when_the_last_has_come() -> None:
    """Rank 0 is ready at 10 ms and rank 1 at 30; inside the update both add up norms, which takes 2 ms."""
    norm = ("all_reduce", "shard")
    spans = columns_of(
        rows_of(0, [("forward", "", "", 0, 10), ("optimizer", "", "", 10, 37), ("collective", *norm, 11, 34),
                    ("wait", *norm, 12, 34), ("step", "", "", 0, 37)]),
        rows_of(1, [("forward", "", "", 0, 30), ("optimizer", "", "", 30, 37), ("collective", *norm, 32, 34),
                    ("wait", *norm, 32, 34), ("step", "", "", 0, 37)]),
    )  # fmt: skip
    assert sorted(spans.pieces[spans.pieces > 0].tolist()) == [2, 2, 2, 2] and spans.lockstep == frozenset()
    facts = gather_facts(spans, [("shard", (0, 1))])
    assert facts.own_s[0].tolist() == pytest.approx([0.01, 0.03])
    # without delays: 30 of forward, 2 before the norms, 2 for them, 3 after
    assert facts.what_if.recorded_s[0] == pytest.approx(0.037) == facts.what_if.replayed_s[0]
    # were both like the faster one, 10 ms of forward: the other's piece before the norms is no pass, and stays 2
    assert facts.what_if.alike_s[0] == pytest.approx(0.017)


def test_a_collective_that_nothing_waited_for_ended_earlier_than_it_was_asked_for() -> None:
    """Both gather in the background; rank 0 asks at once and waits until 5 ms, rank 1 only at 20 ms."""
    gather = ("all_gather", "shard")
    spans = columns_of(
        rows_of(0, [("collective", *gather, 0, 5), ("wait", *gather, 0, 5), ("forward", "", "", 5, 20),
                    ("backward", "", "", 20, 30)]),
        rows_of(1, [("collective", *gather, 0, 20), ("forward", "", "", 0, 19.99), ("wait", *gather, 19.99, 20),
                    ("backward", "", "", 20, 30)]),
    )  # fmt: skip
    assert spans.is_hidden[spans.kind == KINDS.index("collective")].tolist() == [0, 1]
    graph = build_graph(spans, place_ranks(spans.hosts, [("shard", (0, 1))], spans.lockstep))
    is_gather = np.array([name.startswith("all_gather") for name in graph.operations.names])[graph.operations.operation]
    assert graph.operations.duration_s[is_gather] == pytest.approx([0.005, 0.005])
    assert graph.step_times(graph.operations.duration_s) == pytest.approx([0.03], abs=1e-4)


def test_ranks_that_wait_for_each_other_in_most_passes_are_one_worker() -> None:
    reduce, passes = ("all_reduce", "tensor"), [("forward", "", "", 0, 10), ("backward", "", "", 10, 30)]
    spans = columns_of(
        rows_of(0, [*passes, ("wait", *reduce, 6, 9), ("wait", *reduce, 20, 26)]),
        rows_of(1, [*passes, ("wait", *reduce, 8, 9), ("wait", *reduce, 24, 26)]),
    )  # fmt: skip
    facts = gather_facts(spans, [("tensor", (0, 1))])
    assert spans.lockstep == {"tensor"} and facts.places.workers == 1
    assert facts.own_s[0].tolist() == pytest.approx([0.021, 0.027])
    assert facts.what_if.replayed_s[0] == pytest.approx(0.030)
    assert facts.what_if.alike_s[0] == pytest.approx(0.024)  # 3 ms of waiting that all share, and rank 0's 21


def test_a_run_as_training_leaves_it_is_judged_by_its_folder(tmp_path: Path) -> None:
    verdict = judge_run(traced_run(tmp_path / "slow", steps=12))
    assert verdict.blamed_ranks == (5,)
    assert verdict.detections[0].figures["excess"] == pytest.approx(0.4, abs=0.05)
    assert judge_run(traced_run(tmp_path / "well", steps=12, slow={0: 1.0})).blamed_ranks == ()


def test_steps_of_an_attempt_before_are_of_other_hosts_and_say_nothing(tmp_path: Path) -> None:
    ill, well = MadeUpJob(columns=4, stages=2, slow={5: (1.5, 1)}), MadeUpJob(columns=4, stages=2)
    write_made_up_run(tmp_path, ill, make_spans(ill, steps=40))
    again = make_spans(well, first_step=31, begin_ns=BEGIN_NS + 10**12, steps=6)
    again = again.set_column(1, SPANS.field("attempt"), pa.array([1] * len(again), pa.int32()))
    write_made_up_run(tmp_path, well, again, 2)
    verdict = judge_run(tmp_path)
    assert verdict.detections == () and verdict.looked_at == "6 steps of 8 ranks, steps 31 to 36"
    assert judge_run(tmp_path, first=1, last=30).blamed_ranks == (5,)  # it was asked about


def test_who_is_slow_for_longer_than_was_looked_back_is_so_since_it_began(tmp_path: Path) -> None:
    job = MadeUpJob(columns=4, stages=2, slow={5: (1.5, 21)}, steps=80)
    (found,) = judge_run(write_made_up_run(tmp_path / "ill", job), StragglerPolicy(most_steps=20)).detections
    assert found.blamed_ranks == (5,) and found.since.step is not None and abs(found.since.step - 21) <= 1
    assert found.since.unix_s is not None and found.since.unix_s > 1.7e9
    assert found.why[-1].startswith(f"by the sums of older steps it is so since step {found.since.step}; before, it")
    always = with_(job, slow={5: (1.5, 1)})
    (found,) = judge_run(write_made_up_run(tmp_path / "always", always), StragglerPolicy(most_steps=20)).detections
    assert found.since.step == 1 and found.why[-1] == "by the sums of older steps it is so since step 1"
    within = with_(job, slow={5: (1.5, 71)})
    (found,) = judge_run(write_made_up_run(tmp_path / "within", within), StragglerPolicy(most_steps=20)).detections
    assert found.since.step is not None and abs(found.since.step - 71) <= 1 and "sums" not in found.why[-1]
    tensor = MadeUpJob(columns=3, stages=1, tensor=2, slow={2: (1.5, 21), 3: (1.5, 21)}, steps=80)
    both = judge_run(write_made_up_run(tmp_path / "tensor", tensor), StragglerPolicy(most_steps=20)).detections
    assert {one.blamed_ranks for one in both} == {(2,), (3,)}
    assert all(one.since.step is not None and abs(one.since.step - 21) <= 1 for one in both)


def test_a_rank_that_is_slow_now_more_and_now_less_is_slow_since_the_first_of_that() -> None:
    noise = np.random.default_rng(5).normal(0, 0.02, 400)
    levels = np.repeat([0.0, 0.5, 0.0, 0.9, 0.4, 0.7], [100, 50, 50, 60, 70, 70])
    assert begins_above(levels + noise, 0.025, 0.05) == (200, pytest.approx(0.0, abs=0.05))
    assert begins_above(levels[200:] + noise[200:], 0.025, 0.05) == (0, pytest.approx(np.nan, nan_ok=True))
    assert begins_above(levels[:200] + noise[:200], 0.025, 0.05) is None
    assert begins_above(np.full(9, np.nan), 0.025, 0.05) is None


@pytest.mark.parametrize("table", ["spans", "steps"])
@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", None])
def test_damaged_files_are_named_and_not_taken_for_spans_that_nobody_recorded(
    tmp_path: Path, table: str, content: bytes | None
) -> None:
    run = tmp_path / "run"
    traced_run(run, steps=3)
    for path in (run / "telemetry" / table).glob("*/*.parquet"):
        path.unlink()
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    first, damaged = judge_run(run).abstains
    assert "that can be read" in first and "record them" not in first
    assert f"of {table}: damaged or cut off" in damaged and f"telemetry/{table}/" in damaged


def test_what_is_lost_adds_up() -> None:
    verdict = verdict_of(MadeUpJob(slow={5: (1.3, 1)}, heavy={2: 1.2}, lengths=0.1))
    (what_if,) = verdict.tables["what_if"]
    lost = sum(row["lost_s"] for row in verdict.tables["lost"])
    assert what_if["recorded_s"] - lost == pytest.approx(what_if["best_s"])
    assert len(verdict.tables["workers"]) == 16
    assert max(verdict.tables["workers"], key=lambda row: row["slowdown"])["ranks"] == [5]


def test_the_worker_s_bound_is_the_smaller_one_of_stage_and_column() -> None:
    facts = facts_of(MadeUpJob(slow={5: (2.0, 1)}))
    slowdowns = worker_slowdowns(facts.what_if, facts.places).reshape(4, 4)
    assert np.unravel_index(slowdowns.argmax(), slowdowns.shape) == (1, 1)
    assert slowdowns.max() > 1.15 and np.sort(slowdowns.ravel())[-2] < 1.08


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(4, 40), high=st.integers(4, 40), jump=st.floats(0.1, 1.0), seed=st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_a_change_is_placed_where_it_was(low: int, high: int, jump: float, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.01, low + high)
    level = last_level(noise + np.repeat([0.0, jump], [low, high]), 0.05)
    assert abs(level.first - low) <= 1
    assert level.mean == pytest.approx(jump, abs=0.03)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 80), seed=st.integers(0, 2**32 - 1))
def test_noise_alone_is_no_change(count: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(0, 0.02, count)
    values[::7] = np.nan
    level = last_level(values, 0.05)
    assert np.isnan(level.before) and level.values == np.isfinite(values).sum()


def own_loop(loading_ms: Sequence[float], *, collective: bool = True, pause_ms: float = 0.0) -> SpanColumns:
    """12 steps of a loop that somebody wrote: its collective has no group, and ends for all when the last has come."""
    rows = []
    for step in range(1, 13):
        base, met = 1000.0 * step, max(loading_ms) + pause_ms + 2
        for rank, loads in enumerate(loading_ms):
            spans = [
                ("step", "", "", base, base + met + 2),
                ("data", "load", "", base, base + loads),
                ("forward", "model", "", base + loads, base + loads + 1),
                ("backward", "model", "", base + loads + 1, base + loads + 2),
                ("optimizer", "opt", "", base + met + 1, base + met + 2),
            ]
            meets = ("collective", "all-reduce", "", base + loads + 2 + pause_ms, base + met + 1)
            rows.append(rows_of(rank, [*spans, meets] if collective else spans, step))
    return columns_of(*rows)


@pytest.mark.parametrize("collective", [True, False])
def test_where_it_is_not_known_who_waits_for_whom_a_rank_that_differs_is_no_job_that_is_well(collective: bool) -> None:
    facts = gather_facts(own_loop((1, 1, 35, 35), collective=collective), [])
    verdict = judge_stragglers(facts, StragglerPolicy())
    assert verdict.exit_status == 3 and not verdict.detections
    assert "who waits for whom is not known; rank 2 (and 3) computes 850% longer by itself" in verdict.sentence
    assert "most of it in loading" in verdict.sentence
    assert ("collectives have no group" in verdict.sentence) == collective
    alike = judge_stragglers(gather_facts(own_loop((1, 1, 1, 1)), []), StragglerPolicy())
    assert alike.exit_status == 0


def test_what_goes_by_between_spans_is_said_where_it_is_most_of_a_step() -> None:
    verdict = judge_stragglers(gather_facts(own_loop((1, 1, 1), pause_ms=20), []), StragglerPolicy())
    assert verdict.exit_status == 3 and "of a step (0.02 s) goes by between spans" in verdict.sentence


def test_shares_of_what_is_hardly_lost_are_not_said(tmp_path: Path) -> None:
    verdict = judge_stragglers(gather_facts(own_loop((1, 1, 1)), []), StragglerPolicy())
    (what_if,) = verdict.tables["what_if"]
    assert what_if["slowdown"] == pytest.approx(1) and np.isnan(what_if["mw"]) and np.isnan(what_if["ms"])
    assert verdict.as_json()["tables"]["what_if"][0]["mw"] is None
