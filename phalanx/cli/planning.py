"""From a config and a cluster to what the planner predicts: the one place where both are known."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.data.config import configured_vocab_size
from phalanx.model.shapes import num_parameters
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.layout_choice import Choice, Judge, Machines, Need
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.hardware.hardware_files import cluster_names, load_cluster
from phalanx.plan.jobs import MODEL
from phalanx.plan.overheads import residual_of
from phalanx.plan.software import LAYOUTS, PHALANX, software_named
from phalanx.plan.types import Job, Model, Precision, Software, Strategy
from phalanx.train.config import RunConfig
from phalanx.train.derived.memory_fit import Choice as Passes
from phalanx.train.derived.memory_fit import Fit, first_level, job_of, judge_of
from phalanx.train.derived.run_layout import choose, wanted_ranks
from phalanx.train.derived.run_numbers import complete_model, cpu_micro_batch, derive

# A word of the driver's name for a GPU -> cluster of hosts with such GPUs; the first that is found holds.
_GPUS = {"A100-SXM4-80GB": "selene", "H100 80GB HBM3": "h100_400g", "H200": "h200_400g"}
_DRIVER = Path("/proc/driver/nvidia/gpus")


def known_cluster(environ: Mapping[str, str], driver: Path = _DRIVER) -> str | None:
    """The cluster that a run on this machine is predicted for; None where nothing is known of it."""
    return next((str(path) for path in calibrated_paths(environ) if path.is_file()), None) or _by_gpu(driver)


def calibrated_paths(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """``HOST.toml`` here, as `phalanx plan calibrate` writes it, or in ``$XDG_CACHE_HOME/phalanx/clusters``.

    By host, because a folder may be shared by many.
    """
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/") / ".cache")
    name = f"{socket.gethostname()}.toml"
    return Path(name), Path(base) / "phalanx" / "clusters" / name


def _by_gpu(driver: Path) -> str | None:
    """By the model that NVIDIA's driver tells of the first GPU, without asking the GPU."""
    told = next((path.read_text() for path in sorted(driver.glob("*/information"))), "")
    model = next((line.partition(":")[2] for line in told.splitlines() if line.startswith("Model:")), "")
    return next((cluster for word, cluster in _GPUS.items() if word in model), None)


# Far above what anybody trains; up to there every layer, and every way to share a batch, can be gone through.
_MOST = {"model.layers": 100_000, "train.global_batch": 10_000_000, "data.sequence_length": 1_000_000_000}


@dataclass(frozen=True)
class Planned:
    """What a config has the planner predict.

    Attributes:
        parameters: of the whole model.
        total_tokens: of the whole run.
        remarks: what was chosen, and why, a line each.
    """

    job: Job
    strategy: Strategy
    parameters: int
    total_tokens: int
    remarks: tuple[str, ...]


def cluster_of(config: RunConfig, name: str | None, asked: int | None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that a command line names, with as many devices as it asks for, or else `config` does.

    Where neither says a number it is one on a CPU, as `phalanx train` would start one process; of GPUs, nobody knows.

    Args:
        name: of a cluster that comes with Phalanx, or a file.
        asked: number of devices.

    Returns:
        the cluster; a word on its number of devices where nobody gave one.

    Raises:
        UserError: the cluster is not named, or not there; nobody said how many devices, or the two contradict each
            other, or they do not fill its hosts.
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
    if whole.device.kind == "gpu" and whole.devices > 1:
        raise UserError(
            f"how many devices of {whole.name} is said neither by --devices nor by [parallel]",
            cure=f"give --devices N (it describes {whole.devices:,}, in hosts of {whole.devices_per_host}), or set "
            "parallel.devices",
        )
    remark = "1 device, as phalanx train would take: neither --devices nor [parallel] says how many"
    return load_cluster(name, 1), (remark,) if whole.devices > 1 else ()


def check_devices(config: RunConfig, asked: int) -> None:
    """Refuse a number of devices that is not `config`'s own, where it has one.

    Raises:
        UserError: it is not.
    """
    said = config.parallel.devices
    if said and asked != said:
        raise UserError(f"is not --devices {asked}", cure="give one of the two", field="parallel.devices", value=said)


def plan_of(
    config: RunConfig, cluster: Cluster, precision: Precision | None = None, program: str | None = None
) -> Planned:
    """What `config` has each of the cluster's devices do; what it leaves open is chosen as the trainer would.

    Args:
        precision: of matrix products; None: as the config says, or what is fast on the device.
        program: that trains, which has layouts and memory of its own; None: ours.

    Raises:
        UserError: the settings are impossible, or sizes are not known or out of all bounds.
    """
    check_sizes(config)
    vocab_size = known_vocab_size(config)
    model = complete_model(config, vocab_size)
    MODEL.check(Model.of(model))  # before memory is asked for layout after layout
    precision = precision or precision_of(config, cluster.device)
    software = program_named(program)
    choice = _with_overlap(_choose(config, vocab_size, cluster, precision, software), cluster)
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
        job=fit.job,
        strategy=strategy,
        parameters=num_parameters(model),
        total_tokens=derive(config).total_tokens,
        remarks=(*choice.reasons, *remark, *_of_what_is_not_timed(config)),
    )


def job_to_search(config: RunConfig, cluster: Cluster) -> Planned:
    """What `config` computes, for a search that chooses how it is spread; its strategy is one device's.

    Raises:
        UserError: sizes are not known, or out of all bounds.
    """
    check_sizes(config)
    model = complete_model(config, known_vocab_size(config))
    precision = precision_of(config, cluster.device)
    job = job_of(config, model, config.parallel, precision, on_cpu=cluster.device.kind == "cpu")
    return Planned(job, Strategy(), num_parameters(model), derive(config).total_tokens, _of_what_is_not_timed(config))


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes that could only be a slip, before anything counts up to them.

    Raises:
        UserError: one is larger than anybody trains.
    """
    for field, most in _MOST.items():
        room, name = field.split(".")
        if (value := getattr(getattr(config, room), name)) > most:
            cure = f"give a number up to {most:,}"
            raise UserError("is more than can be predicted", cure=cure, field=field, value=value)


def program_named(name: str | None) -> Software | None:
    """Another program than ours, if one is named: ours is described by the config more closely than by a name.

    Raises:
        UserError: no such program is known.
    """
    return None if name in (None, PHALANX.name) else software_named(str(name))


def lacking(name: str, parallel: ParallelConfig) -> UserError | None:
    """What a layout has that a program does not; None: it could have it."""
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
    """The same where that share of the predicted speed is reached, if one is given.

    Raises:
        UserError: it cannot be right.
    """
    if efficiency is None:
        return planned
    return replace(planned, job=replace(planned.job, residual=residual_of(cluster, efficiency)))


def known_vocab_size(config: RunConfig) -> int:
    """Size of the vocabulary.

    Raises:
        UserError: it is known when the tokenizer is made, and not before.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        return configured_vocab_size(config.data.tokenizer)
    except UserError as error:
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
    """What is to be said of a prediction whose rates nobody has calibrated."""
    said = []
    if config.train.precision == "fp8":
        said.append(
            "train.precision = fp8 is predicted as bf16: times of 8-bit products are not known; MFU is of the bf16 peak"
        )
    if config.train.offload:
        said.append(f"train.offload = {config.train.offload:g}: its copies are predicted to take no time")
    return tuple(said)


def _choose(
    config: RunConfig, vocab_size: int, cluster: Cluster, precision: Precision, software: Software | None
) -> Choice:
    """The layout of all devices, as the trainer would take it; axes that are all given stay, whether they fit or not.

    Raises:
        UserError: none fits, or none is possible whatever the memory.
    """
    if config.parallel.layout.world_size == cluster.devices:
        return choose(config, vocab_size, Machines(cluster.devices_per_host))
    parallel = config.parallel.model_copy(update={"devices": cluster.devices})
    asked = config.model_copy(update={"parallel": parallel})
    device_bytes = cluster.device.memory_bytes
    judge = None
    if cluster.device.kind == "gpu":
        model = complete_model(config, vocab_size)
        judge = judge_of(config, model, precision, device_bytes=device_bytes, software=software)
        judge = judge if software is None else _of_program(software.name, judge)
    return choose(asked, vocab_size, Machines(cluster.devices_per_host, int(device_bytes)), judge)


def _of_program(name: str, judge: Judge) -> Judge:
    """The same, but for layouts that a program does not have."""

    def judged(parallel: ParallelConfig, micro_batch: int) -> Need:
        if lacks := lacking(name, parallel):
            return Need("no", math.inf, 0.0, f"{lacks.field} {lacks.problem}; its layouts")
        return judge(parallel, micro_batch)

    return judged


def _with_overlap(choice: Choice, cluster: Cluster) -> Choice:
    """With `parallel.tensor_overlap` decided as the trainer would, GPUs of a host taken to reach each other."""
    parallel = choice.config
    if parallel.tensor_overlap != "auto":
        return choice
    shared = cluster.device.kind == "gpu" and parallel.tensor <= cluster.devices_per_host
    kind = "none" if parallel.tensor == 1 else "fused" if shared else "chunked"
    return replace(choice, config=parallel.model_copy(update={"tensor_overlap": kind}))


def _passes(config: RunConfig, fit: Fit, choice: Choice, device: Device) -> tuple[Passes, tuple[str, ...]]:
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
