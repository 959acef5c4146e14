"""What if: networks, stragglers, and months of a job whose hosts fail."""

from phalanx.core.lazy_names import make_callable

make_callable(__name__, "phalanx.api.simulation", "simulate")
