"""The logical parameters of a model (q, k, v, gate, up …) as aliases of what it stores, and their initial weights.

Optimizers and checkpoints see only these, so that LAMB's ratios, CAME's factors and a checkpoint's names belong to the
matrices of the architecture and do not change with its storage.

Initial weights come from a counter hash of (seed, logical name, element index): any slice alone gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.kernels.counter import make_key, normal
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart
from phalanx.model.layers import Stored
from phalanx.model.shapes import Parameter, parameter_table


@dataclass(frozen=True)
class _Alias:
    parameter: nn.Parameter
    owner: nn.Parameter
    start: int
    rows: int


class LogicalParameters(Mapping[str, nn.Parameter]):
    """Ordered logical name -> parameter sharing memory with rows of the stored one: a step on either changes both.

    The order is that of `parameter_table`, whatever is merged. Make it after the weights are where they stay: moving
    them (``model.to``) leaves the aliases behind. A logical parameter that is all of a stored one is that one itself.
    Gradients arrive on the stored parameters; call `bind_gradients` after each backward pass.
    """

    def __init__(self, model: DecoderPart) -> None:
        found: dict[str, _Alias] = {}
        for module in model.modules():
            for part in module.parts if isinstance(module, Stored) else ():
                owner = module.get_parameter(part.attribute)
                rows = owner.detach()[part.start : part.start + part.rows]
                # A view of all rows would be a second parameter, whose gradient somebody had to bind.
                whole = part.rows == owner.shape[0]
                parameter = owner if whole else nn.Parameter(rows, requires_grad=owner.requires_grad)
                assert part.name not in found, f"two stored parameters hold {part.name}"
                found[part.name] = _Alias(parameter, owner, part.start, part.rows)
        # In the order of the architecture, so that neither checkpoints nor groups of optimizers see what is merged.
        self._aliases = {name: found[name] for name in parameter_table(model.config) if name in found}
        split = {id(a.owner): a.owner for a in self._aliases.values() if a.parameter is not a.owner}
        self._owners = list(split.values())
        self._bound: dict[int, object] = {}

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._aliases[name].parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._aliases)

    def __len__(self) -> int:
        return len(self._aliases)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values in, see `fill`."""
        fill(self, {name: Shard.whole(tuple(p.shape)) for name, p in self.items()}, tensors, known=self)

    def bind_gradients(self) -> None:
        """Point each alias' gradient at its rows of its owner's; where the owner has none, to None.

        Cheap when gradients stay in place (zeroed, not freed): owners whose gradient is the bound one are skipped.
        """
        # The gradient itself is remembered, not its id, which another tensor may have once this one is freed.
        moved = {id(o) for o in self._owners if o.grad is None or self._bound.get(id(o)) is not o.grad}
        if not moved:
            return
        for alias in self._aliases.values():
            if alias.parameter is not alias.owner and id(alias.owner) in moved:
                grad = alias.owner.grad
                alias.parameter.grad = None if grad is None else grad[alias.start : alias.start + alias.rows]
        self._bound = {id(owner): owner.grad for owner in self._owners}

    def drop_gradients(self) -> None:
        """Let go of all gradients, logical and stored."""
        for alias in self._aliases.values():
            alias.parameter.grad = alias.owner.grad = None
        self._bound.clear()


def fill(
    parameters: Mapping[str, Tensor],
    shards: Mapping[str, Shard],  # what part of its logical parameter each of `parameters` is
    tensors: Mapping[str, Tensor],
    *,
    known: Collection[str],  # names of all logical parameters of the model, which may be more than are here
) -> None:
    """Copy whole logical `tensors`, in any dtype, into parameters that may hold only parts of them.

    Rows of vocabulary padding that `tensors` lack become zeros.

    Raises:
        UserError: a name is missing or unknown, or a shape differs.
    """
    wrong = sorted(set(known) ^ set(tensors))
    if wrong:
        problem = "is missing from the weights" if wrong[0] in known else "is not a parameter of this model"
        raise UserError(problem, cure="give the weights of a model of the same config", field=wrong[0])
    for name, parameter in parameters.items():
        value, shard = tensors[name], shards[name]
        # Files of other programs have no rows of padding at the end of the vocabulary.
        rows = value.shape[0] if name in ("embedding", "head") and value.dim() == 2 else shard.shape[0]
        if tuple(value.shape) != (rows, *shard.shape[1:]) or rows > shard.shape[0]:
            problem = f"has shape {tuple(value.shape)} where the model has {shard.shape}"
            raise UserError(problem, cure="give the weights of a model of the same config", field=name)
        mine = value[shard.offsets[0] : shard.offsets[0] + shard.sizes[0]]
        with torch.no_grad():
            parameter[: len(mine)].copy_(mine)
            parameter[len(mine) :].zero_()


def initialise(model: DecoderPart, seed: int) -> None:
    """Fill every weight: matrices and embeddings normal(0, init_std), the residual outputs (``o``, ``down``) smaller by
    ``sqrt(2 layers)`` unless `init_depth_scaled` is off (GPT-2, section 2.3), norms 1, biases 0.

    The values do not depend on how projections are merged, nor on the device type.
    """
    table = parameter_table(model.config)
    with torch.no_grad():
        for name, parameter in LogicalParameters(model).items():
            values = initial_values(model.config, table[name], seed, device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(values)


def initial_values(
    config: ModelConfig,
    parameter: Parameter,
    seed: int,
    *,
    offsets: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The initial values of one logical parameter, or of its slice ``[offsets, offsets + shape)``."""
    shape = tuple(parameter.shape if shape is None else shape)
    if parameter.role in ("norm", "bias"):
        return torch.full(shape, 1.0 if parameter.role == "norm" else 0.0, device=device, dtype=dtype)
    # The sum of 2 N branches of the residual stream would grow with the depth otherwise.
    std = config.init_std
    if parameter.role == "output" and config.init_depth_scaled:
        std /= math.sqrt(2 * config.layers)
    # By name: a weight does not depend on which other parameters this rank has, nor on their order.
    key = make_key(seed, "init", parameter.name)
    return normal(key, parameter.shape, offsets=offsets, shape=shape, std=std, device=device, dtype=dtype)
