"""Constraints on the layouts that a search tries, in words such as ``tensor=8``, ``pipeline<=16``, ``zero!=3``.

A word is a name, a comparison and values. Numbers are compared with every layout; choices (`CHOICES`) say what is tried
at all; ``memory`` is how much of a device a layout may fill; ``inside_host`` which groups have to stay inside one host.
Several words about one number all hold. What is not asked for has the defaults of `Constraints`; a word about a number
that has a default bound replaces it, and ``NAME=any`` only removes it.

`SearchTarget` says where layouts are searched.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.parallel.config import ContextMethod, Schedule
from phalanx.plan.software import LAYOUTS
from phalanx.plan.types import Job, Overlap, Recompute

if TYPE_CHECKING:
    from phalanx.plan.hardware import Cluster


NUMBERS: Mapping[str, str] = {
    "pipeline": "pipeline ranks",
    "replicate": "data-parallel copies of the same state",
    "shard": "data-parallel ranks that split state",
    "data": "data-parallel ranks, replicate x shard",
    "context": "ranks that split every sequence",
    "tensor": "ranks that split every matrix",
    "expert": "ranks that hold different experts",
    "micro_batch": "sequences per forward pass",
    "micro_batches": "forward passes per step",
    "chunks": "model chunks on each pipeline rank",
    "stages": "pipeline x chunks",
    "context_tokens": "tokens of a sequence on one context rank",
    "imbalance": "layers of the fullest stage over their mean, less one",
}
"""What can be bounded, and what it is."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "schedule": get_args(Schedule),
    "zero": (0, 1, 2, 3),
    "recompute": tuple(kind for kind in get_args(Recompute) if kind != "alternate"),  # torchtitan's alone
    "sequence_parallel": (True, False),
    "tensor_overlap": get_args(Overlap),
    "context_method": get_args(ContextMethod),
    "bucket_bytes": (),
}
"""What can be chosen from, and all that there is; ``bucket_bytes`` takes any sizes."""

HOST_AXES = ("tensor", "context", "data")  # axes whose groups can be kept inside a host, innermost first

_LEAST_BYTES = 1e6  # of a device's memory; up to 1 a number is a share of it
_OTHERS = ("memory", "inside_host")
_WORD = re.compile(r"\s*([a-z_]+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Bound:
    """Values that a number may have. `default`: nobody asked for it; `program`: that has no others."""

    name: str
    comparison: str
    values: tuple[float, ...]
    default: bool = False
    program: str = ""

    @property
    def text(self) -> str:
        """As a person would write it."""
        return f"{self.name}{self.comparison}{','.join(f'{value:g}' for value in self.values)}"

    def allows(self, number: Any) -> Any:
        """Whether `number` may be; of an array, for each of its numbers."""
        if self.comparison in _COMPARE:
            return _COMPARE[self.comparison](number, self.values[0])
        among = number == self.values[0]
        for value in self.values[1:]:
            among = among | (number == value)
        return among if self.comparison == "=" else ~among if hasattr(among, "shape") else not among


@dataclass(frozen=True)
class Constraints:
    """What layouts are searched.

    Attributes:
        bounds: of numbers. By default sequences are not cut into less than 1,024 tokens a rank, and no stage has over
            an eighth more layers than the mean: such layouts are possible, many, and slow.
        choices: what is tried of each choice, where it is not the default of `phalanx.plan.search.constraints`.
        memory: of a device that a layout may fill: up to 1 a share, above it bytes.
        inside_host: groups of these axes, and those nearer than them, stay inside a host.
    """

    bounds: tuple[Bound, ...] = (
        Bound("context_tokens", ">=", (1024.0,), default=True),
        Bound("imbalance", "<=", (0.125,), default=True),
    )
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    memory: float = 0.95
    inside_host: tuple[str, ...] = ("tensor",)

    def memory_bytes(self, device_bytes: float) -> float:
        """What a layout may fill of a device with `device_bytes`."""
        return self.memory * device_bytes if self.memory <= 1 else self.memory


def parse(words: Sequence[str]) -> Constraints:
    """The constraints that `words` ask for."""
    asked = Constraints()
    own: list[Bound] = []
    lifted: set[str] = set()
    for word in words:
        name, comparison, value = _pieces(word)
        if name in NUMBERS:
            lifted.add(name)
            own += [] if value == "any" else [_bound(word, name, comparison, value)]
        elif name in CHOICES:
            asked = replace(asked, choices={**asked.choices, name: _chosen(word, name, comparison, value)})
        elif name == "memory":
            asked = replace(asked, memory=_memory(word, comparison, value))
        else:
            asked = replace(asked, inside_host=_axes(word, comparison, value))
    kept = tuple(bound for bound in asked.bounds if bound.name not in lifted)
    return replace(asked, bounds=(*own, *kept))


def restricted(asked: Constraints, program: str) -> Constraints:
    """The same among the layouts that a program has (`phalanx.plan.software.LAYOUTS`)."""
    choices, bounds = dict(asked.choices), list(asked.bounds)
    for key, allowed in LAYOUTS.get(program, {}).items():
        if key in CHOICES:
            # Every program can leave whole what has one rank, which is what zero = 0 is there.
            has = (0, *allowed) if key == "zero" else allowed
            choices[key] = tuple(value for value in choices.get(key, has) if value in has)
            if not choices[key]:
                cure = f"take {' or '.join(map(str, allowed))}, or search for another program"
                raise UserError(f"is not what {program} has", cure=cure, field=key, value=asked.choices[key][0])
        else:
            bounds.append(Bound(key, "=", tuple(float(value) for value in allowed), program=program))
    return replace(asked, choices=choices, bounds=tuple(bounds))


def _pieces(word: str) -> tuple[str, str, str]:
    found = _WORD.fullmatch(word)
    if not found or not found[3]:
        raise UserError(
            "is no constraint", cure="write such as tensor=8, 'pipeline<=16' or schedule=1f1b,zbv", value=word
        )
    name, comparison, value = found.groups()
    known = (*NUMBERS, *CHOICES, *_OTHERS)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        cure = f"write {near[0]}" if near else f"take one of {', '.join(known)}"
        raise UserError(f"there is no {name!r} to constrain", cure=cure, value=word)
    if value == "any" and comparison not in ("=", "=="):
        raise UserError("any is all that there is", cure=f"write {name}=any, or a value", value=word)
    return name, "=" if comparison == "==" else comparison, value


def _bound(word: str, name: str, comparison: str, value: str) -> Bound:
    try:
        values = tuple(float(item) for item in value.split(","))
    except ValueError:
        values = (math.nan,)
    if name == "imbalance":
        possible, such = all(0 <= number < math.inf for number in values), "0.25, a number from 0"
    else:
        possible, such = (
            all(1 <= number < 1e18 and number.is_integer() for number in values),
            "8, a whole number from 1",
        )
    if not possible:
        cure = f"write such as {name}{comparison}{such}"
        raise UserError(f"{value!r} is no number of {NUMBERS[name]}", cure=cure, value=word)
    if len(values) > 1 and comparison in _COMPARE:
        raise UserError("is compared with several numbers", cure=f"give one, or write {name}={value}", value=word)
    return Bound(name, comparison, values)


def _chosen(word: str, name: str, comparison: str, value: str) -> tuple[Any, ...]:
    if comparison in _COMPARE:
        raise UserError(f"{name} is a choice, not a size", cure=f"write {name}={value}", value=word)
    if name == "bucket_bytes":
        if comparison != "=":
            raise UserError("there are endless other sizes", cure="write bucket_bytes= with those to try", value=word)
        return tuple(dict.fromkeys(_bytes(word, item) for item in value.split(",")))
    written = {str(option).lower(): option for option in CHOICES[name]}
    if value == "any":
        return CHOICES[name]
    values = [item.strip().lower() for item in value.split(",")]
    unknown = [item for item in values if item not in written]
    if unknown:
        raise UserError(f"there is no {name} {unknown[0]!r}", cure=f"take of {', '.join(written)}", value=word)
    if comparison == "=":
        return tuple(dict.fromkeys(written[item] for item in values))
    left = tuple(option for text, option in written.items() if text not in values)
    if not left:
        raise UserError(f"no {name} is left", cure=f"leave one of {', '.join(written)}", value=word)
    return left


def _memory(word: str, comparison: str, value: str) -> float:
    if comparison not in ("=", "<="):
        raise UserError("memory is a limit", cure="write such as 'memory<=0.9' or 'memory<=72GB'", value=word)
    if value == "any":
        return float("inf")
    try:
        share = float(value)
    except ValueError:
        size = float(_bytes(word, value))
        if size < _LEAST_BYTES:
            raise UserError("nothing fits into that", cure="write a size such as 72GB", value=word) from None
        return size
    if not 0 < share <= 1:
        raise UserError(
            "is neither a share of a device's memory nor a size",
            cure="write a share up to 1, such as 'memory<=0.9', or a size with its unit, such as 'memory<=72GB'",
            value=word,
        )
    return share


def _bytes(word: str, value: str) -> int:
    try:
        return units.parse_size(value)
    except ValueError as error:
        problem, _, cure = str(error).partition(": ")
        raise UserError(problem, cure=cure, value=word) from None


def _axes(word: str, comparison: str, value: str) -> tuple[str, ...]:
    axes = () if value in ("none", "any") else tuple(item.strip() for item in value.split(","))
    if comparison != "=" or any(axis not in HOST_AXES for axis in axes):
        raise UserError(
            "says which groups stay inside a host",
            cure=f"write inside_host=none, or some of {', '.join(HOST_AXES)}, such as inside_host=tensor,context",
            value=word,
        )
    return axes


# The config's default. Sizes hardly matter to a step's time; who wants to know gives several.
_BUCKET_BYTES = 25_000_000


@dataclass(frozen=True)
class SearchTarget:
    """Devices that a job is to be spread over. `kind`: what they are; fused overlap needs GPUs."""

    devices: int
    devices_per_host: int
    memory_bytes: float
    kind: Literal["gpu", "cpu"] = "gpu"

    @classmethod
    def of(cls, cluster: Cluster) -> SearchTarget:
        """All devices of `cluster`."""
        device = cluster.device
        return cls(cluster.devices, cluster.devices_per_host, device.memory_bytes, device.kind)


def options_of(job: Job, machine: SearchTarget, asked: Constraints) -> Mapping[str, tuple[Any, ...]]:
    """What is tried of each choice: what `asked` names, else all that `phalanx train` can run on `machine`.

    A program other than ours is searched with the same choices, and with recomputed attention alone, where it does not
    keep scores on the chip.
    """
    ours: dict[str, tuple[Any, ...]] = {
        "schedule": CHOICES["schedule"],
        "zero": CHOICES["zero"],
        "recompute": ("none", "elementwise", "mlp", "full"),
        "sequence_parallel": (True,),
        "tensor_overlap": ("none", "chunked", "fused") if machine.kind == "gpu" else ("none", "chunked"),
        "context_method": CHOICES["context_method"],
        "bucket_bytes": (_BUCKET_BYTES,),
    }
    if not job.software.fused_attention:
        ours["recompute"] = ("none", "attention", "full")
    return {**ours, **asked.choices}
