"""What an evaluation found of a checkpoint that was written before it: a file of its own, beside the manifest.

So the checkpoint is durable first, and whatever ends the process meanwhile costs the evaluation alone. The file is no
part of the checkpoint's checksums, and has one of its own: what is torn, or of another step, counts for nothing.
Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.checkpoint.format.files import Files

EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Evaluation:
    """Of the checkpoint of `step`.

    Attributes:
        metrics: figures for keeping the best, besides those of the manifest.
        state: JSON values that take the place of those of the same names in the checkpoint's state.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As JSON with a checksum of itself."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _sum(tree)}, indent=1).encode() + b"\n"


def read_evaluation(files: Files, step: int, note: Callable[[str], None] = lambda _: None) -> Evaluation:
    """What lies beside the checkpoint of `step`; one that says nothing where there is none, or a damaged one.

    Args:
        files: of the checkpoint.
        step: of it.
        note: is given what is wrong with a damaged one.
    """
    try:
        tree = json.loads(files.read(EVALUATION))
        if tree.pop("sha256") != _sum(tree):
            raise ValueError("does not match its checksum")
        if tree["step"] != step:
            raise ValueError(f"is of step {tree['step']}")
        metrics = {str(name): float(value) for name, value in tree["metrics"].items()}
        return Evaluation(step, metrics, dict(tree["state"]))
    except FileNotFoundError:
        pass
    except OSError as error:
        note(f"{EVALUATION} cannot be read ({error.strerror or error})")
    except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError, RecursionError) as error:
        note(f"{EVALUATION} is damaged ({error})")
    return Evaluation(step)


def _sum(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
