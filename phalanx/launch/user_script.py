"""Somebody else's script as a rank: started so that it cannot tell us from torchrun, with hooks that report its steps.

The variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. Python's side is what
``python -u script.py …`` or ``python -u -m module …`` does, in a process that has imported much already.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.addresses import is_loopback, stay_here
from phalanx.core.errors import UserError
from phalanx.core.progress import ATTEMPT_VARIABLE, PROGRESS_VARIABLE
from phalanx.ipc.processes import dump_beside, register
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.fresh_rank import new_main, when_imported
from phalanx.launch.launch_messages import Learnt, RankSpec
from phalanx.launch.learnt_imports import learnable, pieces
from phalanx.launch.rank_failures import frames_of_user
from phalanx.launch.script_hooks import begin_page, end_groups_well, report_steps

_SCHEDULE_VARIABLE = "PHALANX_AGENDA"  # of faults on purpose


@dataclass(frozen=True)
class Script:
    """What is to be run: a path, from the working directory `folder`, or with `is_module` the name of a module."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    folder: str = "."

    @property
    def path_entry(self) -> str:
        """What Python puts first into `sys.path`."""
        folder = Path(self.folder).resolve()
        return str(folder if self.is_module else (folder / self.name).resolve().parent)


@dataclass(frozen=True)
class Group:
    """The ranks of one host in one attempt.

    Attributes:
        attempt: its number, from 1.
        ranks: in order of their local rank.
        group_rank, hosts: place of this host among the hosts of the attempt, and how many there are.
        host, port: where the store is.
        restarts, max_restarts, run_id, role: as torchrun's variables have them.
    """

    attempt: int
    ranks: Sequence[int]
    world_size: int
    group_rank: int
    hosts: int
    host: str
    port: int
    restarts: int = 0
    max_restarts: int = 0
    run_id: str = "none"
    role: str = "default"

    def worker(self, local_rank: int) -> Worker:
        """One of them."""
        return Worker(
            rank=self.ranks[local_rank],
            local_rank=local_rank,
            world_size=self.world_size,
            local_world_size=len(self.ranks),
            host=self.host,
            port=self.port,
            attempt=self.restarts,
            launcher="torchrun",
        )


@dataclass(frozen=True)
class Places:
    """What the executor gives to the ranks of a group, by local rank.

    Attributes:
        output_fds: where stdout and stderr go; None, or no entry: where the template's go.
        pages: paths of progress pages; without, nothing is reported.
    """

    shares: Sequence[Share]
    output_fds: Sequence[int | None] = ()
    pages: Sequence[str | None] = field(default=())


def torchrun_environment(group: Group, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets for one rank."""
    rank = group.ranks[local_rank]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_WORLD_SIZE": str(len(group.ranks)),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.hosts),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(group.world_size),
        "ROLE_NAME": group.role,
        "MASTER_ADDR": group.host,
        "MASTER_PORT": str(group.port),
        "TORCHELASTIC_RESTART_COUNT": str(group.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(group.max_restarts),
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # see phalanx.launch.rendezvous_store
    }


def rank_specs(script: Script, group: Group, places: Places, environ: Mapping[str, str]) -> list[RankSpec]:
    """How a template makes the ranks of a group.

    Args:
        environ: their environment but for torchrun's variables; TORCH_NCCL_ASYNC_ERROR_HANDLING and OMP_NUM_THREADS,
            which torchrun sets where they are absent, are as there, the latter to the threads of the share. Where the
            store is at loopback, gloo is kept there too, unless GLOO_SOCKET_IFNAME says otherwise.
    """
    specs = []
    for local_rank in range(len(group.ranks)):
        share = places.shares[local_rank]
        usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": str(share.threads)}
        if is_loopback(group.host):  # all ranks are on this machine, then
            usual |= stay_here()
        ours = {ATTEMPT_VARIABLE: str(group.attempt)}
        page = places.pages[local_rank] if local_rank < len(places.pages) else None
        if page:
            ours[PROGRESS_VARIABLE] = page
        folder = str(Path(script.folder).resolve())
        argv = [script.name, *script.arguments]
        spec = RankSpec(
            worker=group.worker(local_rank),
            share=share,
            output_fd=places.output_fds[local_rank] if local_rank < len(places.output_fds) else None,
            target="phalanx.launch.user_script:run_script",
            arguments=(script.name, script.is_module, folder),
            environ={**usual, **environ, **torchrun_environment(group, local_rank), **ours},
            path=[script.path_entry],
            argv=argv,
            speaks=True,
            fresh=[folder, script.path_entry, "-m" if script.is_module else "", *argv],
        )
        specs.append(spec)
    return specs


def run_script(worker: Worker, send: Callable[[Any], None], name: str, is_module: bool, folder: str) -> None:
    """Run a script, or a module, as ``__main__`` in this process, whose `sys.argv` and `sys.path` are set already.

    What it raises is shown on stderr, as Python does, and goes on to the caller. Local rank 0 reports what the script
    has imported, by `send`, to the launcher. Name, is_module, folder: as `Script` has them.
    """
    os.chdir(folder)
    sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if is_module else []), *sys.argv]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # as python -u
    if _SCHEDULE_VARIABLE in os.environ:
        from phalanx.faults.inject import install_from_environment  # of no use to any other script

        install_from_environment(when_imported=when_imported)
    known = frozenset(sys.modules)
    reported: list[bool] = []

    def report_imports() -> None:
        if worker.local_rank == 0 and not reported:
            reported.append(True)
            with contextlib.suppress(OSError):  # the template is gone, and this process soon
                for piece, is_last in pieces(learnable(dict(sys.modules), known)):
                    send(Learnt(worker.rank, piece, is_last))

    # The page that the executor reads, and beside it stacks whenever it asks for them: py-spy may do without, and
    # training goes on without a page that cannot be written.
    if path := os.environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError):
            register(dump_beside(path))
    report_steps(begin_page(os.environ), report_imports)
    when_imported("torch.distributed", end_groups_well)
    try:
        if is_module:
            # As ``python -m``; the function is the one that Python itself calls for that, private but as old as it.
            new_main(None)
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            _run_file(name)
    except SystemExit:
        raise
    except BaseException as error:  # shown as Python does where nothing has caught it, without our own frames
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            error.__traceback__ = frames_of_user(error)
            sys.excepthook(type(error), error, error.__traceback__)
        raise
    report_imports()


def _run_file(name: str) -> None:
    path = Path.cwd() / name
    try:
        source = path.read_bytes()
    except OSError as error:
        problem, cure = f"cannot be read ({error.strerror})", "give the path of a Python script"
        raise UserError(problem, cure=cure, field="script", value=name) from None
    code = compile(source, str(path), "exec", dont_inherit=True)
    exec(code, vars(new_main(str(path))))
