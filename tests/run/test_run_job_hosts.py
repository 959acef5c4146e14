"""Judges know machines and ranks, the driver hosts of its job: what is told and acted upon has the job's names."""

from __future__ import annotations

from pathlib import Path

from support.straggler_traces import BEGIN_NS, MadeUpJob, make_spans, write_made_up_run

from phalanx.detect.detection import Culprit, Detection
from phalanx.run.driver.job_hosts import Placement, as_job_names, ranks_by_machine
from phalanx.run.driver.judge_process import judged_run

PLACEMENT = Placement(("a", "b", "c"), 2)
SLOW = MadeUpJob(columns=4, stages=2, slow={5: (1.5, 1)})  # ranks are on machine h0, all eight


def found(*who: Culprit, sentence: str = "h1 is slow") -> Detection:
    return Detection("slow host", sentence, who, why=("by h1's own spans",), then=("`phalanx check` on h1",))


def test_a_machine_whose_ranks_are_all_on_one_host_has_its_name_in_words_too() -> None:
    machines = {"h0": [0, 1], "h1": [2, 3], "h11": [4, 5]}
    told = as_job_names(found(Culprit("host", "h1", (), ("h1",))), "machines", PLACEMENT, machines)
    assert told.who == (Culprit("host", "b", (), ("b",)),)
    assert (told.sentence, *told.why, *told.then) == ("b is slow", "by b's own spans", "`phalanx check` on b")
    other = found(Culprit("host", "h1", (), ("h1",)), sentence="h1 is slow, h11, h1-x and /h1.log are not")
    assert as_job_names(other, "machines", PLACEMENT, machines).sentence == "b is slow, h11, h1-x and /b.log are not"


def test_of_several_hosts_on_one_machine_the_rank_says_which() -> None:
    machines = {"h1": [0, 1, 2, 3, 4, 5]}
    told = as_job_names(found(Culprit("rank", "4", (4,), ("h1",))), "stragglers", PLACEMENT, machines)
    assert told.who == (Culprit("rank", "4", (4,), ("c",)),) and told.sentence == "c is slow"
    two = found(Culprit("rank", "4", (4,), ("h1",)), Culprit("rank", "0", (0,), ("h1",)))
    told = as_job_names(two, "stragglers", PLACEMENT, machines)
    assert [one.hosts for one in told.who] == [("c",), ("a",)] and told.sentence == two.sentence
    host = as_job_names(found(Culprit("host", "h1", (2, 3), ("h1",))), "stragglers", PLACEMENT, machines)
    assert host.who == (Culprit("host", "b", (2, 3), ("b",)),)


def test_a_machine_called_like_another_host_of_the_job_is_not_taken_for_it() -> None:
    named = found(Culprit("rank", "4", (4,), ("a",)))
    assert as_job_names(named, "stragglers", PLACEMENT, {"a": [4, 5]}).who[0].hosts == ("c",)
    # What ranks say of themselves has the job's names, and may be of an attempt in which they were elsewhere.
    assert as_job_names(named, "corruption", PLACEMENT, {"a": [4, 5]}) == named
    nobody = found()
    assert as_job_names(nobody, "stragglers", PLACEMENT, {}) == nobody


def test_spans_of_an_attempt_before_name_nobody(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, SLOW, make_spans(SLOW))
    assert ranks_by_machine(tmp_path, BEGIN_NS / 1e9) == {"h0": list(range(8))}
    placement = Placement(tuple("stuvwxyz"), 1, BEGIN_NS / 1e9)
    (verdict,) = judged_run(tmp_path, ("stragglers",), placement)
    assert verdict.blamed_hosts == ("x",) and "(host x, stage 1)" in verdict.detections[0].sentence
    later = Placement(("x", *"tuvwsyz"), 1, BEGIN_NS / 1e9 + 3600)  # it has begun, and no step of it is written yet
    assert ranks_by_machine(tmp_path, later.since_unix_s) == {}
    assert list(judged_run(tmp_path, ("stragglers", "drift"), later)) == []
    assert ranks_by_machine(tmp_path / "none", 0.0) == {}
