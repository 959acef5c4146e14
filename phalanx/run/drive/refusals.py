"""What of a job is refused before anything is made of it, without loading the driver, which would find it too."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import psutil

from phalanx.core.errors import UserError
from phalanx.core.units import size
from phalanx.detect.logs.log_rules import load_rules
from phalanx.run.backends.backend import check_backend
from phalanx.run.config import RunConfig, workers_on
from phalanx.run.driver.machine_watch import check_source
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.file_limit import allow_files
from phalanx.run.reports.webhook import check_url
from phalanx.run.secrets import server_context
from phalanx.telemetry.alerts.alert_receivers import receivers_of

_RANK_BYTES = 8 << 20
"""What a process of Python takes at least."""


def refuse(config: RunConfig) -> None:
    """See that the driver, which finds all of this too, would find nothing wrong.

    Raises:
        UserError: something is.
    """
    allow_files(config.hosts + config.spares)
    if config.backend == "local":
        _see_script(config)
    check_backend(config)
    load_rules([Path(rule) for rule in config.rules])
    if config.tls.files is not None:
        server_context(config.tls.files)
    if config.webhook:
        check_url(config.webhook)
    receivers_of(config.alerts, os.environ)
    if config.judges.prometheus.url:
        check_source(config.judges.prometheus)
    if config.backend == "local":
        _see_ranks(config)
    if "://" in config.journal:
        from phalanx.run.journal.journal_tables import place_for  # SQLAlchemy is slow to import

        place_for(config.journal, config.job_name, os.environ)


def _see_script(config: RunConfig) -> None:
    """The hosts are this machine, so the script has to be there."""
    folder = Path(config.working_folder or ".")
    if not folder.is_dir():
        cure = "give a folder that is there"
        raise UserError("is no folder", cure=cure, field="run.working_folder", value=config.working_folder)
    path = folder / config.script
    if not config.module:
        if not path.is_file() and not (path / "__main__.py").is_file():
            cure = "give the path of a Python script, or a module with -m"
            problem = "is a folder without a __main__.py" if path.is_dir() else "there is no such file"
            raise UserError(problem, cure=cure, field="script", value=config.script)
        return
    # A module can be found, as far as its first part goes: to look for the rest imports that.
    name = config.script.partition(".")[0]
    paths = config.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    # Absolute, since what Python has found in "." it remembers for every working folder.
    folders = [str(Path(path).absolute()) for path in (str(folder), *filter(None, paths))]
    if PathFinder.find_spec(name, folders) is None and find_spec(name) is None:
        cure = "give a module that this Python finds from the working folder, or the path of a script without -m"
        raise UserError("there is no such module", cure=cure, field="script", value=config.script)


def _see_ranks(config: RunConfig) -> None:
    """The machine has room for all ranks, and the GPUs that are asked for."""
    setting = config.workers_per_host
    if not isinstance(setting, int):
        workers_on(setting, 1, len(Accelerators().read()) if setting == "gpu" else 0)
        return
    least_bytes = config.hosts * setting * _RANK_BYTES
    if least_bytes > (total_bytes := psutil.virtual_memory().total):
        ranks, least, total = f"{config.hosts * setting:,} ranks", size(least_bytes), size(total_bytes)
        cure = "give fewer, or cpu for one on each core"
        problem = f"{ranks} take {least} and more, and this machine has {total}"
        raise UserError(problem, cure=cure, field="run.workers_per_host", value=setting)
