"""The prediction that a run is held against: made where planner and trainer are both known, passed on as a value."""

from __future__ import annotations

from phalanx.cli.plan_predict import report_with
from phalanx.cli.planning import plan_of
from phalanx.core.layout import Layout
from phalanx.plan.hardware.hardware_files import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.report.report_json import prediction_json
from phalanx.plan.types import Prediction
from phalanx.train.config import RunConfig
from phalanx.train.predicted_cost import LOADER, OPTIMIZER, PASSES, WAITING, Expected

# Which part of a step, as training can tell them apart, the parts of a prediction belong to; the rest is waiting.
_GROUPS = {"compute": PASSES, "efficiency": PASSES, "optimizer": OPTIMIZER, "loader": LOADER}


def expected_of(config: RunConfig, name: str, cluster: str, devices: int) -> Expected:
    """What a step of `config` is predicted to cost.

    Args:
        name: of the run.
        cluster: name or file.
        devices: ranks of the run.

    Raises:
        UserError: the cluster is not there, or the layout is impossible.
    """
    machine = load_cluster(cluster, devices)
    planned = plan_of(config, machine)
    prediction = predict(planned.job, planned.strategy, machine)
    strategy = planned.strategy
    layout = Layout(*(getattr(strategy, axis) for axis in Layout.__dataclass_fields__))
    return Expected(
        source=f"phalanx plan, cluster {machine.name}",
        step_s=float(prediction.step_s),
        interval_s=prediction.interval_s,
        parts=grouped(prediction),
        memory_bytes=float(prediction.memory[0].total),
        layout=str(layout),
        micro_batch=strategy.micro_batch,
        details=prediction_json(report_with(prediction, name, planned, machine)),
    )


def grouped(prediction: Prediction) -> dict[str, float]:
    """Exposed seconds by the parts that training can tell apart."""
    parts = dict.fromkeys((PASSES, WAITING, OPTIMIZER, LOADER), 0.0)
    for part in prediction.parts:
        parts[_GROUPS.get(part.path.partition("/")[0], WAITING)] += float(part.seconds)
    return parts
