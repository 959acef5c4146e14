"""The whole config of a run: each room's own, the training loop's, and where the run is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core.config import Config
from phalanx.data.config import DataConfig
from phalanx.model.config import ModelConfig
from phalanx.optim.config import OptimConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.telemetry.alerts.alert_config import AlertsConfig
from phalanx.telemetry.config import TAG, LoggingConfig, TelemetryConfig

# Tensor cores take dimensions of 16, 32, 48 … for 8-bit products: see phalanx.kernels.fp8.
_FP8_MULTIPLE = 16


class FolderConfig(Config):
    """Where a run is kept, and what to do when something is already there."""

    folder: str = Field("", description="run folder; empty: runs/<name of the config file>")
    name: str = Field("", description="what tables call the run; empty: its folder")
    tags: tuple[str, ...] = Field((), description="tags by which runs are found: phalanx runs --tag")
    note: str = Field("", description="a note on the run, shown in tables")
    resume: Literal["same", "changed", "never"] = Field(
        "same",
        description="what to do with a folder that holds a run: 'same' goes on with it if its config is the same, "
        "'changed' also where it differs in what a run can change (never tokenizer, text, order of samples, shapes), "
        "'never' refuses",
    )

    @model_validator(mode="after")
    def _tags_can_be_asked_for(self) -> FolderConfig:
        for tag in self.tags:
            if not TAG.fullmatch(tag):
                raise ValueError(f"tags has {tag!r}: use letters, digits and . _ : / -, such as good or lr:3e-4")
        return self


class EvaluateConfig(Config):
    """Evaluation on held-out text: how often while training, and how much of it."""

    every_steps: int = Field(0, ge=0, description="evaluate on held-out text every so many steps; 0: only at the end")
    tokens: int = Field(100_000, ge=0, description="tokens per evaluation while training; 0: all held-out text")
    final_tokens: int = Field(
        500_000, ge=0, description="tokens of the evaluation after the last step; 0: all held-out text"
    )
    sample_prompt: str = Field("", description="text that the model continues at the end, for a look; empty: none")
    sample_tokens: int = Field(150, ge=1, description="tokens of that continuation at most")
    sample_at_evaluations: bool = Field(
        False,
        description="continue sample_prompt at each evaluation too, into <run folder>/samples.jsonl; where one rank "
        "holds the whole model",
    )

    @model_validator(mode="after")
    def _has_a_prompt(self) -> EvaluateConfig:
        if self.sample_at_evaluations and not self.sample_prompt:
            raise ValueError("sample_at_evaluations = True needs a text to continue: set evaluate.sample_prompt")
        return self

    def due(self, step: int) -> bool:
        """Whether `step`, counted from 1, is evaluated."""
        return self.every_steps > 0 and step % self.every_steps == 0


class ProfileConfig(Config):
    """A window of steps recorded with torch.profiler into <run folder>/profile."""

    start_step: int = Field(0, ge=0, description="first step that is recorded, counted from 1; 0: no profile")
    steps: int = Field(3, ge=1, description="number of steps that are recorded")
    ranks: tuple[int, ...] = Field((0,), description="ranks that are recorded, a file each; empty: all")


class TrainConfig(Config):
    """The training loop: how long, how much at a time, in which precision and on which device."""

    steps: int = Field(0, ge=0, description="optimizer steps; 0: from train.tokens")
    tokens: int = Field(0, ge=0, description="token budget, rounded up to whole steps; 0: from train.steps")
    global_batch: int = Field(32, ge=1, description="sequences per optimizer step, over all micro-batches")
    micro_batch: int = Field(0, ge=0, description="sequences per forward and backward pass; 0: chosen for the device")
    seed: int = Field(0, ge=0, description="seed of initial weights and dropout; data.seed orders the samples")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device; auto: CUDA where there is one")
    precision: Literal["auto", "bf16", "fp32", "fp8"] = Field(
        "auto",
        description="type of the matrix products (master weights are fp32); auto: bf16 where it is fast; fp8: bf16, "
        "but 8 bits for the products of blocks",
    )
    bf16_layers_at_start: int = Field(1, ge=0, description="with precision = fp8: first blocks that stay in bf16")
    bf16_layers_at_end: int = Field(1, ge=0, description="with precision = fp8: last blocks that stay in bf16")
    threads: int = Field(0, ge=0, description="CPU threads for arithmetic; 0: OMP_NUM_THREADS, else one per core")
    compile: Literal["auto", True, False] = Field(
        "auto",
        description="compile each layer with torch.compile: slower to start, faster steps; auto: on a GPU, if it can",
    )
    recompute: Literal["auto", "none", "selective", "mlp", "full"] = Field(
        "auto",
        description="what backward passes compute again: nothing (none), all but matrix products and attention "
        "(selective), these and the first product of the MLP (mlp), everything (full); auto: as little as fits into a "
        "GPU's memory, nothing on a CPU",
    )
    offload: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the layers, from the first, whose activations wait for their backward pass in pinned "
        "memory of the host; on a GPU",
    )
    deterministic: bool = Field(False, description="refuse operations that may give different bits from run to run")
    garbage_collect_steps: int = Field(
        100,
        ge=0,
        description="collect Python's garbage every so many steps only; 0: leave it to Python",
    )
    init_from: str = Field(
        "",
        description="run or Hugging Face folder whose weights to start from, with a fresh optimizer; empty: random",
    )

    def fp8_layers(self, layers: int) -> range:
        """Of `layers` blocks those whose products are in 8 bits."""
        if self.precision != "fp8":
            return range(0)
        # Where both ends meet no layer is left; the larger bound keeps the range from running backwards.
        return range(self.bf16_layers_at_start, max(self.bf16_layers_at_start, layers - self.bf16_layers_at_end))

    def ignored(self) -> list[str]:
        """What was set and has no effect, a line each."""
        if self.precision == "fp8":
            return []
        # Their defaults are not 0, so only a change says that somebody wanted them.
        names = ("bf16_layers_at_start", "bf16_layers_at_end")
        changed = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        return [f"train.{name} = {getattr(self, name)} has no effect: train.precision is not fp8" for name in changed]

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps and self.tokens:
            raise ValueError(f"steps = {self.steps} and tokens = {self.tokens} both set the length: give one of them")
        if not self.steps and not self.tokens:
            raise ValueError("steps = 0 and tokens = 0 leave the length open: set train.steps or train.tokens")
        if self.micro_batch and self.global_batch % self.micro_batch:
            raise ValueError(
                f"micro_batch = {self.micro_batch} does not divide global_batch = {self.global_batch}: "
                "choose a divisor, or 0 to have one chosen"
            )
        return self


class RunConfig(Config):
    """Everything `phalanx train` needs to know."""

    run: FolderConfig = Field(default_factory=FolderConfig, description="where the run is kept")
    data: DataConfig = Field(default_factory=DataConfig, description="text, tokenizer and packing")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the decoder")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer, schedule and bad-step policy")
    train: TrainConfig = Field(description="the training loop")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="how the run is spread over ranks")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="held-out text")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and keeping state")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="metrics and the live view")
    alerts: AlertsConfig = Field(default_factory=AlertsConfig, description="who hears of trouble, and of what")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="spans of every rank")
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="profiler window")

    def not_traced(self) -> str:
        """The settings that put something into layers which no compiler sees, for messages; empty: none do."""
        # Compiled graphs leave out what draws random masks, chunks (they would write out each one), what waits for
        # other ranks, and products that a schedule puts off.
        parallel, model = self.parallel, self.model
        dropped = {"model.dropout": model.dropout, "model.attention_dropout": model.attention_dropout}
        found = [f"{name} = {rate}" for name, rate in dropped.items() if rate]
        found += ["model.attention_backend = 'chunked'"] if model.attention_backend == "chunked" else []
        spread = {"parallel.tensor": parallel.tensor, "parallel.context": parallel.context}
        found += [f"{name} = {size}" for name, size in spread.items() if size > 1]
        found += [f"parallel.schedule = {parallel.schedule!r}"] if parallel.splits_backward else []
        return ", ".join(found)

    @model_validator(mode="after")
    def _asks_no_gpu_of_a_cpu(self) -> RunConfig:
        # Where the device is not named it is refused when that is found out, before anything is written.
        if self.train.device == "cpu" and (asked := self.asks_for_a_gpu()):
            raise ValueError(f"{asked} needs a GPU, and train.device = 'cpu' is none: set one of the two to 'auto'")
        return self

    def asks_for_a_gpu(self) -> str:
        """The setting that only a GPU can honour, for messages; empty: none."""
        if self.model.attention_backend in ("flex", "cudnn", "flash", "efficient"):
            return f"model.attention_backend = {self.model.attention_backend!r}"
        if self.parallel.tensor > 1 and self.parallel.tensor_overlap in ("fused", "tiles"):
            return f"parallel.tensor_overlap = {self.parallel.tensor_overlap!r}"
        return ""

    @model_validator(mode="after")
    def _chooses_what_to_keep_in_what_is_compiled(self) -> RunConfig:
        opaque = self.not_traced()
        if self.train.compile is True and self.train.recompute in ("selective", "mlp") and opaque:
            raise ValueError(
                f"train.compile = True does not fit train.recompute = {self.train.recompute!r} with {opaque}: what is "
                "kept is chosen by the compiler, which would have to see a whole layer; set train.compile = false, or "
                "train.recompute to none or full"
            )
        return self

    @model_validator(mode="after")
    def _fits_fp8(self) -> RunConfig:
        train, model, parallel = self.train, self.model, self.parallel
        if train.precision != "fp8":
            return self
        if not train.fp8_layers(model.layers):
            raise ValueError(
                f"train.bf16_layers_at_start = {train.bf16_layers_at_start} and train.bf16_layers_at_end = "
                f"{train.bf16_layers_at_end} leave none of model.layers = {model.layers} to train.precision = 'fp8': "
                "lower them, or set train.precision = 'bf16'"
            )
        if parallel.tensor > 1 or parallel.splits_backward:
            raise ValueError(
                f"train.precision = 'fp8' does not fit parallel.tensor = {parallel.tensor}, parallel.schedule = "
                f"{parallel.schedule!r}: neither split matrices nor gradients that are put off are made in 8 bits; "
                "set train.precision = 'bf16', or spread over shard, replicate, context or pipeline with 1f1b or "
                "interleaved_1f1b"
            )
        # The dimension that a product sums over counts too. It is the tokens for the gradient of a weight, so the
        # sequence has to be a multiple as well.
        heads, kv_heads, size, context = model.heads, model.num_kv_heads, model.head_dim, parallel.context
        by_head = f"set model.head_size = {-(-size // _FP8_MULTIPLE) * _FP8_MULTIPLE}"
        by_length = f"make data.sequence_length a multiple of {_FP8_MULTIPLE * context}"
        plain = f"make it a multiple of {_FP8_MULTIPLE}"
        multiplied = [
            ("model.hidden", "width of the residual stream", model.hidden, plain),
            ("model.mlp_hidden", "inner width of the MLP", model.mlp_width, plain),
            ("model.heads", "rows of all query heads", heads * size, by_head),
            ("model.kv_heads", "rows of q, k and v together", (heads + 2 * kv_heads) * size, by_head),
            ("data.sequence_length", "tokens on one rank", self.data.sequence_length // context, by_length),
        ]
        for key, what, dimension, cure in multiplied:
            if dimension % _FP8_MULTIPLE:
                raise ValueError(
                    f"{key} ({what}) comes to {dimension}, no multiple of {_FP8_MULTIPLE} as train.precision = 'fp8' "
                    f"needs: {cure}, or set train.precision = 'bf16'"
                )
        return self
