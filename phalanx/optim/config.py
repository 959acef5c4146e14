"""Configs of the optimizer, its parameter groups, the schedules and the bad-step policy."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from phalanx.core.config import Config

Kind = Literal["adamw", "lamb", "came", "muon"]

# Per optimizer: learning rate, betas, eps, weight decay. Sources: AdamW: the GPT-3 settings (betas 0.9 and 0.95, decay
# 0.1); LAMB: timm 1.0; CAME: the authors' code, and their advice of 1/3 to 1 times AdamW's rate; Muon: torch's decay,
# and AdamW's rate since its updates are scaled to AdamW's size (arXiv 2502.16982).
_DEFAULTS: dict[str, tuple[float, tuple[float, ...], float, float]] = {
    "adamw": (1e-3, (0.9, 0.95), 1e-8, 0.1),
    "lamb": (4e-3, (0.9, 0.999), 1e-6, 0.01),
    "came": (5e-4, (0.9, 0.999, 0.9999), 1e-30, 0.01),
    "muon": (1e-3, (0.9, 0.95), 1e-7, 0.1),
}


class GroupConfig(Config):
    """Own settings for the parameters whose logical name fits a pattern; of several fitting groups the last wins."""

    pattern: str = Field(
        description="shell pattern on logical names, such as 'layers.*.mlp.*'; 're:...' is a regular expression "
        "that must fit the whole name"
    )
    optimizer: Kind | None = Field(None, description="own optimizer; empty: optim.name")
    lr: float | None = Field(None, gt=0, description="own peak learning rate; empty: the optimizer's")
    lr_scale: float | None = Field(None, ge=0, description="factor on the learning rate; 0 freezes")
    weight_decay: float | None = Field(None, ge=0, description="own weight decay, also for vectors and embeddings")

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        if not pattern:
            raise ValueError("is empty: write a pattern such as 'layers.*.mlp.*'")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"is no regular expression ({error}): correct it or use a shell pattern") from None
        return pattern

    @model_validator(mode="after")
    def _one_rate(self) -> GroupConfig:
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError(f"lr = {self.lr} and lr_scale = {self.lr_scale} both set the rate: give one of them")
        return self


class LambConfig(Config):
    """What public LAMB references disagree on; the defaults follow timm, with the clip left to optim.clip_norm."""

    bias_correction: bool = Field(True, description="divide the moments by 1 - beta^step (timm, apex; not cybertronai)")
    max_grad_norm: float | None = Field(
        None, gt=0, description="clip of all LAMB gradients inside the step (timm: 1.0)"
    )
    always_adapt: bool = Field(False, description="trust ratio also where there is no weight decay (apex: use_nvlamb)")
    trust_clip: bool = Field(False, description="bound the trust ratio by 1")
    max_weight_norm: float | None = Field(
        None, gt=0, description="bound of the weight norm in the trust ratio (cybertronai: 10); empty: none"
    )


class CameConfig(Config):
    """CAME's own settings; the defaults are those of the authors' code."""

    beta3: float = Field(0.9999, ge=0, lt=1, description="decay rate of the instability statistics, per step")
    eps_residual: float = Field(1e-16, gt=0, description="added to the squared instability")
    clip_threshold: float = Field(1.0, gt=0, description="bound of an update's root mean square")


class MuonConfig(Config):
    """Muon's own settings. Vectors, embeddings and the head go to AdamW."""

    momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the momentum, per step")
    nesterov: bool = Field(True, description="look one momentum step ahead")
    ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="size of the update: 0.2 sqrt(max(rows, columns)), as large as AdamW's (arXiv 2502.16982), "
        "or sqrt(max(1, rows / columns)), the original",
    )
    adamw_lr: float | None = Field(
        None, gt=0, description="AdamW's peak learning rate for vectors, embeddings and the head; empty: optim.lr"
    )


class ScheduleConfig(Config):
    """The learning rate over time, as a factor on the peak rate."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="after the warm-up: cosine or linear decay, warm-up-stable-decay, or constant"
    )
    warmup_steps: int | None = Field(None, ge=0, description="steps of linear warm-up; empty: from warmup_fraction")
    warmup_fraction: float = Field(0.02, ge=0, lt=1, description="share of all steps used for warm-up")
    min_ratio: float = Field(0.1, ge=0, le=1, description="factor at the end of the decay")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="wsd: share of all steps used for the decay")
    decay_shape: Literal["linear", "sqrt", "cosine"] = Field(
        "linear", description="wsd: linear, 1 - sqrt (arXiv 2405.18392) or cosine decay"
    )

    @model_validator(mode="after")
    def _room_for_both(self) -> ScheduleConfig:
        if self.kind == "wsd" and self.warmup_steps is None and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction = {self.warmup_fraction} and decay_fraction = {self.decay_fraction} "
                "are more than the whole run: make their sum at most 1"
            )
        return self


class BatchWarmupConfig(Config):
    """A global batch that grows in equal steps to its full size, as Megatron-LM's --rampup-batch-size."""

    start: int = Field(0, ge=0, description="sequences per step at first; 0: no warm-up")
    increment: int = Field(0, ge=0, description="sequences added at each growth")
    every_steps: int = Field(0, ge=0, description="steps between growths")
    every_samples: int = Field(
        0, ge=0, description="sequences between growths, rounded up to whole steps (tokens / sequence length)"
    )

    @model_validator(mode="after")
    def _complete(self) -> BatchWarmupConfig:
        if self.start and not self.increment:
            raise ValueError(f"start = {self.start} and increment = 0 never reach the full batch: set an increment")
        if self.start and bool(self.every_steps) == bool(self.every_samples):
            raise ValueError(
                f"every_steps = {self.every_steps} and every_samples = {self.every_samples}: set exactly one of them"
            )
        return self


class BadStepConfig(Config):
    """Which updates are skipped, and when too many end the run."""

    enabled: bool = Field(True, description="skip updates whose loss or gradient norm is not finite or far too large")
    sigma: float = Field(
        10.0, ge=0, description="standard deviations above the recent mean that are too many; 0: only not finite"
    )
    history: int = Field(128, ge=2, description="finite steps that are remembered")
    min_history: int = Field(32, ge=2, description="finite steps before sigma counts")
    max_in_a_row: int = Field(10, ge=1, description="skipped steps in a row that stop the run")

    @model_validator(mode="after")
    def _fits(self) -> BadStepConfig:
        if self.min_history > self.history:
            raise ValueError(
                f"min_history = {self.min_history} is more than history = {self.history}: make it at most that"
            )
        return self


class OptimConfig(Config):
    """The optimizer and all that decides how large a step it takes."""

    name: Kind = Field("adamw", description="adamw, lamb, came or muon (matrices of the blocks; the rest by adamw)")
    lr: float | None = Field(
        None, gt=0, description="peak learning rate; empty: adamw 1e-3, lamb 4e-3, came 5e-4, muon 1e-3"
    )
    betas: tuple[float, float] | None = Field(
        None, description="decay rates of the moments, per step; empty: adamw 0.9, 0.95, lamb and came 0.9, 0.999"
    )
    eps: float | None = Field(
        None, gt=0, description="guards divisions; empty: adamw 1e-8, lamb 1e-6, came 1e-30 (on squares), muon 1e-7"
    )
    weight_decay: float | None = Field(
        None, ge=0, description="decoupled decay of matrices; empty: adamw and muon 0.1, lamb and came 0.01"
    )
    state_bits: Literal[32, 16, 8] = Field(
        32, description="AdamW's moments: 32 (fp32), 16 (bf16, stochastic rounding) or 8 (block-wise quantised)"
    )
    decay_vectors: bool = Field(False, description="decay norms and biases too")
    decay_embeddings: bool = Field(False, description="decay embeddings too")
    clip_norm: float = Field(1.0, ge=0, description="largest norm of the whole gradient; 0: no clipping")
    compile: bool = Field(False, description="compile the step of LAMB and CAME (takes some ten seconds at the start)")
    groups: tuple[GroupConfig, ...] = Field((), description="own settings by pattern of parameter names")
    lamb: LambConfig = Field(default_factory=LambConfig, description="LAMB's own settings")
    came: CameConfig = Field(default_factory=CameConfig, description="CAME's own settings")
    muon: MuonConfig = Field(default_factory=MuonConfig, description="Muon's own settings")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning rate over time")
    batch_warmup: BatchWarmupConfig = Field(default_factory=BatchWarmupConfig, description="global batch over time")
    bad_step: BadStepConfig = Field(default_factory=BadStepConfig, description="which updates are skipped")

    @field_validator("betas")
    @classmethod
    def _are_rates(cls, betas: tuple[float, float] | None) -> tuple[float, float] | None:
        if betas is not None and not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{betas} are not all in [0, 1): give decay rates such as 0.9 and 0.95")
        return betas

    @model_validator(mode="after")
    def _bits_are_adamws(self) -> OptimConfig:
        other = next(
            (kind for kind in (self.name, *(g.optimizer for g in self.groups)) if kind not in ("adamw", None)), ""
        )
        if self.state_bits != 32 and other:
            raise ValueError(
                f"state_bits = {self.state_bits} is made for AdamW, and {other} updates some parameters: "
                "set state_bits = 32, or adamw as name and in all groups"
            )
        return self

    def lr_of(self, kind: Kind) -> float:
        """Peak learning rate of the parameters that `kind` updates."""
        if self.name == "muon" and kind == "adamw" and self.muon.adamw_lr is not None:
            return self.muon.adamw_lr
        same = kind == self.name or (self.name == "muon" and kind == "adamw")
        return self.lr if same and self.lr is not None else _DEFAULTS[kind][0]

    def betas_of(self, kind: Kind) -> tuple[float, ...]:
        """Decay rates of the moments: two, for CAME three."""
        betas = _DEFAULTS[kind][1] if self.betas is None else self.betas
        return (*betas[:2], self.came.beta3) if kind == "came" else betas

    def eps_of(self, kind: Kind) -> float:
        """Guard of the divisions; with several optimizers `eps` is that of `name`."""
        return self.eps if kind == self.name and self.eps is not None else _DEFAULTS[kind][2]

    def weight_decay_of(self, kind: Kind) -> float:
        """Decay of what is decayed."""
        return _DEFAULTS[kind][3] if self.weight_decay is None else self.weight_decay
