"""Submitting a job to Slurm from a login node and following it, and where a driver inside an allocation listens."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes, write_json
from phalanx.launch.environment import expand_hosts
from phalanx.run.backends.slurm import commands
from phalanx.run.backends.slurm.batch_script import FOLDER, JOB_FILE
from phalanx.run.backends.slurm.commands import (
    COMMAND_S,
    Allocation,
    SlurmOptions,
    in_allocation,
    read_allocation,
    read_options,
)
from phalanx.run.config import RunConfig, TlsConfig, toml_value
from phalanx.run.decide.actions import NO_HOSTS, STOPPED
from phalanx.run.job_folder import read_card
from phalanx.run.secrets import ensure_certificate, ensure_token
from phalanx.run.wire.driver_address import address_towards
from phalanx.telemetry.alerts.alert_receivers import require_no_address


def settle(config: RunConfig) -> RunConfig:
    """Listen where the allocation's nodes reach this one, with a certificate made for it; what is given stays.

    Raises:
        UserError: Slurm does not say where its nodes are, or the certificate cannot be made.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not in_allocation(os.environ) or not nodes or "listen" in config.model_fields_set:
        return config
    here = address_towards(_address_of(next(expand_hosts(nodes))))
    if is_loopback(here):  # a cluster on one machine
        return config
    changes: dict[str, Any] = {"listen": _address_text(here)}
    if "http" not in config.model_fields_set:
        changes["http"] = _address_text(here)
    if config.tls.files is None:
        changes["tls"] = _own_tls(config, here)
    return config.model_copy(update=changes)


def _address_of(node: str) -> str:
    """As Slurm reaches it."""
    command = ["sinfo", "-h", "-N", "-n", node, "-o", "%o"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        cure = "see whether sinfo works here, or give run.listen and run.tls"
        raise UserError(f"Slurm does not say where it is ({error})", cure=cure, field="node", value=node) from None


def _own_tls(config: RunConfig, here: str) -> TlsConfig:
    token = config.token_path.absolute()
    ensure_token(token)  # makes the folder, or refuses one that others can enter
    try:
        files = ensure_certificate(token.parent, [here, "127.0.0.1", socket.gethostname()])
    except OSError as error:
        cure = "give run.token_file a place in a folder of yours, or run.tls certificates"
        raise UserError(f"no certificate can be made ({error.strerror})", cure=cure, value=str(token.parent)) from None
    pem = str(files.certificate)
    return TlsConfig(certificate=pem, key=pem, authority=pem)


def _address_text(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"


SUBMITTED = "submitted.json"
_SILENT_S = 600.0
_FLAGS = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "time")


def submit(config: RunConfig) -> int | None:
    """Submit the job and follow it to its end, for its exit status; None: this is an allocation, it runs here.

    A job of the same folder that is in the queue already is followed, not submitted again.

    Raises:
        UserError: an option is wrong, or Slurm refuses.
    """
    options = read_options(config)
    if in_allocation(os.environ):
        return None
    commands.require_programs("sbatch", "squeue")
    folder = config.run_folder.absolute()
    job = _submitted(folder)
    if job is None:
        ensure_token(config.token_path.absolute())  # the folder is refused now, and not when the job begins
        job = _submit(config, options, folder)
        _say(f"job {job} is submitted; its folder {folder} has to be on a file system that all nodes share")
    else:
        _say(f"job {job} of this folder is in the queue already")
    _say(f"what it says: {_output_of(folder, job)}")
    stop = shlex.join(["phalanx", "run", "stop", "--folder", str(folder)])
    _say(f"to end it:    {stop}, or scancel {job} (nothing is saved then)")
    return follow(folder, job, options.poll_s) if options.follow else 0


def _output_of(folder: Path, job: str) -> Path:
    return folder / FOLDER / f"{job}.out"


def _submit(config: RunConfig, options: SlurmOptions, folder: Path) -> str:
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    path = place / JOB_FILE
    write_bytes(path, job_file(config, folder).encode())
    path.chmod(0o600)  # variables for ranks are in it
    command = sbatch_command(config, options, folder)
    done = subprocess.run(
        command,
        input=script(folder),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
        env=commands.srun_environment(os.environ),
    )
    if done.returncode:
        cure = "correct run.backend_options, or ask whoever runs the cluster"
        raise UserError(f"sbatch refuses: {done.stderr.strip()}", cure=cure, value=shlex.join(command))
    job = done.stdout.strip().partition(";")[0]
    write_json(place / SUBMITTED, {"job": job})
    return job


def job_file(config: RunConfig, folder: Path) -> str:
    """The job as TOML, whatever it was made from."""
    require_no_address(config.alerts)
    given = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    given["folder"] = str(folder)
    lines = ["[run]"]
    for key, value in given.items():
        if isinstance(value, Mapping):  # TOML has no null
            value = {name: inner for name, inner in value.items() if inner is not None}
        lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def sbatch_command(config: RunConfig, options: SlurmOptions, folder: Path) -> list[str]:
    """How the job is submitted; its script comes on stdin."""
    nodes = config.hosts + config.spares
    signal_s = round(options.stop_before_s)
    return [
        *("sbatch", "--parsable", f"--job-name={config.job_name}", f"--nodes={nodes}", "--ntasks-per-node=1"),
        # A node that fails is taken out of the job, which goes on; a job that goes back into the queue goes on writing.
        *("--no-kill", "--requeue" if options.requeue else "--no-requeue", "--open-mode=append"),
        *(f"--output={folder / FOLDER / '%j.out'}", f"--chdir={Path.cwd()}", f"--signal=B:USR1@{signal_s}"),
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *(["--exclusive"] if options.exclusive else []),
        *(f"--{name}={value}" for name in _FLAGS if (value := getattr(options, name))),
        *options.sbatch,
    ]


def script(folder: Path) -> str:
    """The batch script of the job."""
    program = shlex.join([sys.executable, "-m", "phalanx.run.backends.slurm.batch_script", str(folder)])
    return f"#!/bin/sh\nexec {program}\n"


def _submitted(folder: Path) -> str | None:
    """The job of this folder that waits or runs; None: there is none."""
    try:
        job = str(json.loads((folder / FOLDER / SUBMITTED).read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None
    found = _ask(job)
    return None if found is None or found.is_over else job


def follow(folder: Path, job: str, poll_s: float) -> int:
    """Show what the driver says until the job is over; its exit status. Ctrl-C leaves the job alone."""
    shown, state = 0, ""
    try:
        while True:
            found = _ask_patiently(job)
            now = "over"
            if found is not None:
                waits = found.state == "PENDING" and found.why not in ("", "None")
                now = f"{found.state.lower()}{f' ({found.why})' if waits else ''}"
            if now != state and found is not None and not found.is_over:
                _say(f"job {job} is {now}")
            state = now
            shown = _show(_output_of(folder, job), shown, sys.stderr)
            if found is None or found.is_over:
                break
            time.sleep(min(poll_s, 2.0))
    except KeyboardInterrupt:
        _say(f"job {job} goes on; the same command follows it again")
        return 0
    card = read_card(folder)
    if card is not None and card.status is not None:
        _say(f"job {job} has ended with status {card.status}: {card.ended}")
        return card.status
    state = found.state if found is not None else "forgotten by Slurm"
    _say(f"job {job} is {state.lower()}, and its driver has not said how it has ended")
    return STOPPED if state == "CANCELLED" else NO_HOSTS


def _show(path: Path, shown: int, to: TextIO) -> int:
    """Write what a file has got since; how much of it has been shown."""
    try:
        with path.open("rb") as file:
            file.seek(shown)
            content = file.read()
    except FileNotFoundError:
        return shown
    to.write(content.decode(errors="replace"))
    to.flush()
    return shown + len(content)


def _ask_patiently(job: str) -> Allocation | None:
    """As `_ask`; a controller may not answer for a while."""
    until_s = time.monotonic() + _SILENT_S
    while True:
        try:
            return _ask(job)
        except UserError:
            if time.monotonic() > until_s:
                raise
            time.sleep(5.0)


def _ask(job: str) -> Allocation | None:
    command = ["squeue", "-h", "-t", "all", "-j", job, "-o", commands.COLUMNS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise _no_answer(f"nothing for {COMMAND_S:.0f} s") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise _no_answer(done.stderr.strip())
    return read_allocation(done.stdout)


def _no_answer(problem: str) -> UserError:
    return UserError(f"Slurm does not answer: {problem}", cure="try again later", field="run.backend", value="slurm")


def _say(text: str) -> None:
    sys.stderr.write(f"slurm: {text}\n")
    sys.stderr.flush()
