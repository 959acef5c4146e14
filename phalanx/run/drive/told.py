"""What the job file says, as executors and the driver's watching are told it. Torch-free."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from phalanx.run import messages
from phalanx.run.config import RunConfig
from phalanx.run.driver.driver import Settings
from phalanx.run.driver.peers import PeersConfig
from phalanx.run.executor.main import Settings as ExecutorSettings


def executor_command(config: RunConfig, host: str) -> list[str]:
    """The command that runs the executor of a host."""
    folder = config.run_folder.absolute()
    settings = ExecutorSettings(
        job=config.job_name,
        host=host,
        folder=str(folder),
        driver=str(folder / "driver"),
        token=str(config.token_path.absolute()),
        logs=str(config.log_folder.absolute()),
        segment_bytes=config.logs.segment_bytes,
        kept_bytes=config.logs.kept_bytes,
        rules=tuple(str(Path(rule).absolute()) for rule in config.rules),
        skip=config.checks.skip,
        checkpoints=config.checkpoint_place,
        address="127.0.0.1" if config.backend == "local" else "auto",
        hosts=config.hosts,
        is_only_host=config.backend == "local" or config.hosts == 1,
        driver_lost_s=config.driver_lost_s,
        **_tls(config),
    )
    text = msgspec.json.encode(settings).decode()
    return [sys.executable, "-m", "phalanx.run.executor", text]


def _tls(config: RunConfig) -> dict[str, Any]:
    """With what executors reach the driver: where both sides show a certificate, with the driver's own."""
    tls = config.tls
    found: dict[str, Any] = {"uses_tls": bool(tls.certificate)}
    if tls.authority:
        files = {"authority": tls.authority, "certificate": tls.certificate, "key": tls.key}
        found |= {name: str(Path(file).absolute()) for name, file in files.items()}
    return found


def watching(config: RunConfig) -> Settings:
    """How the driver watches, and what it has executors prepare."""
    folder = str(Path(config.working_folder or ".").absolute())
    prepare = messages.Prepare(
        [config.script, *config.script_arguments], config.module, folder, dict(config.environment), list(config.preload)
    )
    peers = PeersConfig(config.slow, config.traffic, config.heartbeat_s)
    return Settings(config.heartbeat_s, config.limits, peers, _versions(config, prepare))


def _versions(config: RunConfig, present: messages.Prepare) -> dict[str, messages.Prepare]:
    """What executors are told to run, by the version of the code as the decision names it."""
    previous, name = config.previous, config.previous_version
    if not name:
        return {"": present}
    script = [
        previous.script or config.script,
        *(config.script_arguments if previous.arguments is None else previous.arguments),
    ]
    folder = str(Path(previous.working_folder).absolute()) if previous.working_folder else present.folder
    return {"": present, name: msgspec.structs.replace(present, script=script, folder=folder)}
