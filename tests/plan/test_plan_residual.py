"""What steps take beyond the model: where it is added, where not, and how it is given and shown."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan_command import command as plan
from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, load_cluster
from phalanx.plan.overheads import JUDGED, LEARNT, OWN_SPREAD, JudgedSteps, residual_of
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.software import (
    DEEPSPEED,
    DEEPSPEED_ZERO3,
    FSDP2,
    FSDP2_COMPILED,
    MEGATRON_2022,
    MEGATRON_CORE,
    PHALANX,
    SOFTWARE,
)
from phalanx.plan.types import Job, Model, Residual, Strategy
from phalanx.plan.validate.assumptions import LATER
from phalanx.plan.validate.published import TABLES, job_of, read_table, strategy_of

ROOT = Path(__file__).parents[2]
HARDWARE = ROOT / "phalanx" / "plan" / "hardware"
GPT = str(ROOT / "configs" / "plan" / "gpt-175b.toml")
ON = (
    "--software",
    "megatron-core",
    "--devices",
    "512",
    "parallel.pipeline=8",
    "parallel.tensor=8",
    "train.micro_batch=1",
)
MODEL = Model(layers=32, hidden=4096, heads=32, vocab_rows=32000, max_sequence=4096)
JOB = Job(MODEL, sequence=4096, global_batch=64, software=MEGATRON_CORE)
SPREAD = Strategy(shard=8, tensor=8, micro_batch=1, recompute="full")
CLUSTER = load_cluster("h100_400g", 64)
KERNELS = ("norm", "residual", "mlp_activation", "attention_layout", "bias")


def _plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(plan, [GPT, *arguments])


def test_kernels_between_products_take_longer_and_nothing_else_does() -> None:
    job = replace(JOB, software=replace(MEGATRON_2022, host_factor=1e-9))
    alone = replace(SPREAD, shard=64, tensor=1)
    plain, slower = (predict(replace(job, residual=Residual(kernels)), alone, CLUSTER) for kernels in (1.0, 3.0))
    before, after = ({part.path: part.seconds for part in each.parts} for each in (plain, slower))
    for name in KERNELS:
        launch_s = 3 * before[f"compute/{name}"] - after[f"compute/{name}"]  # kernels start no more often
        assert 0 <= launch_s < 0.1 * after[f"compute/{name}"], name
    for name in ("mlp", "attention_projections", "attention", "softmax", "head", "loss"):
        assert after[f"compute/{name}"] == before[f"compute/{name}"], name
    assert slower.memory == plain.memory


def test_what_is_learnt_is_added_unless_a_job_says_so_itself() -> None:
    learnt, plain = predict(JOB, SPREAD, CLUSTER), predict(replace(JOB, residual=Residual()), SPREAD, CLUSTER)
    assert learnt == predict(replace(JOB, residual=LEARNT), SPREAD, CLUSTER)
    assert learnt.step_s > 1.02 * plain.step_s and learnt.memory == plain.memory
    assert learnt.interval_s and plain.interval_s is None


def test_an_efficiency_divides_the_step_and_the_parts_still_sum() -> None:
    plain = predict(replace(JOB, residual=Residual()), SPREAD, CLUSTER)
    half = predict(replace(JOB, residual=Residual(efficiency=0.5)), SPREAD, CLUSTER)
    assert half.step_s == pytest.approx(2 * plain.step_s)
    assert sum(part.seconds for part in half.parts) == pytest.approx(half.step_s)
    assert half.seconds("efficiency") == pytest.approx(plain.step_s) and plain.seconds("efficiency") == 0
    assert half.mfu == pytest.approx(plain.mfu / 2)


def test_bounds_of_a_search_hold_with_it() -> None:
    job = replace(JOB, residual=Residual(4.0, 0.7))
    for tensor in (1, 4, 8):
        strategy = replace(SPREAD, tensor=tensor, shard=64 // tensor)
        bound = score(job, replace(strategy, tensor=np.array([tensor]), shard=np.array([64 // tensor])), CLUSTER)
        exact_s = predict(job, strategy, CLUSTER).step_s
        assert 0.9 * exact_s < bound.step_s[0] <= exact_s


def test_it_holds_for_gpus_that_it_is_learnt_on_and_for_no_machine_that_was_measured() -> None:
    assert residual_of(JOB, load_cluster("h100_400g", 8)) == residual_of(JOB, load_cluster("selene", 8)) == LEARNT
    measured = load_cluster("cpu_host", 1)
    assert residual_of(JOB, measured) == residual_of(JOB, load_cluster("frontier", 8)) == Residual()
    assert residual_of(JOB, measured, 0.9) == Residual(1.0, 0.9, 0.0)
    assert residual_of(JOB, load_cluster("h200_400g", 8), 0.9) == Residual(LEARNT.kernels, 0.9, OWN_SPREAD)


def test_where_steps_were_judged_is_what_the_published_tables_say() -> None:
    """Programs that a user can name, precisions and numbers of ranks; none has a mixture."""
    found: dict[str, list[tuple[str, int]]] = {}
    for setting in LATER:
        named = setting.as_named()
        for row in read_table(TABLES / f"{setting.table}.csv"):
            job, strategy = job_of(row, named), strategy_of(row, named)
            assert not job.model.experts
            found.setdefault(job.software.name, []).append((job.precision, int(strategy.world_size)))
    found.pop("internevo")  # no program that a user can name
    told = {
        name: JudgedSteps(
            frozenset(precision for precision, _ in steps), min(n for _, n in steps), max(n for _, n in steps)
        )
        for name, steps in found.items()
        if name in SOFTWARE
    }
    assert told.keys() == found.keys() and told == dict(JUDGED)


@pytest.mark.parametrize(
    ("changes", "devices", "why"),
    [
        ({"software": PHALANX}, 64, "no published steps of phalanx"),
        ({"software": SOFTWARE["megatron-lm-2021"]}, 64, "no published steps of megatron-lm-2021"),
        ({"software": DEEPSPEED_ZERO3}, 64, "no published steps of deepspeed-zero3"),
        ({"fp8": True}, 64, "no published steps of megatron-core in fp8"),
        ({"precision": "fp32"}, 64, "no published steps of megatron-core in fp32"),
        ({"precision": "fp16"}, 64, "no published steps of megatron-core in fp16"),
        ({"model": replace(MODEL, experts=8)}, 64, "no published steps of mixtures of experts"),
        ({"software": FSDP2}, 4096, "published steps of fsdp2 had 8 to 128 ranks"),
        ({}, 2, "published steps of megatron-core had 8 to 16,384 ranks"),
    ],
)
def test_outside_of_what_was_judged_the_plain_model_is_told_without_an_interval(
    changes: dict[str, Any], devices: int, why: str
) -> None:
    job, cluster = replace(JOB, **changes), load_cluster("h100_400g", devices)
    layout = replace(SPREAD, tensor=min(8, devices), shard=max(1, devices // 8))
    job = replace(job, global_batch=max(64, devices))
    told, plain = (predict(each, layout, cluster) for each in (job, replace(job, residual=Residual())))
    assert told.unjudged == why and told.interval_s is None and told.step_s == plain.step_s
    score_s = score(job, replace(layout, tensor=np.array([layout.tensor])), cluster).step_s[0]
    assert score_s == pytest.approx(score(replace(job, residual=Residual()), layout, cluster).step_s[0])


def test_a_config_in_fp8_says_that_it_was_not_judged() -> None:
    layout = ("--devices", "512", "parallel.pipeline=32", "parallel.shard=16", "train.micro_batch=1")
    words = ["--cluster", "h100_400g", "--software", "megatron-core", *layout, "train.precision=fp8"]
    shown = _plan(*words)
    assert "8 of 10" not in shown.output
    assert "not judged (no published steps of megatron-core in fp8)" in " ".join(shown.output.split())
    told = json.loads(_plan(*words, "--json").output)
    assert told["not_judged"] == "no published steps of megatron-core in fp8" and told["step_interval_s"] is None


def _cluster_of(folder: Path, device: str, like: str, **numbers: str) -> Cluster:
    """`like` under another name, with other numbers, in a copy of its cluster."""
    text = (HARDWARE / "devices" / f"{like}.toml").read_text()
    for key, value in numbers.items():
        text, times = re.subn(rf"^{key} = {{ value = [^,]+", f"{key} = {{ value = {value}", text, flags=re.MULTILINE)
        assert times == 1
    (folder / f"{device}.toml").write_text(text)
    cluster = (HARDWARE / "clusters" / "h100_400g.toml").read_text()
    (folder / "mine.toml").write_text(cluster.replace('"h100_sxm"', f'"{device}.toml"'))
    return load_cluster(folder / "mine.toml", 64)


@pytest.mark.parametrize("like", ["h100_sxm", "h200_sxm", "a100_sxm_80gb"])
def test_a_device_is_what_its_numbers_say_not_what_its_file_is_called(like: str, tmp_path: Path) -> None:
    copied = _cluster_of(tmp_path, "ours", like, memory_bytes="85.9e9" if "h200" not in like else "141e9")
    assert residual_of(JOB, copied) == LEARNT
    if like == "h100_sxm":
        assert predict(JOB, SPREAD, copied).step_s == predict(JOB, SPREAD, CLUSTER).step_s


@pytest.mark.parametrize(
    "numbers", [{"peak_half_flops_per_s": "1500e12"}, {"memory_bytes_per_s": "2e12"}, {"memory_bytes": "96e9"}]
)
def test_an_invented_device_under_a_known_name_has_no_correction(numbers: dict[str, str], tmp_path: Path) -> None:
    assert residual_of(JOB, _cluster_of(tmp_path, "h100_sxm", "h100_sxm", **numbers)) == Residual()


def test_a_clusters_file_may_say_its_efficiency(tmp_path: Path) -> None:
    text = (ROOT / "phalanx/plan/hardware/clusters/h100_400g.toml").read_text()
    line = 'efficiency_ratio = { value = 0.93, mark = "measured", source = "run 17", date = "2026-11" }\n'
    (tmp_path / "mine.toml").write_text(line + text)
    for kind, name in (("devices", "h100_sxm"), ("links", "h100_nvlink")):
        assert (ROOT / "phalanx/plan/hardware" / kind / f"{name}.toml").is_file()
    cluster = load_cluster(tmp_path / "mine.toml", 64)
    assert residual_of(JOB, cluster) == Residual(LEARNT.kernels, 0.93, OWN_SPREAD)
    assert residual_of(JOB, cluster, 0.8).efficiency == 0.8
    (tmp_path / "mine.toml").write_text(line.replace("0.93", "93") + text)
    with pytest.raises(UserError, match="efficiency_ratio = 93"):
        load_cluster(tmp_path / "mine.toml", 64)


@pytest.mark.parametrize("field", ["kernels", "efficiency", "spread"])
def test_a_residual_that_cannot_be_is_refused(field: str) -> None:
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(UserError, match=f"Residual.{field}"):
            predict(replace(JOB, residual=replace(Residual(), **{field: value})), SPREAD, CLUSTER)


def test_a_prediction_is_told_with_its_interval() -> None:
    told = json.loads(_plan("--cluster", "selene", *ON, "--json").output)
    low, high = told["step_interval_s"]
    assert (low, high) == pytest.approx([told["step_s"] * math.exp(s * LEARNT.spread) for s in (-1, 1)])
    assert (told["interval_share_ratio"], told["efficiency_ratio"]) == (0.8, 1.0)
    shown = _plan("--cluster", "selene", *ON).output
    assert re.search(r"^8 of 10 such steps: [\d.]+ s to [\d.]+ s, by published steps left out$", shown, re.MULTILINE)


def test_ones_own_efficiency_makes_it_longer_and_surer() -> None:
    told = [
        json.loads(_plan("--cluster", "selene", *ON, "--json", *more).output) for more in ([], ["--efficiency=0.8"])
    ]
    assert told[1]["step_s"] == pytest.approx(told[0]["step_s"] / 0.8)
    widths = [math.log(each["step_interval_s"][1] / each["step_interval_s"][0]) for each in told]
    assert widths == pytest.approx([2 * LEARNT.spread, 2 * OWN_SPREAD])
    assert told[1]["parts"][-1]["path"] == "efficiency" and told[1]["efficiency_ratio"] == 0.8


def test_an_efficiency_in_per_cent_is_refused() -> None:
    for given in ("93", "0", "nan", "-1"):
        error = _plan("--cluster", "selene", *ON, "--efficiency", given).exception
        assert isinstance(error, UserError) and error.field == "--efficiency" and "0.93" in error.cure


def test_a_machine_without_one_is_told_without_an_interval() -> None:
    words = ("model.layers=2", "model.hidden=256", "model.heads=4", "train.global_batch=8", "train.micro_batch=1")
    told = json.loads(_plan("--cluster", "cpu_host", "--devices", "1", *words, "--json").output)
    assert told["step_interval_s"] is None and told["interval_share_ratio"] is None
    assert "8 of 10" not in _plan("--cluster", "cpu_host", "--devices", "1", *words).output


def test_a_search_is_of_the_same_steps_as_a_prediction() -> None:
    narrow = [
        word
        for where in ("tensor=8", "pipeline=8", "zero=1", "micro_batch=1", "recompute=full")
        for word in ("--where", where)
    ]
    searched = _plan("--cluster", "selene", "--devices", "128", "--search", *narrow, "--efficiency=0.9", "--json")
    told = json.loads(searched.output)
    assert told["prediction_of_best"]["efficiency_ratio"] == 0.9
    assert told["prediction_of_best"]["step_s"] == told["best"][0]["step_s"]


@pytest.mark.parametrize("name", ["megatron-core", "fsdp2", "fsdp2-compiled", "deepspeed", "deepspeed-zero3"])
def test_programs_of_today_can_be_predicted(name: str) -> None:
    zero = {"megatron-core": "1", "deepspeed": "2"}.get(name, "3")
    how = ("parallel.shard=64", f"parallel.zero={zero}")  # deepspeed's stages keep all weights: that does not fit
    done = _plan("--cluster", "h100_400g", "--devices", "64", "--software", name, *how, "--json")
    assert json.loads(done.output)["step_s"] > 0 and SOFTWARE[name].name == name


def test_what_programs_overlap_fuse_and_compute_again() -> None:
    def step_s(software: object, **changes: object) -> float:
        job = replace(JOB, software=software)  # type: ignore[arg-type]
        return predict(job, replace(Strategy(shard=64, micro_batch=1, zero=1), **changes), CLUSTER).step_s  # type: ignore[arg-type]

    assert step_s(DEEPSPEED) > step_s(DEEPSPEED_ZERO3)  # the same, overlapped
    assert step_s(FSDP2, zero=3) > step_s(FSDP2_COMPILED, zero=3)
    assert step_s(DEEPSPEED_ZERO3, zero=3, recompute="full") > step_s(
        replace(DEEPSPEED_ZERO3, stops_early=True), zero=3, recompute="full"
    )
    assert step_s(MEGATRON_CORE) < step_s(FSDP2)
