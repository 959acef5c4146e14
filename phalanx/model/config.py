"""What a decoder is made of: every variant is a declared choice of this config, none a subclass."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from phalanx.core.config import Config
from phalanx.core.errors import UserError


class RopeScaling(Config):
    """How rotary frequencies are stretched for sequences longer than a model was first trained on.

    ``llama3`` as in Llama 3.1 (transformers ``_compute_llama3_parameters``), ``yarn`` as in arXiv 2309.00071
    (transformers ``_compute_yarn_parameters``). Field names and meanings are those of Hugging Face.
    """

    kind: Literal["none", "llama3", "yarn"] = Field("none", description="none, llama3 or yarn")
    factor: float = Field(8.0, ge=1.0, description="how many times longer the context becomes, ratio")
    original_max_position: int = Field(8192, gt=0, description="context length of the first training, tokens")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: waves longer than context / this are stretched")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: waves shorter than context / this are left alone")
    beta_fast: float = Field(32.0, gt=0, description="yarn: dimensions turning more often are left alone, turns")
    beta_slow: float = Field(1.0, gt=0, description="yarn: dimensions turning less often are stretched, turns")
    attention_factor: float = Field(0.0, ge=0, description="yarn: scale of cos and sin; 0 = 0.1 ln(factor) + 1")
    mscale: float = Field(0.0, ge=0, description="yarn: numerator of a derived attention factor; 0 = not used")
    mscale_all_dim: float = Field(0.0, ge=0, description="yarn: denominator of that factor; 0 = not used")
    truncate: bool = Field(True, description="yarn: round the bounds of the ramp to whole dimensions")

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} is not below high_freq_factor = {self.high_freq_factor}: "
                "make low_freq_factor the smaller one (Llama 3.1 has 1 and 4)"
            )
        return self


class ModelConfig(Config):
    """One decoder-only transformer.

    Values of 0 are derived; the properties (`num_kv_heads`, `head_dim`, `mlp_width`, `vocab_rows`) give the result.
    """

    vocab_size: int = Field(0, ge=0, description="tokens the model knows; 0 = the tokenizer's")
    vocab_multiple: int = Field(64, ge=1, description="embedding and head rows are padded to a multiple of this")
    layers: int = Field(12, ge=1, description="transformer blocks")
    hidden: int = Field(768, ge=1, description="width of the residual stream")
    heads: int = Field(12, ge=1, description="query heads")
    kv_heads: int = Field(0, ge=0, description="key/value heads, shared by groups of query heads; 0 = heads")
    head_size: int = Field(0, ge=0, description="width of one head; 0 = hidden / heads")
    mlp_hidden: int = Field(0, ge=0, description="inner width of the MLP; 0 = 4 hidden, swiglu: 8/3 hidden rounded up")
    mlp_multiple: int = Field(64, ge=1, description="a derived swiglu width is rounded up to a multiple of this")
    max_sequence: int = Field(0, ge=0, description="longest sequence, tokens; 0 = the data's sequence length")

    block: Literal["serial", "parallel"] = Field(
        "serial", description="serial: MLP after attention; parallel: y = x + MLP(LN(x)) + Attn(LN(x)), one shared norm"
    )
    merged_projections: bool = Field(
        False, description="parallel block: inputs as one GEMM, outputs as one GEMM (measured no faster on a CPU)"
    )
    attention: tuple[Literal["full", "window"], ...] = Field(
        ("full",), min_length=1, description="attention of the layers, repeated over depth, e.g. window, window, full"
    )
    window: int = Field(0, ge=0, description="keys a window layer sees, the current token included, tokens")
    attention_backend: Literal["auto", "sdpa", "chunked", "flex", "cudnn", "flash", "efficient", "math"] = Field(
        "auto",
        description="auto, sdpa (as torch prefers), chunked (exact windows on CPU), math (plain operators); on CUDA "
        "flex, or cudnn, flash, efficient where nothing but causality restricts attention, and flex elsewhere",
    )
    position: Literal["rotary", "learned", "none"] = Field("rotary", description="rotary, learned or none")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary wavelengths")
    rope_scaling: RopeScaling = Field(RopeScaling(), description="stretching of rotary frequencies for long contexts")

    norm: Literal["rms", "layer"] = Field("rms", description="rms: RMSNorm; layer: LayerNorm (with bias if bias = all)")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance inside norms")
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field(
        "swiglu", description="gelu (exact), gelu_tanh (GPT-2's) or swiglu (gated, three matrices)"
    )
    bias: Literal["none", "all", "qkv"] = Field("none", description="on projections and LayerNorms: none, all, or qkv")
    qk_norm: bool = Field(False, description="RMSNorm of every query and key head before rotation, as in Qwen 3")
    tie_embeddings: bool = Field(False, description="the head is the embedding")
    logit_softcap: float = Field(0.0, ge=0, description="logits become cap tanh(logits / cap); 0 = off")
    z_loss: float = Field(0.0, ge=0, description="weight of the squared log-partition added to the loss; 0 = off")

    dropout: float = Field(0.0, ge=0, lt=1, description="dropped share of embeddings and block outputs, probability")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropped share of attention weights, probability")
    init_std: float = Field(0.02, gt=0, description="standard deviation of initial matrices and embeddings")
    init_depth_scaled: bool = Field(True, description="divide initial residual outputs by sqrt(2 layers), as GPT-2")
    residual: Literal["float32", "compute"] = Field(
        "float32", description="dtype of the residual stream: float32, or the compute dtype (less memory, less exact)"
    )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Width of one head, resolved."""
        return self.head_size or self.hidden // self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation == "swiglu"

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP, resolved."""
        if self.mlp_hidden or not self.gated:
            return self.mlp_hidden or 4 * self.hidden
        return _round_up(-(-8 * self.hidden // 3), self.mlp_multiple)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and head: `vocab_size` padded to `vocab_multiple`."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    @property
    def merged(self) -> bool:
        """Whether the block's input projections, and its output projections, are one GEMM each."""
        return self.block == "parallel" and self.merged_projections

    def window_of(self, layer: int) -> int | None:
        """Keys that `layer` sees, or None for all of the past."""
        return self.window if self.attention[layer % len(self.attention)] == "window" else None

    def require_sizes(self) -> None:
        """Refuse a config whose sizes are still to be filled in. `UserError`: `vocab_size` or `max_sequence` is 0."""
        for field in ("vocab_size", "max_sequence"):
            if not getattr(self, field):
                cure = "set it, or let the trainer take it from the data"
                raise UserError("is not known yet", cure=cure, field=f"model.{field}", value=0)

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelConfig:
        if not self.head_size and self.hidden % self.heads:
            raise ValueError(
                f"heads = {self.heads} does not divide hidden = {self.hidden}: "
                f"make hidden a multiple of heads, or set head_size"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}: "
                f"take one of {', '.join(str(k) for k in range(1, self.heads + 1) if self.heads % k == 0)}"
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"head_size = {self.head_dim} is odd and position = 'rotary' turns pairs: "
                "make the head size even, or take position = 'learned'"
            )
        return self

    @model_validator(mode="after")
    def _check_attention(self) -> ModelConfig:
        if "window" in self.attention and not self.window:
            raise ValueError(
                f"attention = {list(self.attention)} has window layers and window = 0: set window to a number of tokens"
            )
        if self.window and "window" not in self.attention:
            raise ValueError(
                f"window = {self.window} is set and attention = {list(self.attention)} has no window layer: "
                'add "window" to attention, or remove window'
            )
        if self.attention_dropout and self.attention_backend != "math":
            raise ValueError(
                f"attention_dropout = {self.attention_dropout} cannot be replayed by attention_backend = "
                f"{self.attention_backend!r}: set attention_backend = 'math', or attention_dropout = 0"
            )
        return self

    @model_validator(mode="after")
    def _check_variants(self) -> ModelConfig:
        if self.merged_projections and self.block == "serial":
            raise ValueError(
                "merged_projections = True does not fit block = 'serial', whose MLP waits for its attention: "
                "set block = 'parallel', or remove merged_projections"
            )
        if self.rope_scaling.kind != "none" and self.position != "rotary":
            raise ValueError(
                f"rope_scaling.kind = {self.rope_scaling.kind!r} does not fit position = {self.position!r}: "
                "set position = 'rotary', or remove rope_scaling"
            )
        return self


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
