"""What limits a run and who is to blame: jobs of which it is known, and jobs of which too little is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.evidence import Evidence, gather
from phalanx.telemetry.slow_ranks import SlowRanks
from phalanx.telemetry.span_store import SPANS, sums, write_part
from phalanx.telemetry.step_causes import slower_steps
from phalanx.telemetry.trace_imports.importing import import_traces
from phalanx.telemetry.verdict import judge
from tests.telemetry.trace_runs import SHARED, span, write_run

TENSOR = [[0, 1], [2, 3], [4, 5], [6, 7]]
GROUPS = {"pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]], "tensor": TENSOR, "all": [list(range(8))]}


def job(
    steps: int = 24,
    *,
    slow: Mapping[int, float] | None = None,
    data_ms: Mapping[int, float] | None = None,
    tensor_ms: Mapping[int, float] | None = None,
    stage_ms: Mapping[int, float] | None = None,
    optimizer_ms: float = 4.0,
    grows: float = 0.0,
    long_steps: Mapping[int, float] | None = None,
) -> list[dict[str, Any]]:
    """Eight ranks on four hosts, two stages of four: data, forward, tensor all-reduce, backward, all-reduce, optimizer.

    Args:
        slow: factors of forward and backward by rank.
        data_ms: wait for a batch, by rank; 0.5 else.
        tensor_ms: how long bytes take, by the first rank of the tensor group; 1 else.
        stage_ms: of forward, by stage; backward takes twice as long. 30 else.
        grows: share by which everything becomes slower until the last step.
        long_steps: by step, how much longer its optimizer takes.
    """
    rows, at = [], 0.0
    rng = np.random.default_rng(3)
    for step in range(1, steps + 1):
        factor = {rank: (slow or {}).get(rank, 1.0) * (1 + 0.004 * rng.standard_normal()) for rank in range(8)}
        factor = {rank: value * (1 + grows * step / steps) for rank, value in factor.items()}
        now = {}
        for rank in range(8):
            forward = (stage_ms or {}).get(rank // 4, 30.0) * factor[rank]
            batch = at + (data_ms or {}).get(rank, 0.5)
            rows.append(span(rank, step, "data", at, batch))
            rows.append(span(rank, step, "forward", batch, batch + forward, micro_batch=0, chunk=0))
            now[rank] = batch + forward
        for members in TENSOR:
            end = max(now[rank] for rank in members) + (tensor_ms or {}).get(members[0], 1.0)
            for rank in members:
                reduce = {"name": "all_reduce", "group": "tensor", "bytes": 4096}
                rows.append(span(rank, step, "collective", now[rank], end, **reduce))
                rows.append(span(rank, step, "wait", now[rank], end, **reduce))
                backward = 2 * (stage_ms or {}).get(rank // 4, 30.0) * factor[rank]
                rows.append(span(rank, step, "backward", end, end + backward, micro_batch=0, chunk=0))
                now[rank] = end + backward
        end = max(now.values()) + 1.5
        last = end + optimizer_ms + (long_steps or {}).get(step, 0.0)
        for rank in range(8):
            reduce = {"name": "all_reduce", "group": "all", "bytes": 8192}
            rows.append(span(rank, step, "collective", now[rank], end, **reduce))
            rows.append(span(rank, step, "wait", now[rank], end, **reduce))
            rows.append(span(rank, step, "optimizer", end, last))
            rows.append(span(rank, step, "step", at, last + 0.2))
        at = last + 0.3
    return rows


def verdict_of(folder: Path, rows: list[dict[str, Any]], **more: Any) -> Any:
    write_run(folder, rows, GROUPS, **more)
    return judge(gather(folder))


def test_a_healthy_run_is_limited_by_its_own_work(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job())
    assert verdict.limit is None and not verdict.abstains
    assert verdict.sentence.startswith("Nothing but its own work limits this run: forward and backward are 9")
    assert verdict.sureness == "likely"
    assert all(finding.share < 0.05 for finding in verdict.findings)


@pytest.mark.campaign(but=("1",))
@pytest.mark.parametrize("rank", [1, 6])
def test_a_slow_rank_is_blamed_with_its_host(tmp_path: Path, rank: int) -> None:
    verdict = verdict_of(tmp_path, job(slow={rank: 1.3}))
    assert verdict.limit.cause == "slow rank" and verdict.limit.ranks == (rank,)
    assert verdict.limit.hosts == (f"host{rank // 2}",) and verdict.sureness == "certain"
    # 30 % of 90 ms, of a step of about 125 ms
    assert verdict.limit.lost_s == pytest.approx(0.027, rel=0.1)
    assert verdict.sentence.startswith(f"Rank {rank} (host host{rank // 2}) computes 30% longer")
    assert any(f"evict host{rank // 2}" in action.command for action in verdict.actions)
    assert not any(finding.cause == "late ranks" for finding in verdict.findings)  # their waits are explained


def test_beside_healthy_ranks_on_the_only_host_nobody_is_told_to_evict_it(tmp_path: Path) -> None:
    rows = [row | {"host": "vm"} for row in job(slow={6: 1.5})]
    write_run(tmp_path, rows, GROUPS)
    verdict = judge(gather(tmp_path))
    assert verdict.limit is not None and verdict.limit.ranks == (6,)
    assert not any("evict" in action.command for action in verdict.actions)
    assert any(
        "what else runs on vm" in action.text and "device of rank 6" in action.text for action in verdict.actions
    )


def test_two_slow_ranks_of_a_host_are_the_host(tmp_path: Path) -> None:
    slow = judge(gather_job(tmp_path, slow={2: 1.4, 3: 1.4}))
    assert slow.limit is not None and slow.limit.ranks == (2, 3)
    assert slow.sentence.startswith("Host host1 (ranks 2, 3) compute 40% longer")


def gather_job(folder: Path, **how: Any) -> Evidence:
    write_run(folder, job(**how), GROUPS)
    return gather(folder)


def test_a_starved_run_waits_for_data_on_all_ranks(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(data_ms=dict.fromkeys(range(8), 40.0)))
    assert verdict.limit.cause == "data" and verdict.limit.ranks == ()
    assert verdict.sentence.startswith("All ranks wait for data")
    assert verdict.limit.lost_s == pytest.approx(0.04, rel=0.01)


def test_one_rank_without_data_is_blamed_and_not_called_a_slow_one(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(data_ms={5: 60.0}))
    assert verdict.limit.cause == "data" and verdict.limit.ranks == (5,) and verdict.limit.hosts == ("host2",)
    assert not any(finding.cause in ("slow rank", "late ranks") for finding in verdict.findings)


def test_a_slow_link_is_told_from_late_ranks(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(tensor_ms={4: 25.0}))
    assert verdict.limit.cause == "slow link" and verdict.limit.ranks == (4, 5) and verdict.limit.group == "tensor"
    assert verdict.limit.lost_s == pytest.approx(0.024, rel=0.05)
    assert verdict.sentence.startswith("A link among ranks 4, 5 (host2) is slow") and "25.0 times" in verdict.sentence
    assert not any(finding.cause == "late ranks" for finding in verdict.findings)  # they come late because of it


def test_communication_that_all_pay_blames_nobody(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(tensor_ms=dict.fromkeys((0, 2, 4, 6), 25.0)))
    assert verdict.limit.cause == "communication" and verdict.limit.ranks == () and verdict.limit.group == "tensor"


def test_waits_in_groups_that_nobody_described_are_said_and_blame_nobody(tmp_path: Path) -> None:
    write_run(tmp_path, job(tensor_ms=dict.fromkeys((0, 2, 4, 6), 25.0)))
    verdict = judge(gather(tmp_path))
    assert verdict.limit is not None and verdict.limit.sureness == "possible" and not verdict.limit.ranks
    assert "for whom is not known" in verdict.sentence


def test_a_heavy_stage_is_no_slow_rank(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(stage_ms={0: 30.0, 1: 45.0}))
    assert verdict.limit.cause == "unbalanced stages" and verdict.limit.ranks == (4, 5, 6, 7)
    assert verdict.sentence.startswith("Stage 1 of the pipeline computes 20% longer")


def test_steps_that_are_long_now_and_then(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(long_steps={9: 6000.0, 17: 5000.0}))
    assert verdict.limit.cause == "irregular steps" and verdict.limit.steps == (9, 17)
    assert "--steps 9" in verdict.actions[0].command
    # What the cause costs and the step are of one measure.
    found = re.search(r"costs up to ([\d.]+) s of ([\d.]+) s a step \((\d+)%\)", verdict.sentence)
    assert found is not None, verdict.sentence
    lost_s, step_s, percent = (float(one) for one in found.groups())
    assert lost_s < step_s and percent == pytest.approx(100 * lost_s / step_s, abs=1)


def test_no_cause_costs_more_than_the_step() -> None:
    times = [{"step": step, "median_s": 1.0, "slowest_s": 1.0} for step in range(1, 21)]
    waits = [
        {"group": group, "first_rank": 0, "members": 2, "least_s": 3.0, "mean_s": 9.0}
        for group in ("pipeline", "shard")
    ]
    evidence = Evidence("runs/x", ranks=2, steps=20, times=times, waits=waits, breakdown={"step": 1.0, "wait": 1.0})
    verdict = judge(evidence)
    assert verdict.findings and all(one.share <= 1 and one.lost_s <= 1 for one in verdict.findings)
    assert not re.search(r"[2-9]\d\d%", " ".join(one.sentence for one in verdict.findings))


def test_steps_that_become_slower(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(60, grows=0.3))
    assert verdict.limit.cause == "slower and slower"
    # of 95 ms: on average 15 % are added, in the median of the first fifth 3 %
    assert verdict.limit.lost_s == pytest.approx(0.12 * 0.095, rel=0.1)


def test_steps_that_became_ten_times_as_long_cost_no_more_than_they_took() -> None:
    each = [0.02] * 20 + [0.2 * (1 + number / 80) for number in range(80)]
    times = [{"step": step, "median_s": seconds} for step, seconds in enumerate(each)]
    mean_s = sum(each) / len(each)
    (found,) = slower_steps(Evidence("runs/x", ranks=1, steps=100, times=times), mean_s, [])
    assert found.lost_s == pytest.approx(mean_s - 0.02) and found.share < 0.95


def test_a_heavy_optimizer(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, job(optimizer_ms=40.0)).limit.cause == "optimizer"


def test_a_run_that_diverged_is_that_first_of_all(tmp_path: Path) -> None:
    metrics = [{"kind": "step", "step": step, "loss": 2.0} for step in range(1, 20)]
    metrics.append({"kind": "step", "step": 20, "loss": None, "not_finite": {"loss": "nan"}})
    verdict = verdict_of(tmp_path, job(slow={1: 1.5}), metrics=metrics)
    assert verdict.limit.cause == "diverged" and "step 20: loss was nan" in verdict.sentence
    assert verdict.findings[1].cause == "slow rank"


def test_it_abstains_with_few_steps(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, job(4, slow={1: 2.0}))
    assert verdict.limit is None and verdict.sentence.startswith("No verdict: 4 steps")
    assert verdict.sureness == "possible"


def test_it_abstains_without_telemetry_and_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 3.0}\n')
    verdict = judge(gather(tmp_path))
    assert verdict.abstains == ("no rank recorded spans",)
    assert any("record_spans" in action.text for action in verdict.actions)


def test_a_folder_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no telemetry"):
        gather(tmp_path)


def test_it_abstains_where_spans_say_only_that_there_were_steps(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, [row for row in job() if row["kind"] == "step"])
    assert verdict.abstains == ("spans say how long steps were, and not what they went on",)


def test_a_single_rank_is_compared_with_nobody(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, [row for row in job() if row["rank"] == 0])
    assert verdict.limit is None and verdict.sureness == "possible"
    assert any("comparison of ranks" in one.what for one in verdict.missing)


def test_damaged_parts_are_named_and_the_rest_is_used(tmp_path: Path) -> None:
    write_run(tmp_path, job(slow={1: 1.5}), GROUPS)
    for path in (tmp_path / "telemetry/spans").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:1000])
    verdict = judge(gather(tmp_path))
    assert verdict.limit is not None and verdict.limit.cause == "slow rank"
    assert any("cut off" in one.how and "of spans" in one.what for one in verdict.missing)


def test_parts_of_an_older_version_that_lack_a_column_are_named(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_run(tmp_path, job(), GROUPS)
    for path in (tmp_path / "telemetry/steps").rglob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["snapshot_ns"]), path)
    verdict = judge(gather(tmp_path))
    assert verdict.abstains and any("snapshot_ns" in one.how for one in verdict.missing)


def test_without_single_spans_the_rank_is_blamed_all_the_same(tmp_path: Path) -> None:
    """Spans go after half an hour, sums stay."""
    write_run(tmp_path, job(slow={3: 1.5}), GROUPS)
    for path in (tmp_path / "telemetry/spans").rglob("*.parquet"):
        path.unlink()
    verdict = judge(gather(tmp_path))
    assert verdict.limit is not None and verdict.limit.ranks == (3,)
    assert any(one.what == "single spans of collectives" for one in verdict.missing)


def test_counters_say_why_a_host_is_slow(tmp_path: Path) -> None:
    evidence = gather_job(tmp_path, slow={2: 1.4})
    counters = [
        {"host": f"host{host}", "gpu": 0, "name": "DCGM_FI_DEV_SM_CLOCK", "value": 900.0 if host == 1 else 1900.0}
        for host in range(4)
    ]
    verdict = judge(Evidence(**{**vars(evidence), "counters": counters}))
    assert "host1: DCGM_FI_DEV_SM_CLOCK was 900, of other hosts 1900" in verdict.why_sure


@pytest.mark.campaign
def test_of_12288_ranks_the_slow_host_is_found(tmp_path: Path) -> None:
    """Sums of 12,288 ranks and 6 steps, host 700 slow by 12 %."""
    ranks, steps = 12_288, 6
    rank = np.tile(np.arange(ranks), steps)
    step = np.repeat(np.arange(1, steps + 1), ranks)
    slow = np.where(rank // 8 == 700, 1.12, 1.0) * (1 + 0.005 * np.random.default_rng(0).standard_normal(len(rank)))
    begin = step * 10**9
    compute = (6e8 * slow).astype(np.int64)
    rows = []
    texts = pa.array([f"h{number:04}" for number in range(ranks // 8)])
    hosts = pa.DictionaryArray.from_arrays(pa.array(rank // 8, pa.int32()), texts)
    for kind, start, length in (
        ("step", begin, np.full(len(rank), 700_000_000)),
        ("forward", begin, compute),
        ("wait", begin + compute, 690_000_000 - compute),
    ):
        constant = {name: pa.DictionaryArray.from_arrays(np.zeros(len(rank), np.int32), [text])
                    for name, text in (("kind", kind), ("name", ""), ("group", ""))}  # fmt: skip
        numbers = {"attempt": 0, "chunk": -1, "micro_batch": -1, "peer": -1, "bytes": 0}
        columns = {"host": hosts, "rank": rank, "step": step, "start_ns": start, "end_ns": start + length, **constant}
        columns |= {name: np.full(len(rank), value) for name, value in numbers.items()}
        arrays = [
            columns[f.name] if f.name in ("host", *constant) else pa.array(columns[f.name], f.type) for f in SPANS
        ]
        rows.append(pa.table(arrays, schema=SPANS))
    spans = pa.concat_tables(rows).unify_dictionaries().sort_by([("rank", "ascending"), ("start_ns", "ascending")])
    phases, steps_table = sums(spans)
    for name, part in (("phases", phases), ("steps", steps_table)):
        write_part(tmp_path / "telemetry", name, "h0000", part, 0, 1)
    verdict = judge(gather(tmp_path))
    assert verdict.limit is not None and verdict.limit.hosts == ("h0700",)
    assert verdict.limit.ranks == tuple(range(5600, 5608))
    assert verdict.sentence.startswith("Host h0700 (ranks 5600, 5601")


@pytest.mark.campaign
@pytest.mark.skipif(not (SHARED / "straggler-analysis").is_dir(), reason="needs ByteDance's published traces")
def test_the_published_guilty_worker(tmp_path: Path) -> None:
    import_traces([SHARED / "straggler-analysis/trace-AR.parquet"], tmp_path / "run")
    verdict = judge(gather(tmp_path / "run"))
    assert verdict.limit is not None and verdict.limit.cause == "slow rank" and verdict.limit.ranks == (0,)
    assert verdict.limit.hosts == ("dp0-stage0",) and verdict.sureness == "certain"
    assert verdict.limit.share == pytest.approx(0.56, abs=0.02)


def test_it_is_a_pure_function_of_values() -> None:
    """No folder, no database: judges of other rooms hand over tables of their own."""
    ranked = [
        {"rank": rank, "host": f"h{rank}", "stage": 0, "steps": 30, "peers": 8, "own_s": 1.5 if rank == 3 else 1.0,
         "peers_s": 1.0, "excess": 0.5 if rank == 3 else 0.0, "slow_share": 1.0 if rank == 3 else 0.0}
        for rank in range(8)
    ]  # fmt: skip
    evidence = Evidence(
        "runs/x",
        ranks=8,
        hosts=8,
        steps=30,
        times=[{"step": step, "median_s": 2.0} for step in range(30)],
        breakdown={"forward": 1.0, "wait": 0.9, "step": 2.0},
        slow=SlowRanks(ranked, [ranked[3]], []),
        host_of={rank: f"h{rank}" for rank in range(8)},
    )
    verdict = judge(evidence)
    assert verdict.limit is not None and verdict.limit.ranks == (3,) and verdict.limit.share == 0.25
    assert math.isclose(verdict.limit.lost_s, 0.5)
    assert judge(evidence) == verdict and json.dumps(verdict.sentence)
