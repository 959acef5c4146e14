"""Which settings of a run may be others when it goes on: the one table of all of them, and what differs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.config import walk
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig, RopeScaling
from phalanx.model.shapes import parameter_table
from phalanx.optim.groups import assign
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_numbers import complete_model, known_vocab_size, total_steps

FREE = "free"
"""May be others whenever a run goes on: what a step computes does not depend on them, but for rounding."""

ASKED = "changed"
"""Others only where ``run.resume=changed`` asks for it: the same weights are trained on, in another way."""

WEIGHTS = "the shapes or the meaning of its weights"
TOKENIZER = "the tokenizer"
ORDER = "the order of the samples"
STATE = "the state of its optimizer"
HISTORY = "the history of its bad steps"

TABLE: tuple[tuple[str, str, str], ...] = (
    (FREE, "run", "folder name tags note resume"),
    (ORDER, "data", "sequence_length seed random_offset sources"),
    (ORDER, "data.sources.*", "weight"),
    # Where text lies and how it is read: every token of what is trained on is compared by itself, and so is a
    # tokenizer's file.
    (ASKED, "data.sources.*", "kind name path field prompt_field missing_field extensions document_separator"),
    (ASKED, "data.sources.*", "include_tests bad_utf8 document_token token_dtype"),
    (ASKED, "data", "validation_fraction validation_split validation_seed validation_sources document_mask"),
    (ASKED, "data.validation_sources.*", "kind name path weight field prompt_field missing_field extensions"),
    (ASKED, "data.validation_sources.*", "document_separator include_tests bad_utf8 document_token token_dtype"),
    (ASKED, "data.tokenizer", "path"),
    (TOKENIZER, "data.tokenizer", "kind vocab_size pattern training_bytes end_of_text end_of_text_token"),
    (FREE, "data", "folder"),
    (WEIGHTS, "model", "vocab_size vocab_multiple layers hidden heads kv_heads head_size mlp_hidden mlp_multiple"),
    (WEIGHTS, "model", "max_sequence block attention window position rope_theta norm norm_eps activation bias qk_norm"),
    (WEIGHTS, "model", "tie_embeddings logit_softcap"),
    (WEIGHTS, "model.rope_scaling", "kind factor original_max_position low_freq_factor high_freq_factor beta_fast"),
    (WEIGHTS, "model.rope_scaling", "beta_slow attention_factor mscale mscale_all_dim truncate"),
    (ASKED, "model", "dropout attention_dropout z_loss residual init_std init_depth_scaled"),  # of training alone
    (FREE, "model", "attention_backend merged_projections"),  # which kernels do it
    # Where these give a weight another optimizer, they are bound: see `changes_between`.
    (ASKED, "optim", "name groups"),
    (ASKED, "optim.groups.*", "pattern optimizer lr lr_scale weight_decay"),
    (ASKED, "optim", "lr betas eps weight_decay decay_vectors decay_embeddings clip_norm"),
    (ASKED, "optim.lamb", "bias_correction max_grad_norm always_adapt trust_clip max_weight_norm"),
    (ASKED, "optim.came", "beta3 eps_residual clip_threshold"),
    (ASKED, "optim.muon", "momentum nesterov ns_steps adjust_lr adamw_lr"),
    (ASKED, "optim.schedule", "kind warmup_steps warmup_fraction min_ratio decay_fraction decay_shape"),
    (ASKED, "optim.batch_warmup", "start increment every_steps every_samples"),
    (ASKED, "optim.bad_step", "enabled sigma min_history max_in_a_row"),
    (HISTORY, "optim.bad_step", "history"),
    (STATE, "optim", "state_bits"),
    (FREE, "optim", "compile"),
    (ASKED, "train", "steps tokens global_batch seed precision init_from"),  # a length that is no shorter is free
    (ASKED, "train", "bf16_layers_at_start bf16_layers_at_end"),
    (FREE, "train", "micro_batch device threads compile recompute offload deterministic garbage_collect_steps"),
    (FREE, "parallel", "devices pipeline replicate shard context tensor zero bucket_bytes reduce_dtype schedule"),
    (FREE, "parallel", "chunks tensor_overlap tensor_chunks context_method host_loader timeout_s first_timeout_s"),
    (FREE, "parallel", "share_device nccl_max_ctas"),
    (FREE, "evaluate", "every_steps tokens final_tokens sample_prompt sample_tokens sample_at_evaluations"),
    (FREE, "checkpoint", "every_steps every_s auto mtbf_hours restart_s memory_every_steps mode wait folder"),
    (FREE, "checkpoint", "storage_options memory_slots replicas insecure_replicas rack keeper_ttl_s keep_last"),
    (FREE, "checkpoint", "keep_every keep_best best_metric budget_bytes wall_time_margin_s final_timeout_s verify"),
    (FREE, "logging", "every_steps file_bytes files tensorboard wandb wandb_project wandb_entity wandb_mode"),
    (FREE, "logging", "metrics_address mfu"),
    (FREE, "alerts", "webhook urls command watch on link stall_s throughput_drop throughput_for_s spike_sigma"),
    (FREE, "alerts", "slow_rank_excess slow_rank_for_s"),
    (FREE, "alerts", "disk_free_bytes checkpoint_intervals"),
    (FREE, "telemetry", "spans upload keep_spans_s around_incidents_s most_span_bytes norms_every"),
    (FREE, "telemetry", "digests_every replay_every recompute_sigma at_corruption"),
    (FREE, "profile", "start_step steps ranks"),
)
"""Of every setting what may become of it: `FREE`, `ASKED`, or what it decides that a run with steps behind it cannot
change, whatever is asked for. A test holds it against the config."""

LENGTH = ("train.steps", "train.tokens")


@dataclass(frozen=True)
class Change:
    """A setting that differs between two configs; one that only one of them has is None in the other."""

    key: str
    old: Any
    new: Any
    is_free: bool = False  # the numbers of a run do not depend on it
    bound: str = ""  # what it decides that a run cannot change on its way; empty: it can

    def __str__(self) -> str:
        why = f" ({self.bound})" if self.bound else ""
        return f"{self.key}: {self.old!r} -> {self.new!r}{why}"


def classes() -> dict[str, str]:
    """`TABLE` by key; items of lists are ``*``."""
    return {f"{section}.{name}": kind for kind, section, names in TABLE for name in names.split()}


def changes_between(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every setting that differs, but for those of ``[run]``; a run may always be made longer."""
    before, after = ({key: value for key, value, _ in walk(config)} for config in (old, new))
    keys = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    longer, table = total_steps(new) >= total_steps(old), classes()
    vocab_size = known_vocab_size(new) or 1  # for both: tokenizers are compared by themselves
    models = [complete_model(config, config.model.vocab_size or vocab_size) for config in (old, new)]
    meant = [{key: value for key, value, _ in walk(_resolved(model), "model.")} for model in models]
    other_optimizers = _optimizers(old, models[0]) != _optimizers(new, models[1])

    def change(key: str) -> Change:
        kind = table[re.sub(r"\.\d+\.", ".*.", key)]  # items of lists have numbers
        if kind == WEIGHTS and meant[0].get(key) == meant[1].get(key):
            kind = FREE  # written out now, or left to be derived
        if other_optimizers and key.startswith("optim.") and kind == ASKED:
            kind = STATE
        is_free = kind == FREE or (key in LENGTH and longer)
        return Change(key, before.get(key), after.get(key), is_free, "" if kind in (FREE, ASKED) else kind)

    return [change(key) for key in keys if not key.startswith("run.")]


def require_allowed(
    changes: Sequence[Change], resume: str, *, has_steps: bool, elsewhere: str, begin_with: str = "", **where: Any
) -> tuple[str, ...]:
    """Refuse to go on with changes that a run cannot make, or that nobody has asked for.

    Args:
        has_steps: the run has made some, which bind it.
        elsewhere: how to train as a run of its own.
        begin_with: how that one begins with the weights of this; empty: it cannot.
        where: field and value of what holds the run.

    Returns:
        Those to be shown to a person.

    Raises:
        UserError: naming every change that is not allowed.
    """
    bound = [change for change in changes if change.bound]
    if bound and has_steps:
        cure = f"put that back, or {elsewhere}{begin_with and ', '}{begin_with}"
        raise UserError(f"holds a run that cannot go on with {', '.join(map(str, bound))}", cure=cure, **where)
    binding = [change for change in changes if not change.is_free]
    if binding and resume != "changed":
        cure = f"{elsewhere}, or run.resume=changed to go on with the new values"
        raise UserError(f"holds a run of another config ({', '.join(map(str, binding))})", cure=cure, **where)
    return tuple(str(change) for change in changes if resume == "changed" or change.key in LENGTH)


def _resolved(model: ModelConfig) -> ModelConfig:
    """With everything that follows from other settings filled in, and what has no effect as it is by default."""
    derived = {"kv_heads": model.num_kv_heads, "head_size": model.head_dim, "mlp_hidden": model.mlp_width}
    unused: dict[str, Any] = {"mlp_multiple": 0}
    if model.rope_scaling.kind == "none":
        unused["rope_scaling"] = RopeScaling()
    if model.position != "rotary":
        unused["rope_theta"] = 0.0
    return model.model_copy(update={**derived, **unused})


def _optimizers(config: RunConfig, model: ModelConfig) -> dict[str, str]:
    """The optimizer of every weight."""
    dimensions = {name: len(parameter.shape) for name, parameter in parameter_table(model).items()}
    return {name: group.kind for name, group in assign(config.optim, dimensions).items()}
