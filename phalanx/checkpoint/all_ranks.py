"""Steps that all ranks take together: what fails on one rank is raised on all, so that all stop at the same place."""

from __future__ import annotations

import base64
import json
import platform
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

T = TypeVar("T")


def everywhere(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Let every rank do its `work`, which returns a JSON value; the values of all, in order of rank, on all.

    Raises:
        UserError: the work of some rank failed; names the first such rank and its host. Raised on every rank; a rank
            whose own error is not meant for users raises that error itself.
    """
    if peers.size == 1:
        return [work()]
    answer, error = _try(work)
    answers = peers.gather(answer)
    for rank, other in enumerate(answers):
        if "failure" in other:
            raise _seen_from_here(rank, other["failure"], error)
    return [other["value"] for other in answers]


def collected(peers: Peers, work: Callable[[], T]) -> list[T] | None:
    """As `everywhere`, with the values on rank 0 alone, and None elsewhere.

    Raises:
        UserError: as `everywhere`.
    """
    if peers.size == 1:
        return [work()]
    answer, error = _try(work)
    answers = peers.collect(answer.get("value"))
    _raise_first(peers, answer, error)
    return answers


def agreed(peers: Peers, work: Callable[[], object]) -> None:
    """Let every rank do its `work`; all get the first failure, if there is one, and nothing else.

    Raises:
        UserError: as `everywhere`.
    """
    if peers.size == 1:
        work()
    else:
        _raise_first(peers, *_try(work))


def at_first(peers: Peers, work: Callable[[], T]) -> T:
    """Let rank 0 do `work`, which returns a JSON value, and give it to every rank.

    Raises:
        UserError: as `everywhere`.
    """
    if peers.size == 1:
        return work()
    answer, error = _try(work) if peers.rank == 0 else (None, None)
    given = peers.broadcast(answer)
    if "failure" in given:
        raise _seen_from_here(0, given["failure"], error)
    value: T = given["value"]
    return value


def pack(value: Any) -> str:
    """A JSON value as compressed text: gathered from ten thousand ranks, its length counts."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode())).decode()


def unpack(text: str) -> Any:
    """The value given to `pack`."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _raise_first(peers: Peers, answer: dict[str, Any], own: BaseException | None) -> None:
    """Raise what failed on the first rank on which anything did."""
    first = peers.lowest([peers.rank, answer["failure"]] if "failure" in answer else None)
    if first is not None:
        raise _seen_from_here(first[0], first[1], own)


def _try(work: Callable[[], Any]) -> tuple[dict[str, Any], BaseException | None]:
    # Whatever it is, the others wait for an answer; it is raised again when they have it.
    try:
        return {"value": work()}, None
    except BaseException as error:
        failure = {"host": platform.node(), "field": None, "cure": "see the traceback of that rank"}
        if isinstance(error, DamagedCheckpointError):
            failure |= {"field": str(error.path), "reason": error.reason}
        elif isinstance(error, UserError):
            failure |= {"field": error.field, "problem": error.problem, "cure": error.cure}
        else:
            failure["problem"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return {"failure": failure}, error


def _seen_from_here(rank: int, failure: dict[str, Any], own: BaseException | None) -> BaseException:
    if own is not None and not isinstance(own, UserError):
        return own
    where = f"rank {rank} ({failure['host']})"
    error: UserError
    if "reason" in failure:
        error = DamagedCheckpointError(failure["field"], f"{failure['reason']}, says {where}")
    else:
        error = UserError(f"{where}: {failure['problem']}", cure=failure["cure"], field=failure["field"])
    error.__cause__ = own
    return error
