"""Slurm's short lists: of hosts, such as ``node[01-03,07],gpu5``, and of counts, such as ``4(x2),3``. Torch-free."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from phalanx.core.errors import UserError

# One host expression: anything but commas, where commas inside brackets do not count.
_EXPRESSION = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

# As in Slurm's hostlist.h.
_LONGEST_RANGE = 1 << 16

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(hosts: str) -> Iterator[str]:
    """The names in a host list, in order; several brackets in one name vary like digits, the last one fastest.

    Raises:
        UserError: it is no host list.
    """
    expressions = _EXPRESSION.findall(hosts)
    if not hosts or ",".join(expressions) != hosts:
        raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
    for expression in expressions:
        pieces = [_numbers(inner, hosts) if inner else [text] for inner, text in _PIECE.findall(expression)]
        yield from map("".join, itertools.product(*pieces))


def expand_counts(counts: str) -> list[int]:
    """Tasks of every node: ``4(x2),3`` is 4, 4, 3.

    Raises:
        UserError: it is no list of counts.
    """
    result: list[int] = []
    for item in counts.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise _unreadable("list of counts", "SLURM_STEP_TASKS_PER_NODE", counts)
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _numbers(inner: str, hosts: str) -> list[str]:
    """What stands between two brackets, one string per number; leading zeros are kept."""
    result: list[str] = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _LONGEST_RANGE:
            raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
        result += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return result


def _unreadable(what: str, field: str, value: str) -> UserError:
    return UserError(f"is not a {what} of Slurm's", cure="start with srun", field=field, value=value)
