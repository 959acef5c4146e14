"""`phalanx detect hang` on dumps: real incidents, jobs that were generated, files of all kinds, words."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from support.flight_jobs import Fault, Run, data_parallel, megatron
from support.hang_cases import FAMILIES, LAYOUTS, HangCase, draw, judged, ranks_named, ranks_possible

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.detect.hangs.dump_files import DumpedJob, dump_files, rank_of, read_dumped_job
from phalanx.detect.hangs.flight_records import GroupId, MemberTexts
from phalanx.detect.hangs.hang_judge import HangContext, HangPolicy, judge_hang
from phalanx.detect.hangs.rank_places import RankPlaces, dimension_of, read_hosts, read_layout

DUMPS = Path(__file__).parents[3] / "shared/data/traces/flight-recorder"
real_dumps = pytest.mark.skipif(not DUMPS.exists(), reason="real dumps are not at hand")


def asked(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, ["hang", *words, "--json"])
    assert done.exit_code in (0, 1, 3), done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def written(folder: Path, dumps: Mapping[int, Any], *, as_json: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, dump in dumps.items():
        content = json.dumps(dump).encode() if as_json else pickle.dumps(dump)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
    return folder


def stopped(rank: int = 5) -> Run:
    """tp2·pp2·dp2, of which a rank launches nothing more."""
    job = megatron(2, 2, 2, 2, micro_batches=2, steps=2)
    run = Run(job, [Fault(rank, len(job.programs[rank]) // 2, "host")])
    assert run.has_hung() and run.struck == {rank}
    return run


def dumps_of(run: Run, *lost: int) -> dict[int, Any]:
    return {rank: run.dump(rank, made_before=rank % 3) for rank in run.job.ranks if rank not in lost}


# Real incidents


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", [12, 14]), ("lock_gil_1st", [9, 14])])
def test_real_incidents_name_all_injected_ranks_and_nobody_else(incident: str, guilty: list[int]) -> None:
    found = asked(str(DUMPS / incident))
    accused = [who["ranks"][0] for one in found["detections"] for who in one["who"]]
    assert accused == guilty
    assert found["sentence"].endswith("; 14 others wait.")
    assert found["detections"][0]["advice"] == "check"


@real_dumps
def test_the_first_line_says_where_and_which_call() -> None:
    found = asked(str(DUMPS / "lock_gil_1st"), "--layout", "pp2,dp2,tp4")
    assert found["sentence"] == (
        "Rank 9 (stage 1, replicate 0, tensor 1) and rank 14 (stage 1, replicate 1, tensor 2) "
        "never entered all-to-all 45265 of group expert-1; 14 others wait."
    )
    first = found["detections"][0]["figures"]
    assert (first["number"], first["group"], first["dimension"], first["waiting"]) == (45265, "expert-1", "expert", 14)
    (of_experts,) = [row for row in found["tables"]["waits"] if row["number"] == 45265]
    assert of_experts["not_arrived"] == [9, 14] and of_experts["waiting"] == [8, 10, 11, 12, 13, 15]


# Generated jobs


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_innocent_is_named_whatever_befalls_a_job(family: str) -> None:
    cases = [case for seed in range(4) if (case := draw(family, seed, LAYOUTS[:7])) is not None]
    assert cases
    for case in cases:
        verdict = judged(case)
        assert ranks_named(verdict) <= case.guilty, verdict.sentence
        if case.guilty and ranks_possible(verdict):
            assert case.guilty & (ranks_possible(verdict) | ranks_named(verdict)), verdict.sentence


@pytest.mark.parametrize("family", ["host stops", "empty dump", "no dump", "another operation", "another size"])
def test_the_guilty_is_named_exactly(family: str) -> None:
    cases = [case for seed in range(5) if (case := draw(family, seed, LAYOUTS[:7])) is not None]
    assert all(ranks_named(judged(case)) == case.guilty for case in cases)


def test_mistakes_of_programs_blame_no_machine() -> None:
    case = next(case for seed in range(9) if (case := draw("another size", seed)) is not None)
    verdict = judged(case)
    assert verdict.detections[0].what == "mismatched call" and verdict.detections[0].advice == "program"
    assert not verdict.blamed_ranks and not verdict.blamed_hosts


def test_a_healthy_job_has_nobody_to_blame() -> None:
    verdict = judged(FAMILIES["healthy"](Random(1), data_parallel(4), "healthy"))  # type: ignore[arg-type]
    assert verdict.exit_status == 0 and verdict.sentence == "Nothing wrong was found (4 dumps of 4 ranks)."


# Ranks that left nothing


def test_a_rank_that_left_no_dump_is_suspected_where_the_waiting_ends_at_it(tmp_path: Path) -> None:
    job = megatron(2, 2, 2, 2, micro_batches=2, steps=2)
    run = Run(job, [Fault(6, len(job.programs[6]) // 2, "dead")])
    hosts = tmp_path / "hosts"
    hosts.write_text("h0 slots=4\nh1 slots=4\n")
    dumps = {rank: dump for rank, dump in dumps_of(run).items() if dump is not None}
    found = asked(str(written(tmp_path / "dumps", dumps)), "--hosts", str(hosts))
    (one,) = found["detections"]
    assert one["what"] == "silent rank" and one["confidence"] == 0.9
    assert [who["name"] for who in one["who"]] == ["6"] and one["who"][0]["hosts"] == ["h1"]
    assert found["sentence"].startswith("Rank 6 (host h1, stage 1,") and "left no dump" in found["sentence"]


def test_more_lost_dumps_than_are_waited_for_make_it_less_sure() -> None:
    job = data_parallel(8)
    run = Run(job, [Fault(6, len(job.programs[6]) // 2, "dead")])
    dumps = {rank: dump for rank, dump in dumps_of(run, 1).items() if dump is not None}
    verdict = judged(HangCase("", frozenset({6}), dumps, 8))
    (one,) = verdict.detections
    assert one.confidence == 0.6 and one.advice == "watch" and not verdict.blamed_ranks
    assert ranks_possible(verdict) == {1, 6} and "at least one of them hangs" in one.sentence


def test_a_lost_dump_beside_a_guilty_rank_is_said_and_not_blamed() -> None:
    run = stopped()
    verdict = judged(HangCase("", frozenset({5}), dumps_of(run, 0), 8))
    assert ranks_named(verdict) == {5}
    assert verdict.abstains == ("rank 0 left no dump; look why, they may wait like the others",)


def test_nothing_is_said_of_a_job_that_lost_most_of_its_dumps() -> None:
    dumps = dumps_of(stopped(), 1, 2, 3, 4, 5, 6)
    verdict = judged(HangCase("", frozenset({5}), dumps, 8))
    assert not verdict.detections or not verdict.blamed_ranks


def test_dumps_of_a_moment_ago_may_be_of_a_healthy_job() -> None:
    run = stopped()
    job = DumpedJob()
    for rank, dump in dumps_of(run).items():
        job.add(rank, dump)
    context = HangContext(RankPlaces(job.ranks, job.groups), job.records, job.texts)
    since_s = min(row["since_unix_s"] for row in judge_hang(context).tables["waits"])
    soon = HangContext(context.places, job.records, job.texts, written_s=since_s + 2)
    assert judge_hang(soon).exit_status == 3 and "may just be running" in judge_hang(soon).sentence
    assert judge_hang(soon, HangPolicy(least_wait_s=1)).blamed_ranks == (5,)


# Files


@pytest.mark.parametrize("as_json", [False, True])
def test_folders_files_and_patterns_of_either_form_are_read(tmp_path: Path, as_json: bool) -> None:
    folder = written(tmp_path / "dumps", dumps_of(stopped()), as_json=as_json)
    (folder / "reference.txt").write_text("notes")
    for words in ([str(folder)], [str(folder / "nccl_*")], [str(one) for one in folder.glob("nccl*")]):
        assert asked(*words)["detections"][0]["who"][0]["ranks"] == [5]


def test_what_is_no_dump_is_said_and_the_rest_is_judged(tmp_path: Path) -> None:
    folder = written(tmp_path / "dumps", dumps_of(stopped()))
    (folder / "junk_9").write_bytes(b"\x80\x04cos\nsystem\n.")
    found = asked(str(folder))
    assert found["detections"][0]["who"][0]["ranks"] == [5]
    assert len(found["tables"]["problems"]) == 1 and "junk_9" in found["abstains"][0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "nothing to judge"),
        (["/no/such/place"], "neither a run folder nor dumps"),
        (["--pids", "a"], "are no processes"),
    ],
)
def test_bad_input_is_refused_with_a_cure(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(command, ["hang", *words])
    assert isinstance(done.exception, UserError) and problem in done.exception.problem and done.exception.cure


def test_a_folder_without_any_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no dumps"):
        dump_files([str(tmp_path)])
    (tmp_path / "dump_1").write_text("nothing")
    with pytest.raises(UserError, match="no dump can be read"):
        read_dumped_job(dump_files([str(tmp_path)]))


def test_a_rank_is_known_by_what_its_dump_says_before_its_files_name() -> None:
    dump = stopped().dump(6)
    texts = MemberTexts()
    assert dump is not None
    assert rank_of("host3_local_2", dump, texts) == 6
    assert rank_of("nccl_trace_rank_6", dump, texts) == 6
    assert rank_of("trace.bin", {"entries": [], "rank": 3}, texts) == 3
    assert rank_of("dump_11.pickle", {"entries": []}, texts) == 11
    assert rank_of("trace", {"entries": []}, texts) is None


# Places


@pytest.mark.parametrize(
    ("description", "dimension"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("mesh_dp_shard", "shard"),
        ("mesh_pp", "pipeline"),
        ("default_pg", "all"),
        ("shard·context", "shard·context"),
        ("EMBEDDING_GROUP", "embedding"),
    ],
)
def test_descriptions_of_frameworks_are_known(description: str, dimension: str) -> None:
    assert dimension_of(description) == dimension


def test_a_group_without_a_description_is_known_by_the_layout() -> None:
    layout = Layout(pipeline=2, shard=2, tensor=2)
    group = GroupId("undefined", "1 3")
    places = RankPlaces(range(8), {group: (1, 3), GroupId("undefined", "0 2"): (0, 2)}, {1: "h0"}, layout)
    assert places.dimension("undefined", (1, 3)) == "shard" and places.group_name(group, (1, 3)) == "shard-1"
    assert places.describe(1) == "rank 1 (host h0, stage 0, shard 0, tensor 1)"


@pytest.mark.parametrize("text", ["pp4·dp2·tp2", "pipeline=4,replicate=2,tensor=2", "tp2 pp4 dp2"])
def test_layouts_are_read_as_people_write_them(text: str) -> None:
    assert read_layout(text) == Layout(pipeline=4, replicate=2, tensor=2)


@pytest.mark.parametrize("text", ["", "pp", "zz4", "pp2 pp2", "pp0"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        read_layout(text)


@pytest.mark.parametrize(
    "text", ["a 0\na 1\nb 2\nb 3", "a slots=2\nb slots=2", "# hosts\na:2\nb:2\n", "a 0-1\nb 2 3\n", "b 2-3\na 0 1"]
)
def test_hosts_are_read_in_the_forms_of_launchers(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hosts(tmp_path / "hosts", 4) == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_a_line_for_each_rank_is_enough(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\nb\n")
    assert read_hosts(tmp_path / "hosts", 4) == {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.mark.parametrize("text", ["a\nb\n", "a slots=2\nb", "a:4\nb:4", "a:1\nb:1", "a 0-2\nb 2-3"])
def test_hosts_that_leave_it_open_where_a_rank_is_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError) as refused:
        read_hosts(tmp_path / "hosts", 4)
    assert "one line for each rank" in refused.value.cure


@pytest.mark.parametrize(
    "options",
    [["--layout", "pp2,dp2"], ["--layout", "pp2,dp2,tp4"], ["--ranks", "4"], ["--layout", "dp8", "--ranks", "16"]],
)
def test_options_that_contradict_the_dumps_are_refused(tmp_path: Path, options: list[str]) -> None:
    folder = written(tmp_path / "dumps", dumps_of(stopped()))
    done = CliRunner().invoke(command, ["hang", str(folder), *options])
    assert isinstance(done.exception, UserError) and done.exception.cure and "8" in done.exception.problem
    assert CliRunner().invoke(command, ["hang", str(folder), "--layout", "pp2,dp2,tp2"]).exit_code == 1


def test_what_is_no_dump_is_refused_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:x:1::\n")
    with pytest.raises(UserError, match="neither a pickle nor JSON"):
        read_dumped_job([tmp_path / "shadow"])


def test_hosts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a x y\n")
    for path in (tmp_path / "hosts", tmp_path / "none"):
        with pytest.raises(UserError):
            read_hosts(path, 4)
