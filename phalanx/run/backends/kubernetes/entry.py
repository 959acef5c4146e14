"""What a pod begins with: ``python3 -m phalanx.run.backends.kubernetes.entry driver|executor``.

Files of a Secret belong to root, are reached through links, and what a pod's user may read its group may too. So they
are copied into a folder in memory that is this user's alone, as the token has to be; then the real program takes over.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.run.backends.kubernetes.manifests import JOB_FOLDER, OWN_FOLDER, SECRET_FOLDER, host_name

CRASHED = 70
"""Exit status of a driver that has a fault of its own (EX_SOFTWARE of sysexits.h): it is started again."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become the driver, or an executor."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        take_secrets(Path(SECRET_FOLDER), Path(OWN_FOLDER))
        if arguments == ["driver"]:
            drive([f"{JOB_FOLDER}/job.toml"])
        command = executor_command(arguments, os.environ, Path(OWN_FOLDER))
    except (UserError, OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        sys.exit(2)
    os.execv(command[0], command)


def drive(jobs: Sequence[str], module: str = "phalanx.cli.main") -> NoReturn:
    """Be the driver. What Python ends with after a traceback is also how a job ends whose script fails: so not 1."""
    sys.argv = ["phalanx", "run", "--no-supervisor", *(word for job in jobs for word in ("--job", job))]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)
    sys.exit(0)


def take_secrets(source: Path, target: Path) -> None:
    """Copy every file of `source` into a folder that only this user can enter."""
    target.mkdir(mode=0o700, exist_ok=True)
    target.chmod(0o700)
    old = os.umask(0o077)
    try:
        for path in source.iterdir():
            if not path.name.startswith(".") and path.is_file():
                write_bytes(target / path.name, path.read_bytes())
    finally:
        os.umask(old)


def executor_command(arguments: Sequence[str], environ: Mapping[str, str], own: Path) -> list[str]:
    """The program of an executor; `arguments` are ``executor`` and what `executor_settings` is given, as JSON."""
    if len(arguments) != 2 or arguments[0] != "executor":
        raise UserError("is no part of a job", cure="give driver or executor", value=" ".join(arguments))
    settings = json.dumps(executor_settings(json.loads(arguments[1]), environ, own))
    return [sys.executable, "-m", "phalanx.run.executor.main", settings]


def executor_settings(given: Mapping[str, Any], environ: Mapping[str, str], own: Path) -> dict[str, Any]:
    """What the driver has said of all executors (settings, base, wave, driver), and what only this pod knows."""
    where = own / "driver"
    write_bytes(where, f"{given['driver']}\n".encode())
    return {
        **given["settings"],
        "host": host_name(given["base"], given["wave"], int(environ["JOB_COMPLETION_INDEX"])),
        "address": environ["PHALANX_POD_IP"],
        "driver": str(where),
        "token": str(own / "token"),
        "uses_tls": True,
        "authority": str(own / "ca.crt"),
    }


if __name__ == "__main__":
    main()
