"""From a config and a cluster to what the planner predicts: the one place where both are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.core.errors import UserError
from phalanx.data.tokenizers.vocabulary import configured_vocab_size
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import num_parameters
from phalanx.parallel.choose import Choice, Machines
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device import Device
from phalanx.plan.jobs import largest_micro_batch, make_job, make_strategy, software_of
from phalanx.plan.memory import rank_memory
from phalanx.plan.software import software_named
from phalanx.plan.types import Job, Precision, Strategy
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import complete_model, cpu_micro_batch, derive
from phalanx.train.derived.layout import choose, wanted_ranks

# Far above what anybody trains; up to there every layer, and every way to share a batch, can be gone through.
_MOST = {"model.layers": 100_000, "train.global_batch": 10_000_000, "data.sequence_length": 1_000_000_000}

# Of a GPU's memory, as the trainer does where it chooses the micro-batch by trying.
_GPU_MEMORY_SHARE = 0.9


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


def devices_of(config: RunConfig, asked: int | None) -> int:
    """Devices that a prediction is for: `asked`, or as many as the config has ranks.

    Raises:
        UserError: the two contradict each other.
    """
    wanted = wanted_ranks(config)
    if asked is None or wanted == asked:
        return wanted
    if config.parallel.devices:
        raise UserError(
            f"is not --devices {asked}",
            cure="give one of the two",
            field="parallel.devices",
            value=config.parallel.devices,
        )
    return asked


def plan_of(config: RunConfig, cluster: Cluster, precision: Precision | None = None) -> Planned:
    """What `config` has each of the cluster's devices do; what it leaves open is chosen as the trainer would.

    Args:
        precision: of matrix products; None: as the config says, or what is fast on the device.

    Raises:
        UserError: the settings are impossible, or sizes are not known or out of all bounds.
    """
    check_sizes(config)
    vocab_size = known_vocab_size(config)
    model = complete_model(config, vocab_size)
    choice = _with_overlap(_choose(config, vocab_size, cluster), cluster)
    precision = precision or precision_of(config, cluster.device)
    job = job_of(config, model, choice.config, precision, cluster.device)
    micro_batch, remark = _micro_batch(config, job, choice, cluster.device)
    strategy = make_strategy(choice.config, micro_batch=micro_batch, recompute=config.train.recompute)
    return Planned(
        job=job,
        strategy=strategy,
        parameters=num_parameters(model),
        total_tokens=derive(config).total_tokens,
        remarks=(*choice.reasons, *remark),
    )


def job_to_search(config: RunConfig, cluster: Cluster) -> Planned:
    """What `config` computes, for a search that chooses how it is spread; its strategy is one device's.

    Raises:
        UserError: sizes are not known, or out of all bounds.
    """
    check_sizes(config)
    model = complete_model(config, known_vocab_size(config))
    precision = precision_of(config, cluster.device)
    job = job_of(config, model, config.parallel, precision, cluster.device)
    return Planned(job, Strategy(), num_parameters(model), derive(config).total_tokens, ())


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


def as_program(planned: Planned, name: str | None) -> Planned:
    """The same in another program than ours, if one is named.

    Raises:
        UserError: no such program is known.
    """
    if name is None:
        return planned
    return replace(planned, job=replace(planned.job, software=software_named(name)))


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
    """Type of the matrix products; where the config leaves it open, bf16 where that is faster."""
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if device.peak_flops_per_s("bf16") > device.peak_flops_per_s("fp32") else "fp32"


def job_of(
    config: RunConfig, model: ModelConfig, parallel: ParallelConfig, precision: Precision, device: Device
) -> Job:
    """What a step of `config` computes."""
    on_cpu = device.kind == "cpu"
    return make_job(
        model,
        sequence=config.data.sequence_length,
        global_batch=config.train.global_batch,
        precision=precision,
        optimizer=config.optim.name,
        software=software_of(
            model,
            parallel,
            precision,
            compiled=config.train.compile is True or (config.train.compile == "auto" and not on_cpu),
            on_cpu=on_cpu,
            documents=config.data.document_mask,
        ),
    )


def _choose(config: RunConfig, vocab_size: int, cluster: Cluster) -> Choice:
    """The layout of all devices; one whose state fits if there is one, as that is what the trainer would take.

    Raises:
        UserError: there is none, whatever the memory.
    """
    parallel = config.parallel.model_copy(update={"devices": cluster.devices})
    asked = config.model_copy(update={"parallel": parallel})
    try:
        return choose(asked, vocab_size, Machines(cluster.devices_per_host, int(cluster.device.memory_bytes)))
    except UserError:
        return choose(asked, vocab_size, Machines(cluster.devices_per_host))


def _with_overlap(choice: Choice, cluster: Cluster) -> Choice:
    """With `parallel.tensor_overlap` decided as the trainer would, GPUs of a host taken to reach each other."""
    parallel = choice.config
    if parallel.tensor_overlap != "auto":
        return choice
    shared = cluster.device.kind == "gpu" and parallel.tensor <= cluster.devices_per_host
    kind = "none" if parallel.tensor == 1 else "fused" if shared else "chunked"
    return replace(choice, config=parallel.model_copy(update={"tensor_overlap": kind}))


def _micro_batch(config: RunConfig, job: Job, choice: Choice, device: Device) -> tuple[int, tuple[str, ...]]:
    """Sequences per forward pass, and a word on how it was chosen."""
    if choice.micro_batch:
        return choice.micro_batch, ()
    share = job.global_batch // choice.layout.size("replicate", "shard")
    if device.kind == "cpu":
        return cpu_micro_batch(share, job.sequence), ()
    limit = _GPU_MEMORY_SHARE * device.memory_bytes

    def fits(micro_batch: int) -> bool:
        strategy = make_strategy(choice.config, micro_batch=micro_batch, recompute=config.train.recompute)
        return max(rank.total for rank in rank_memory(job, strategy)) <= limit

    chosen = largest_micro_batch(share, fits)
    if not fits(chosen):
        return chosen, (f"micro-batch {chosen}: none leaves a tenth of the memory free",)
    return chosen, (f"micro-batch {chosen}: the largest that leaves a tenth of the memory free",)
