"""Predict the step of a config on a cluster, or search its best layout: `plan` and `search`.

The one place where a run's config and the planner are both known; `phalanx plan` calls the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.data.config import configured_vocab_size
from phalanx.model.shapes import num_parameters
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.layout_choice import Judge, LayoutChoice, Machines, Need
from phalanx.plan.hardware.cluster import Cluster, cluster_names, load_cluster
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.jobs import MODEL, model_of
from phalanx.plan.overheads import residual_of
from phalanx.plan.predict import predict
from phalanx.plan.report.report_model import PredictionReport, prediction_json
from phalanx.plan.score import score
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.frontier import CostModel
from phalanx.plan.search.search import SearchResult, reliefs
from phalanx.plan.search.search import search as search_layouts
from phalanx.plan.software import LAYOUTS, PHALANX, software_named
from phalanx.plan.stages import Known
from phalanx.plan.types import Job, Precision, Prediction, Software, Strategy
from phalanx.train.config import RunConfig
from phalanx.train.derived.memory_fit import Fit, Passes, first_level, job_of, judge_of
from phalanx.train.derived.run_layout import choose, wanted_ranks
from phalanx.train.derived.run_numbers import complete_model, cpu_micro_batch, derive
from phalanx.train.predicted_cost import LOADER, OPTIMIZER, PASSES, WAITING, Expected

# Far above what anybody trains; up to there every layer, and every way to share a batch, can be gone through.
_MOST = {"model.layers": 100_000, "train.global_batch": 10_000_000, "data.sequence_length": 1_000_000_000}


@dataclass(frozen=True)
class Planned:
    """What a config has the planner predict. `remarks`: what was chosen, and why, a line each."""

    job: Job
    strategy: Strategy
    parameters: int
    total_tokens: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class SearchReport:
    """What a search found, and its fastest layout as `plan` would report it."""

    result: SearchResult
    best: PredictionReport


def plan(
    config: RunConfig,
    cluster: str | None,
    devices: int | None = None,
    *,
    name: str = "run",
    software: str | None = None,
    efficiency: float | None = None,
) -> PredictionReport:
    """Predict the step time, its parts and the memory of a run; what its layout leaves open is chosen as in training.

    Args:
        cluster: one that comes with Phalanx, or a ``.toml`` file.
        devices: where `config` gives no number.
        name: of the run, in the report.
        software: another program that trains, such as ``megatron-core``.
        efficiency: share of the predicted speed that your own steps reach.

    Raises:
        UserError: the cluster is not there, or the layout or the sizes are impossible.
    """
    _require_config(config)
    machine, remarks = cluster_of(config, cluster, devices)
    planned = as_efficient(plan_of(config, machine, program=software), machine, efficiency)
    planned = replace(planned, remarks=(*remarks, *planned.remarks))
    report = report_with(predict(planned.job, planned.strategy, machine), name, planned, machine)
    if report.fits:
        return report
    # Only then is it worth a search for milder settings on the same ranks.
    costs = _costs_of(planned.job, machine)
    return replace(report, reliefs=reliefs(planned.job, planned.strategy, SearchTarget.of(machine), costs))


def search(
    config: RunConfig,
    cluster: str | None,
    devices: int | None = None,
    *,
    where: Sequence[str] = (),
    top: int = 10,
    name: str = "run",
    software: str | None = None,
    efficiency: float | None = None,
) -> SearchReport:
    """Search the `top` fastest layouts of a run that fit; the layout of `config` itself is not looked at.

    Args:
        where: constraints, such as ``tensor=8`` or ``pipeline<=16``; the rest as for `plan`.

    Raises:
        UserError: nothing is possible, or nothing fits; or as `plan`.
    """
    _require_config(config)
    if top < 1:
        raise UserError("is no number of layouts", cure="give 1 or more", field="top", value=top)
    program, asked = program_named(software), parse(pairs(where, "where"))
    machine, remarks = cluster_of(config, cluster, devices)
    searched = as_efficient(_job_to_search(config, machine), machine, efficiency)
    job = searched.job if program is None else replace(searched.job, software=program)
    searched = replace(searched, job=job, remarks=(*remarks, *searched.remarks))
    result = search_layouts(job, SearchTarget.of(machine), _costs_of(job, machine), asked, top)
    return SearchReport(result, report_with(result.best[0], name, searched, machine))


def _require_config(config: RunConfig) -> None:
    if not isinstance(config, RunConfig):
        cure = "give what phalanx.load_config returns"
        raise UserError("is not a loaded config", cure=cure, field="config", value=str(config))


def pairs(texts: Sequence[str], field: str) -> Sequence[str]:
    """The same, refused where it is one text or a table: those would be gone through letter by letter, key by key."""
    if isinstance(texts, str | Mapping) or not all(isinstance(text, str) for text in texts):
        cure = 'give a list of texts, such as ["train.steps=3"]'
        raise UserError("is not a list of texts", cure=cure, field=field, value=str(texts))
    return texts


def _costs_of(job: Job, machine: Cluster) -> CostModel:
    known: Known = {}  # what predictions of one search have in common, worked out once
    # All layouts are scored as arrays at once; only those that a score cannot rule out are predicted in full.
    return CostModel(
        lambda strategy: score(job, strategy, machine),
        lambda strategy: predict(job, strategy, machine, known),
    )


def report_with(prediction: Prediction, name: str, planned: Planned, cluster: Cluster) -> PredictionReport:
    """A prediction with what a reader compares it with."""
    return PredictionReport(
        prediction=prediction,
        name=name,
        parameters=planned.parameters,
        device=cluster.device.name,
        device_memory_bytes=cluster.device.memory_bytes,
        total_tokens=planned.total_tokens,
        # A price of 0 says that none is known.
        usd_per_device_hour=cluster.value("price.usd_per_device_hour") or None,
        remarks=planned.remarks,
    )


def cluster_of(config: RunConfig, name: str | None, asked: int | None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that a command line names, with as many devices as it asks for, or else `config` does.

    Where neither gives a number: one on a CPU, as `phalanx train` would start one process; an error on GPUs.

    Returns:
        the cluster; a word on its number of devices where nobody gave one.

    Raises:
        UserError: the cluster is not named, or not there; the number of devices is not given, or given twice and not
            alike, or does not fill its hosts.
    """
    if name is None:
        known = ", ".join(cluster_names())
        cure = f"give --cluster: one of {known}, or a .toml file (phalanx plan calibrate writes this machine's)"
        raise UserError("no cluster to predict for", cure=cure)
    if asked is not None:
        check_devices(config, asked)
    wanted = wanted_ranks(config)
    if asked or config.parallel.devices or wanted > 1:
        return load_cluster(name, asked or wanted), ()
    whole = load_cluster(name)
    # A cluster file may describe thousands of GPUs: to take one of them, or all, would be a guess.
    if whole.device.kind == "gpu" and whole.devices > 1:
        raise UserError(
            f"how many devices of {whole.name} is said neither by --devices nor by [parallel]",
            cure=f"give --devices N (it describes {whole.devices:,}, in hosts of {whole.devices_per_host}), or set "
            "parallel.devices",
        )
    remark = "1 device, as phalanx train would take: neither --devices nor [parallel] says how many"
    return load_cluster(name, 1), (remark,) if whole.devices > 1 else ()


def check_devices(config: RunConfig, asked: int) -> None:
    """Refuse a number of devices that is not `config`'s own, where it has one."""
    devices = config.parallel.devices
    if devices and asked != devices:
        raise UserError(
            f"is not --devices {asked}", cure="give one of the two", field="parallel.devices", value=devices
        )


def plan_of(
    config: RunConfig, cluster: Cluster, precision: Precision | None = None, program: str | None = None
) -> Planned:
    """What each of the cluster's devices does for `config`; what it leaves open is chosen as the trainer would.

    Args:
        precision: of matrix products; None: as the config says, or what is fast on the device.
        program: that trains, which has layouts and memory of its own; None: ours.
    """
    check_sizes(config)
    vocab_size = known_vocab_size(config)
    model = complete_model(config, vocab_size)
    MODEL.check(model_of(model))  # before memory is asked for layout after layout
    precision = precision or precision_of(config, cluster.device)
    software = program_named(program)
    # First the layout, by the rules of the trainer; then, within the memory that is left, micro-batch and recompute.
    choice = _with_overlap(_choose(config, vocab_size, cluster, precision, software), cluster)
    # Axes that the config gives have not been through the program's judge.
    if software is not None and (lacks := lacking(software.name, choice.config)):
        raise lacks
    fit = Fit.of(
        config,
        model,
        choice.config,
        precision,
        device_bytes=cluster.device.memory_bytes,
        on_cpu=cluster.device.kind == "cpu",
        micro_batch=choice.micro_batch,
        software=software,
    )
    passes, remark = _passes(config, fit, choice, cluster.device)
    strategy = fit.strategy(passes.micro_batch, passes.recompute)
    return Planned(
        job=replace(fit.job, fp8=config.train.precision == "fp8"),
        strategy=strategy,
        parameters=num_parameters(model),
        total_tokens=derive(config).total_tokens,
        remarks=(*choice.reasons, *remark, *_of_what_is_not_timed(config)),
    )


def _job_to_search(config: RunConfig, cluster: Cluster) -> Planned:
    """What `config` computes, for a search that chooses how it is spread; its strategy is one device's.

    Raises:
        UserError: sizes are not known, or out of all bounds.
    """
    check_sizes(config)
    model = complete_model(config, known_vocab_size(config))
    precision = precision_of(config, cluster.device)
    job = job_of(config, model, config.parallel, precision, on_cpu=cluster.device.kind == "cpu")
    job = replace(job, fp8=config.train.precision == "fp8")
    return Planned(job, Strategy(), num_parameters(model), derive(config).total_tokens, _of_what_is_not_timed(config))


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes that could only be a slip, before anything counts up to them."""
    for field, most in _MOST.items():
        room, name = field.split(".")
        if (value := getattr(getattr(config, room), name)) > most:
            cure = f"give a number up to {most:,}"
            raise UserError("is more than can be predicted", cure=cure, field=field, value=value)


def program_named(name: str | None) -> Software | None:
    """Another program than ours, if one is named: ours is described by the config more closely than by a name."""
    return None if name in (None, PHALANX.name) else software_named(str(name))


def lacking(name: str, parallel: ParallelConfig) -> UserError | None:
    """What a layout has that a program does not; None: it could have it."""
    # A setting without effect in this layout cannot be what the program lacks.
    idle = {
        "zero": parallel.shard * parallel.context == 1,
        "schedule": parallel.pipeline == 1,
        "tensor_overlap": parallel.tensor == 1 or parallel.tensor_overlap == "auto",
    }
    for key, allowed in LAYOUTS.get(name, {}).items():
        value = getattr(parallel, key)
        if value not in allowed and not idle.get(key, False):
            cure = f"set it to {' or '.join(map(str, allowed))}, or plan for another program"
            return UserError(f"is not what {name} has", cure=cure, field=f"parallel.{key}", value=value)
    return None


def as_efficient(planned: Planned, cluster: Cluster, efficiency: float | None) -> Planned:
    """The same where that share of the predicted speed is reached, if one is given."""
    if efficiency is None:
        return planned
    return replace(planned, job=replace(planned.job, residual=residual_of(planned.job, cluster, efficiency)))


def known_vocab_size(config: RunConfig) -> int:
    """Size of the vocabulary."""
    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        return configured_vocab_size(config.data.tokenizer)
    except UserError as error:
        # A prediction reads no text, and so trains no tokenizer to see how many words it comes to.
        cure = "set model.vocab_size to what it will be"
        raise UserError(
            f"is not known before the text is read ({error.problem})", cure=cure, field="model.vocab_size"
        ) from None


def precision_of(config: RunConfig, device: Device) -> Precision:
    """Type of the matrix products as far as it can be predicted; where the config leaves it open, bf16 where faster."""
    if config.train.precision == "fp8":
        return "bf16"
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if device.peak_flops_per_s("bf16") > device.peak_flops_per_s("fp32") else "fp32"


def _of_what_is_not_timed(config: RunConfig) -> tuple[str, ...]:
    remarks = []
    if config.train.precision == "fp8":
        remarks.append(
            "train.precision = fp8 is predicted as bf16: times of 8-bit products are not known; MFU is of the bf16 peak"
        )
    if config.train.offload:
        remarks.append(f"train.offload = {config.train.offload:g}: its copies are predicted to take no time")
    return tuple(remarks)


def _choose(
    config: RunConfig, vocab_size: int, cluster: Cluster, precision: Precision, software: Software | None
) -> LayoutChoice:
    """The layout of all devices, as the trainer would take it; axes that are all given stay, whether they fit or not.

    Raises:
        UserError: none fits, or none is possible whatever the memory.
    """
    # Nothing is open, so nothing is judged: a layout that does not fit is still predicted, and the report says so.
    if config.parallel.layout.world_size == cluster.devices:
        return choose(config, vocab_size, Machines(cluster.devices_per_host))
    parallel = config.parallel.model_copy(update={"devices": cluster.devices})
    asked = config.model_copy(update={"parallel": parallel})
    device_bytes = cluster.device.memory_bytes
    judge = None
    # As the trainer: on a CPU layouts are judged by the bytes of their state alone.
    if cluster.device.kind == "gpu":
        model = complete_model(config, vocab_size)
        judge = judge_of(config, model, precision, device_bytes=device_bytes, software=software)
        judge = judge if software is None else _of_program(software.name, judge)
    return choose(asked, vocab_size, Machines(cluster.devices_per_host, int(device_bytes)), judge)


def _of_program(name: str, judge: Judge) -> Judge:

    def judged(parallel: ParallelConfig, micro_batch: int) -> Need:
        if lacks := lacking(name, parallel):
            raise lacks
        return judge(parallel, micro_batch)

    return judged


def _with_overlap(choice: LayoutChoice, cluster: Cluster) -> LayoutChoice:
    """With `parallel.tensor_overlap` decided as the trainer would, GPUs of a host taken to reach each other."""
    parallel = choice.config
    if parallel.tensor_overlap != "auto":
        return choice
    shared = cluster.device.kind == "gpu" and parallel.tensor <= cluster.devices_per_host
    # Fused exchanges read the memory of peers, over NVLink within a host.
    kind = "none" if parallel.tensor == 1 else "fused" if shared else "chunked"
    return replace(choice, config=parallel.model_copy(update={"tensor_overlap": kind}))


def _passes(config: RunConfig, fit: Fit, choice: LayoutChoice, device: Device) -> tuple[Passes, tuple[str, ...]]:
    """Sequences per forward pass and what is computed again, and a word on how that was chosen."""
    if device.kind == "cpu":
        micro_batch = choice.micro_batch or cpu_micro_batch(fit.share, fit.job.sequence)
        return Passes(micro_batch, first_level(config)), ()
    chosen = fit.choose()
    open_ones = [
        *([] if choice.micro_batch else [f"micro-batch {chosen.micro_batch}"]),
        *([f"recompute {chosen.recompute}"] if config.train.recompute == "auto" else []),
    ]
    if not open_ones:
        return chosen, ()
    if chosen.predicted_bytes > fit.limit_bytes:
        return chosen, (f"{', '.join(open_ones)}: none leaves a tenth of the memory free",)
    return chosen, (f"{', '.join(open_ones)}: leaves a tenth of the memory free",)


# Which part of a step, as training can tell them apart, the parts of a prediction belong to; the rest is waiting.
_GROUPS = {"compute": PASSES, "efficiency": PASSES, "optimizer": OPTIMIZER, "loader": LOADER}


def expected_of(config: RunConfig, name: str, cluster: str, devices: int) -> Expected:
    """What a step of `config` is predicted to cost on so many devices of a cluster, by its name or file."""
    machine = load_cluster(cluster, devices)
    planned = plan_of(config, machine)
    prediction = predict(planned.job, planned.strategy, machine)
    strategy = planned.strategy
    layout = Layout(*(getattr(strategy, axis) for axis in Layout.__dataclass_fields__))
    return Expected(
        source=f"phalanx plan, cluster {machine.name}",
        step_s=float(prediction.step_s),
        interval_s=prediction.interval_s,
        parts=grouped(prediction),
        # Rank 0 compares, and it is in the first stage of the pipeline.
        memory_bytes=float(prediction.memory[0].total),
        layout=str(layout),
        micro_batch=strategy.micro_batch,
        details=prediction_json(report_with(prediction, name, planned, machine)),
    )


def grouped(prediction: Prediction) -> dict[str, float]:
    """Exposed seconds by the parts that training can tell apart."""
    parts = dict.fromkeys((PASSES, WAITING, OPTIMIZER, LOADER), 0.0)
    for part in prediction.parts:
        parts[_GROUPS.get(part.path.partition("/")[0], WAITING)] += float(part.seconds)
    return parts
