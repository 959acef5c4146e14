"""What Prometheus reads of a training: conventional names and base units, one series each, none per rank.

``phalanx_train_`` are figures of the training, wherever they are read: from the watcher of a plain `phalanx train`, or
from the driver of `phalanx run`. What is not known is absent.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from phalanx import __version__
from phalanx.core.addresses import host_of
from phalanx.core.errors import UserError
from phalanx.telemetry.alerts.alert_config import KINDS
from phalanx.telemetry.alerts.alert_rules import DiskSeen
from phalanx.telemetry.alerts.metrics_history import MetricsHistory, figure

FIELD = "logging.metrics_address"
_REQUEST_S = 5.0

# Name, help, name in metrics.jsonl.
_OF_STEP = (
    ("loss", "Loss of the newest step that was written down, nats.", "loss"),
    ("learning_rate", "Learning rate of that step.", "lr"),
    ("gradient_norm", "Norm of its gradient before clipping.", "grad_norm"),
    (
        "tokens_per_second",
        "Tokens trained on per second, over the steps that were written down together.",
        "tokens_per_s",
    ),
    ("step_duration_seconds", "Time of a step, over the same steps.", "step_s"),
    ("mfu_ratio", "Model FLOP/s over the peak of all devices, 0 to 1.", "mfu"),
    ("memory_bytes", "Memory in use on rank 0.", "memory_bytes"),
)


@dataclass(frozen=True)
class TrainingFigures:
    """What is exported of a training at one moment.

    Attributes:
        newest, evaluation: lines of metrics.jsonl; empty: there is none.
        counts: as `MetricsHistory.counts`.
        step: newest that was done; last_step_s: when that was seen, seconds since 1970.
        checkpoint_s: when the newest checkpoint was durable, or the run began; seconds since 1970.
        restarts: starts after the first one.
        alerts: sent so far, by kind; active: kinds that go on.
        ended: finished, failed or stopped; empty: it goes on.
    """

    run: str
    newest: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    total_steps: int | None = None
    last_step_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_s: float | None = None
    restarts: int | None = None
    disks: Sequence[DiskSeen] = ()
    alerts: Mapping[str, int] | None = None
    active: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""

    def families(self) -> Iterable[Metric]:
        """All metrics, each with its help."""
        info = GaugeMetricFamily(
            "phalanx_train_info", "1, with the run's name and the version.", labels=["run", "version"]
        )
        info.add_metric([self.run, __version__], 1.0)
        yield info
        known: dict[str, tuple[str, float | None]] = {
            name: (text, figure(self.newest, key)) for name, text, key in _OF_STEP
        }
        known["validation_loss"] = (
            "Loss on held-out text, at the newest evaluation, nats.",
            figure(self.evaluation, "validation_loss"),
        )
        known["step"] = (
            "Newest optimizer step that was done; it falls when a run is resumed.",
            self.step,
        )
        known["planned_steps"] = ("Optimizer steps of the whole run.", self.total_steps)
        known["last_step_timestamp_seconds"] = ("When the newest step was seen, seconds since 1970.", self.last_step_s)
        known["checkpoint_step"] = ("Step of the newest durable checkpoint.", self.checkpoint_step)
        known["last_checkpoint_timestamp_seconds"] = (
            "When the newest checkpoint was durable, or the run began without one, seconds since 1970.",
            self.checkpoint_s,
        )
        for name, (text, value) in known.items():
            if value is not None:
                yield GaugeMetricFamily(f"phalanx_train_{name}", text, value=float(value))
        yield from self._counters()
        yield from self._disks()

    def _counters(self) -> Iterable[Metric]:
        texts = {
            "steps": "Optimizer steps since this process began to watch.",
            "skipped": "Of these the steps whose update was skipped, since their loss or gradient was bad.",
            "tokens": "Tokens trained on since then.",
            "checkpoints": "Durable checkpoints since then.",
            "evaluations": "Evaluations on held-out text since then.",
        }
        for name, text in texts.items():
            exported = "skipped_steps" if name == "skipped" else name
            yield CounterMetricFamily(f"phalanx_train_{exported}", text, value=float(self.counts.get(name, 0)))
        if self.restarts is not None:
            yield CounterMetricFamily("phalanx_train_restarts", "Starts of the run after its first one.", self.restarts)
        ended = GaugeMetricFamily(
            "phalanx_train_ended", "1 for how the run ended; 0 while it goes on.", labels=["result"]
        )
        for result in ("finished", "failed", "stopped"):
            ended.add_metric([result], float(self.ended == result))
        yield ended
        if self.alerts is not None:
            sent = CounterMetricFamily("phalanx_train_alerts", "Alerts of the run, by kind.", labels=["kind"])
            active = GaugeMetricFamily("phalanx_train_alert_active", "1 while that goes on.", labels=["kind"])
            for kind in KINDS:
                sent.add_metric([kind], self.alerts.get(kind, 0))
                active.add_metric([kind], float(kind in self.active))
            yield from (sent, active)

    def _disks(self) -> Iterable[Metric]:
        if self.disks:
            fullest = min(self.disks, key=lambda disk: disk.free_bytes)
            free = "Free space of the fullest disk that the run writes to."
            yield GaugeMetricFamily("phalanx_train_disk_free_bytes", free, value=float(fullest.free_bytes))
            whole = "Size of that disk."
            yield GaugeMetricFamily("phalanx_train_disk_size_bytes", whole, value=float(fullest.total_bytes))


def figures_of(run: str, history: MetricsHistory, **others: Any) -> TrainingFigures:
    """The figures of a history, with what else is known."""
    return TrainingFigures(
        run,
        newest=history.newest,
        evaluation=history.evaluation,
        counts=dict(history.counts),
        checkpoint_step=history.saved_step,
        **others,
    )


class TrainingCollector(Collector):
    """Exports what `read` returns; None: nothing is known yet."""

    def __init__(self, read: Callable[[], TrainingFigures | None]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metrics that are known now."""
        figures = self._read()
        return [] if figures is None else figures.families()


def listen(address: str, within_s: float = 0.0) -> socket.socket:
    """Take the port where `/metrics` is to be read.

    Args:
        address: HOST:PORT; port 0 is any.
        within_s: for so long somebody else may still have it, such as the watcher of the start before.

    Raises:
        UserError: it is no such address, or taken.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    if not host or not port.isdecimal() or host == address:
        raise UserError("is no address", cure="write HOST:PORT, such as 127.0.0.1:9400", field=FIELD, value=address)
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(server, (host, int(port)), within_s)
        server.listen(16)
    except (OSError, OverflowError) as error:
        server.close()
        why = getattr(error, "strerror", None) or error
        cure = "give another port, or port 0 for any that is free"
        raise UserError(f"cannot be listened at ({why})", cure=cure, field=FIELD, value=address) from None
    return server


def _bind(server: socket.socket, address: tuple[str, int], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while True:
        try:
            return server.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
                raise
        time.sleep(0.1)


class MetricsServer:
    """Answers Prometheus on a socket that listens, in threads of its own."""

    def __init__(self, server: socket.socket, read: Callable[[], TrainingFigures | None]) -> None:
        registry = CollectorRegistry()
        registry.register(TrainingCollector(read))
        handler: Any = MetricsHandler.factory(registry)
        handler.timeout = _REQUEST_S  # who connects and says nothing holds no thread for long
        self._http = ThreadingHTTPServer(server.getsockname()[:2], handler, bind_and_activate=False)
        self._http.socket.close()
        self._http.socket = server
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()
