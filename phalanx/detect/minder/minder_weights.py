"""What the judge of machines was taught, as the package ships it: `benchmarks/train_minder.py` makes both files.

``weights/encoders.npz`` holds an encoder per metric, ``weights/numbers.json`` what was learnt with them: the order of
metrics, healthy spreads, thresholds per number of machines, how sure to be, and what classes of faults look like.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from phalanx.detect.minder.machine_history import MetricNumbers
from phalanx.detect.minder.window_encoder import WindowEncoder

ONE_MODEL = "one_model"
"""Name of the encoder of all metrics as one, the paper's INT."""

_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "mean")


@dataclass(frozen=True)
class ConfidenceNumbers:
    """Of a logistic regression: how often incidents like it were right among labelled cases of the develop split.

    Attributes:
        constant: log-odds where all else is 0.
        weights: of what `phalanx.detect.minder.fault_guess.confidence_features` gives.
    """

    constant: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class ClassNumbers:
    """Of a multinomial regression: what classes of faults look like.

    Attributes:
        names: of classes.
        metrics: whose changes are looked at.
        weights: [classes, features], as `phalanx.detect.minder.fault_guess.class_features` gives them.
        constants: [classes].
    """

    names: tuple[str, ...]
    metrics: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]
    constants: tuple[float, ...]


@dataclass(frozen=True)
class MinderNumbers:
    """All that was learnt.

    Attributes:
        order: of metrics, by how close to the root of the tree they are.
        metrics: encoder, spreads and thresholds of each.
        encoders: of each metric, and of all as one (`ONE_MODEL`).
        confidence: how sure to be; None: not fitted yet.
        classes: of faults; None: not fitted yet.
        about: how and from what it was made.
    """

    order: tuple[str, ...]
    metrics: Mapping[str, MetricNumbers]
    encoders: Mapping[str, WindowEncoder]
    confidence: ConfidenceNumbers | None
    classes: ClassNumbers | None
    about: Mapping[str, Any]


@functools.cache
def shipped_numbers() -> MinderNumbers:
    """Those of the package."""
    folder = files("phalanx.detect.minder") / "weights"
    with (folder / "encoders.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        encoders = encoders_of(arrays)
    return numbers_of(json.loads((folder / "numbers.json").read_text("utf-8")), encoders)


def encoders_of(arrays: Mapping[str, Any]) -> dict[str, WindowEncoder]:
    """From arrays named ``METRIC/weight_ih`` and so on."""
    names = dict.fromkeys(name.split("/")[0] for name in arrays)
    return {
        name: WindowEncoder.from_torch_arrays({part: arrays[f"{name}/{part}"] for part in _PARTS}) for name in names
    }


def numbers_of(written: Mapping[str, Any], encoders: Mapping[str, WindowEncoder]) -> MinderNumbers:
    """From what ``numbers.json`` holds."""
    confidence, classes = written.get("confidence"), written.get("classes")
    return MinderNumbers(
        order=tuple(written["order"]),
        metrics={
            name: MetricNumbers(
                encoders[name], tuple(one["floors"]), tuple((int(n), a, b, c) for n, a, b, c in one["thresholds"])
            )
            for name, one in written["metrics"].items()
        },
        encoders=encoders,
        confidence=confidence and ConfidenceNumbers(confidence["constant"], tuple(confidence["weights"])),
        classes=classes
        and ClassNumbers(
            tuple(classes["names"]),
            tuple(classes["metrics"]),
            tuple(map(tuple, classes["weights"])),
            tuple(classes["constants"]),
        ),
        about=written.get("about", {}),
    )
