"""What steps take beyond the model: where it is added, where not, and how it is given and shown."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan_command import command as plan
from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, load_cluster
from phalanx.plan.overheads import LEARNT, OWN_SPREAD, residual_of
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.software import (
    DEEPSPEED,
    DEEPSPEED_ZERO3,
    FSDP2,
    FSDP2_COMPILED,
    MEGATRON_2022,
    MEGATRON_CORE,
    SOFTWARE,
)
from phalanx.plan.types import Job, Model, Residual, Strategy

ROOT = Path(__file__).parents[2]
HARDWARE = ROOT / "phalanx" / "plan" / "hardware"
GPT = str(ROOT / "configs" / "plan" / "gpt-175b.toml")
ON = ("--devices", "512", "parallel.pipeline=8", "parallel.tensor=8", "train.micro_batch=1")
MODEL = Model(layers=32, hidden=4096, heads=32, vocab_rows=32000, max_sequence=4096)
JOB = Job(MODEL, sequence=4096, global_batch=64)
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
    assert residual_of(load_cluster("h100_400g", 8)) == residual_of(load_cluster("selene", 8)) == LEARNT
    assert residual_of(load_cluster("cpu_host", 1)) == residual_of(load_cluster("frontier", 8)) == Residual()
    assert residual_of(load_cluster("cpu_host", 1), 0.9) == Residual(1.0, 0.9, 0.0)
    assert residual_of(load_cluster("h200_400g", 8), 0.9) == Residual(LEARNT.kernels, 0.9, OWN_SPREAD)


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
    assert residual_of(copied) == LEARNT
    if like == "h100_sxm":
        assert predict(JOB, SPREAD, copied).step_s == predict(JOB, SPREAD, CLUSTER).step_s


@pytest.mark.parametrize(
    "numbers", [{"peak_half_flops_per_s": "1500e12"}, {"memory_bytes_per_s": "2e12"}, {"memory_bytes": "96e9"}]
)
def test_an_invented_device_under_a_known_name_has_no_correction(numbers: dict[str, str], tmp_path: Path) -> None:
    assert residual_of(_cluster_of(tmp_path, "h100_sxm", "h100_sxm", **numbers)) == Residual()


def test_a_clusters_file_may_say_its_efficiency(tmp_path: Path) -> None:
    text = (ROOT / "phalanx/plan/hardware/clusters/h100_400g.toml").read_text()
    line = 'efficiency_ratio = { value = 0.93, mark = "measured", source = "run 17", date = "2026-11" }\n'
    (tmp_path / "mine.toml").write_text(line + text)
    for kind, name in (("devices", "h100_sxm"), ("links", "h100_nvlink")):
        assert (ROOT / "phalanx/plan/hardware" / kind / f"{name}.toml").is_file()
    cluster = load_cluster(tmp_path / "mine.toml", 64)
    assert residual_of(cluster) == Residual(LEARNT.kernels, 0.93, OWN_SPREAD)
    assert residual_of(cluster, 0.8).efficiency == 0.8
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
