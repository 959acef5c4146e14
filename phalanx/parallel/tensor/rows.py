"""Which rows of the stream a tensor-parallel rank holds."""

from __future__ import annotations

from phalanx.core.errors import UserError
from phalanx.parallel.group import Group


def local_rows(tokens: int, group: Group) -> slice:
    """This rank's rows of the stream of `tokens` tokens (B * S, of the local part of the sequences).

    Raises:
        UserError: the ranks cannot have equally many.
    """
    if tokens % group.size:
        raise UserError(
            f"does not divide the {tokens} tokens of a micro-batch, whose rows the ranks share",
            cure=f"make micro-batch times sequence length a multiple of {group.size}",
            field="parallel.tensor",
            value=group.size,
        )
    rows = tokens // group.size
    return slice(group.index * rows, (group.index + 1) * rows)
