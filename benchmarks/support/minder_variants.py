"""The variants of Minder that its paper compares (arXiv 2411.01791, 5.3 to 5.6), by the names of our tables."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.detect.minder.paper_minder import Variant
from phalanx.detect.minder.window_encoder import WINDOW
from phalanx.detect.monitoring.metric_catalogue import DETECTED

FEWER = DETECTED[:3]
"""Metrics of the variant with fewer: no power, no engines, no NVLink."""

MORE = (*DETECTED, "memory_usage", "tcp_rdma_throughput", "gpu_temperature", "gpu_clocks", "pcie_bandwidth")
"""Metrics of the variant with more."""

MINDER = "Minder"

VARIANTS: dict[str, Variant] = {
    MINDER: Variant("embedding", DETECTED),
    "Mahalanobis": Variant("mahalanobis", DETECTED, stride=WINDOW),
    "raw windows (RAW)": Variant("raw", DETECTED),
    "joined embeddings (CON)": Variant("joined", DETECTED),
    "one model (INT)": Variant("one_model", DETECTED),
    "no continuity": Variant("embedding", DETECTED, has_continuity=False),
    "fewer metrics": Variant("embedding", FEWER),
    "more metrics": Variant("embedding", MORE),
    "two metrics": Variant("embedding", DETECTED[:2]),
    "Manhattan": Variant("embedding", DETECTED, "manhattan"),
    "Chebyshev": Variant("embedding", DETECTED, "chebyshev"),
    "metrics the other way round": Variant("embedding", DETECTED[::-1]),
    "Minder, windows that do not overlap": Variant("embedding", DETECTED, stride=WINDOW),
    "Mahalanobis, every window": Variant("mahalanobis", DETECTED),
}

OWN_FACTOR = (MINDER, "Mahalanobis", "Mahalanobis, every window", "no continuity")
"""Minder, baselines, and what without continuity would raise an alarm in every job; the others have Minder's."""


@dataclass(frozen=True)
class Published:
    """What the paper says of a variant.

    Attributes:
        precision, recall, f1: its figures; None: in a picture only, or not compared.
        lower: which of ``precision``, ``recall``, ``f1`` are lower than Minder's.
        higher: which are higher.
        alike: whether all are about Minder's.
    """

    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    lower: tuple[str, ...] = ()
    higher: tuple[str, ...] = ()
    alike: bool = False


PUBLISHED: dict[str, Published] = {
    MINDER: Published(0.904, 0.883, 0.893),
    "Mahalanobis": Published(0.788, 0.767, 0.777, lower=("precision", "recall", "f1")),
    "raw windows (RAW)": Published(lower=("recall",)),
    "joined embeddings (CON)": Published(lower=("f1",)),
    "one model (INT)": Published(lower=("f1",)),
    "no continuity": Published(0.757, lower=("precision",)),
    "fewer metrics": Published(lower=("precision", "recall")),
    "more metrics": Published(lower=("precision",), higher=("recall",)),
    "Manhattan": Published(alike=True),
    "Chebyshev": Published(alike=True),
}
