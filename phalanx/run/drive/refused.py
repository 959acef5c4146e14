"""What of a job is refused, before anything of it is made or anything of the job before is moved. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.run.backends.choose import check_backend
from phalanx.run.config import RunConfig, workers_on
from phalanx.run.executor.accelerators import Accelerators
from phalanx.run.judge.rules import load_rules
from phalanx.run.people.webhook import check_url
from phalanx.run.secrets import server_context


def refuse(config: RunConfig) -> None:
    """See that the driver, which finds all of this too, would find nothing wrong.

    Raises:
        UserError: something is.
    """
    _see_script(config)
    check_backend(config)
    load_rules([Path(rule) for rule in config.rules])
    if config.tls.files is not None:
        server_context(config.tls.files)
    if config.webhook:
        check_url(config.webhook)
    if config.backend == "local" and config.workers_per_host == "gpu":
        workers_on(config.workers_per_host, 1, len(Accelerators().read()))
    if "://" in config.journal:
        from phalanx.run.journal.places import place_for  # SQLAlchemy is slow to import

        place_for(config.journal, config.job_name, os.environ)


def _see_script(config: RunConfig) -> None:
    """Where the hosts are this machine, it is there."""
    if config.backend != "local":
        return
    folder = Path(config.working_folder or ".")
    if not folder.is_dir():
        cure = "give a folder that is there"
        raise UserError("is no folder", cure=cure, field="run.working_folder", value=config.working_folder)
    path = folder / config.script
    if config.module or path.is_file():
        return
    cure = "give the path of a Python script, or a module with -m"
    problem = "is a folder" if path.is_dir() else "there is no such file"
    raise UserError(problem, cure=cure, field="script", value=config.script)
