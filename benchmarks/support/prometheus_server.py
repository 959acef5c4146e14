"""A real Prometheus on loopback, for benchmarks and tests: over backfilled blocks, or exporters that it scrapes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.simulated_exporters import write_openmetrics

WAIT_S = 120.0
NEEDS = "needs Debian's package prometheus (apt-get install --no-install-recommends prometheus)"


def has_prometheus() -> bool:
    """Whether server and promtool are installed."""
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def backfill(table: MetricTable, folder: Path) -> None:
    """Write a table into `folder`/data as blocks of Prometheus."""
    write_openmetrics(table, folder / "metrics.om")
    words = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "metrics.om", "data"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[str]:
    """The URL of a server over `folder`/data; its log is `folder`/log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address={at}", "--storage.tsdb.retention.time=100y"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + WAIT_S
        while True:
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError((folder / "log").read_text())
            with suppress(OSError), urllib.request.urlopen(f"http://{at}/-/ready", timeout=5):
                break
            time.sleep(0.1)
        yield f"http://{at}"
    finally:
        process.terminate()
        process.wait(60)
