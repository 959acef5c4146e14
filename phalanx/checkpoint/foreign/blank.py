"""Making a model without drawing the random weights that a restore is about to replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

# Those of torch.nn.init that ask modes too: within what a mode was asked about, it is not asked again.
_OF_INIT = (init.uniform_, init.normal_, init.kaiming_uniform_)
_OF_TENSORS = (
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_),
    *(Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_),
)
_DRAWS = frozenset((*_OF_INIT, *_OF_TENSORS))


class UndrawnParameters(TorchFunctionMode):
    """While this is entered, no random numbers are drawn for parameters, which become zero in place of that.

    All else is done: buffers, constants, tied weights, and what is drawn into a parameter's ``.data``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every call of torch comes here first."""
        named = dict(kwargs or {})
        target = args[0] if args else named.get("tensor")
        if func in _DRAWS and isinstance(target, nn.Parameter):
            target.detach().zero_()  # much cheaper, and nothing that is computed from it goes on for ever
            return target
        return func(*args, **named)
