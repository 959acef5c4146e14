"""What one tensor-parallel rank holds of a model, from the model's config alone. Torch-free.

Every matrix is split along dimension 0 (heads, MLP columns or vocabulary rows, see `phalanx.model.shapes`), rank t
holding the t-th of equal runs of rows. Norms, output biases, the norms of queries and keys, and learned positions are
the same on all ranks; their gradients are partial sums that have to be added over the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.core.errors import UserError
from phalanx.core.shard import Shard
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import Parameter, parameter_table

_FIELD = "parallel.tensor"


def local_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """The config of the part that one of `tensor` ranks builds: heads, key/value heads, MLP width, vocabulary divided.

    Args:
        config: of the whole model, with `vocab_size` and `max_sequence` known.

    Raises:
        UserError: `tensor` does not divide one of them.
    """
    config.require_sizes()
    if tensor == 1:
        return config
    _check_heads(config, tensor)
    if config.mlp_width % tensor:
        cure = f"set model.mlp_hidden to a multiple of {tensor}, such as {_next(config.mlp_width, tensor)}"
        raise UserError(f"does not divide the MLP's width, {config.mlp_width}", cure=cure, field=_FIELD, value=tensor)
    if config.vocab_rows % tensor:
        multiple = math.lcm(config.vocab_multiple, tensor)
        cure = f"set model.vocab_multiple to a multiple of {tensor}, such as {multiple}"
        problem = f"does not divide the padded vocabulary, {config.vocab_rows} rows"
        raise UserError(problem, cure=cure, field=_FIELD, value=tensor)
    return config.model_copy(
        update={
            "heads": config.heads // tensor,
            "kv_heads": config.num_kv_heads // tensor,
            "head_size": config.head_dim,
            "mlp_hidden": config.mlp_width // tensor,
            "vocab_size": config.vocab_rows // tensor,
            "vocab_multiple": 1,
        }
    )


def tensor_shards(config: ModelConfig, tensor: int, index: int) -> dict[str, Shard]:
    """What rank `index` of `tensor` holds of every logical parameter of the whole model.

    Split parameters have ``axes = ("tensor",)``; of the others every rank has all, and rank 0 owns it.

    Raises:
        UserError: as of `local_config`.
    """
    local_config(config, tensor)
    table = parameter_table(config)
    return {name: _shard(parameter, table, tensor, index) for name, parameter in table.items()}


def is_split(parameter: Parameter, table: Mapping[str, Parameter]) -> bool:
    """Whether tensor parallelism splits a logical parameter of `table`; if not, every rank has all of it."""
    if parameter.role == "bias":
        matrix = table.get(parameter.name.removesuffix("_bias"))
        return matrix is not None and matrix.role == "input"
    return parameter.role in ("embedding", "input", "output", "head") and parameter.name != "position_embedding"


def _shard(parameter: Parameter, table: Mapping[str, Parameter], tensor: int, index: int) -> Shard:
    whole = Shard.whole(parameter.shape, owner=index == 0)
    if tensor == 1 or not is_split(parameter, table):
        return whole
    rows = parameter.shape[0] // tensor
    return whole.rows(index * rows, rows, ("tensor",), owner=True)


def _check_heads(config: ModelConfig, tensor: int) -> None:
    """Query heads are a multiple of key/value heads, so the latter decide."""
    kv_heads = config.num_kv_heads
    if kv_heads % tensor == 0:
        return
    name = "model.kv_heads" if config.kv_heads else "model.heads"
    sizes = ", ".join(str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0)
    raise UserError(
        f"does not divide {name} = {kv_heads}, and a key/value head is never split or copied",
        cure=f"take a tensor size of {sizes}" if kv_heads > 1 else f"take 1, or set {name} to a multiple of {tensor}",
        field=_FIELD,
        value=tensor,
    )


def _next(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
