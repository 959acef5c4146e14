"""Classes of failures of training jobs, as Acme counts them (arXiv 2403.07648, section 5, table 3).

Infrastructure is what a host, a link or a service does to a job; framework and script are what a program does to
itself. The depth of a class says which of two lines of one incident explains the other: a GPU's error explains a
failed call, that explains an exception, and none of them is explained by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.detect.detection import Advice

Family = Literal["infrastructure", "framework", "script", "other"]

OUTSIDE = "ended from outside"
"""A scheduler, a person or a signal ended a job that had nothing wrong."""


@dataclass(frozen=True)
class FailureClass:
    """One class.

    Attributes:
        name: as rules and verdicts write it.
        depth: the higher, the nearer to the cause.
        host_advice: about the host where it was first seen, when only that one shows it.
        per_host: whether a host can be at fault at all; of others the program, its data or a service is.
    """

    name: str
    family: Family
    depth: int
    host_advice: Advice
    per_host: bool


def _classes() -> dict[str, FailureClass]:
    machine = [
        ("NVLink error", 9, "exclude"), ("ECC error", 9, "exclude"), ("CUDA error", 7, "check"),
        ("node failure", 9, "exclude"), ("network error", 6, "check"), ("connection error", 4, "check"),
        ("storage error", 5, "watch"), ("NCCL timeout", 3, "check"), ("NCCL remote error", 3, "check"),
        ("silent corruption", 9, "exclude"),  # not of the table: peers hold other bits
    ]  # fmt: skip
    framework = [
        ("dataloader killed", 6), ("attribute error", 4), ("out of memory", 6), ("runtime error", 3),
        ("assertion error", 4), ("value error", 4), ("zero division error", 4), ("model loading error", 5),
        ("dataset loading error", 5),
    ]  # fmt: skip
    script = [
        ("file not found", 4), ("OS error", 4), ("type error", 4), ("name error", 4), ("permission error", 4),
        ("import error", 4), ("key error", 4), ("syntax error", 4), ("argument error", 4), ("called process error", 4),
        ("index error", 4),
    ]  # fmt: skip
    # Not of the table either: no host is at fault, and whatever else a job says explains them.
    others = [("loss not finite", 2, "program"), ("stopped by a person", 1, "watch"), (OUTSIDE, 1, "none")]
    hosts = {"storage error"}  # one host's mount or path may be at fault
    found: dict[str, FailureClass] = {}
    for name, depth, advice in machine:
        found[name] = FailureClass(name, "infrastructure", depth, advice, name not in hosts)  # type: ignore[arg-type]
    for name, depth in framework:
        found[name] = FailureClass(name, "framework", depth, "program", False)
    for name, depth in script:
        found[name] = FailureClass(name, "script", depth, "program", False)
    for name, depth, other_advice in others:
        found[name] = FailureClass(name, "other", depth, other_advice, False)  # type: ignore[arg-type]
    return found


FAILURE_CLASSES = _classes()


def class_of(kind: str) -> FailureClass:
    """The class that a rule names; one of a user's own is ``other``."""
    return FAILURE_CLASSES.get(kind) or FailureClass(kind, "other", 5, "watch", True)
