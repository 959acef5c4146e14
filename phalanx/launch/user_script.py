"""Somebody else's script as a rank: started so that it cannot tell us from torchrun.

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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.core.addresses import is_loopback, stay_here
from phalanx.core.errors import UserError
from phalanx.core.progress import PROGRESS_VARIABLE, ProgressWriter
from phalanx.ipc.processes import dump_beside, register
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.launch_messages import Learnt, RankSpec
from phalanx.launch.optimizer_hook import end_groups_well, learnable, pieces, report_steps, when_imported
from phalanx.launch.rank_failures import frames_of_user

_TARGET = "phalanx.launch.user_script:run_script"

_AGENDA_VARIABLE = "PHALANX_AGENDA"

ATTEMPT_VARIABLE = "PHALANX_RUN_ATTEMPT"
"""The number of the attempt, for the progress page; torchrun's variables count restarts only."""


@dataclass(frozen=True)
class Script:
    """What is to be run.

    Attributes:
        name: a path, from `folder`, or with `is_module` the name of a module.
        arguments: its own.
        folder: the working directory.
    """

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
        world_size: of all hosts.
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
        shares: cores and threads.
        output_fds: where stdout and stderr go; None, or no entry: where the template's go.
        pages: paths of progress pages; without, nothing is reported.
    """

    shares: Sequence[Share]
    output_fds: Sequence[int | None] = ()
    pages: Sequence[str | None] = field(default=())


def torchrun_environment(group: Group, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets, for one rank."""
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
        script: what they run.
        group: who they are.
        places: where they run and write.
        environ: their environment but for torchrun's variables; TORCH_NCCL_ASYNC_ERROR_HANDLING and OMP_NUM_THREADS,
            which torchrun sets where they are absent, are as there, the latter to the threads of the share. Where the
            store is at loopback, gloo is kept there too, unless GLOO_SOCKET_IFNAME says otherwise.
    """
    return [_rank_spec(script, group, places, environ, local_rank) for local_rank in range(len(group.ranks))]


def _rank_spec(script: Script, group: Group, places: Places, environ: Mapping[str, str], local_rank: int) -> RankSpec:
    share = places.shares[local_rank]
    usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": str(share.threads)}
    if is_loopback(group.host):  # all ranks are on this machine, then
        usual |= stay_here()
    ours = {ATTEMPT_VARIABLE: str(group.attempt)}
    if page := _at(places.pages, local_rank):
        ours[PROGRESS_VARIABLE] = page
    return RankSpec(
        worker=group.worker(local_rank),
        share=share,
        output_fd=_at(places.output_fds, local_rank),
        target=_TARGET,
        arguments=(script.name, script.is_module, str(Path(script.folder).resolve())),
        environ={**usual, **environ, **torchrun_environment(group, local_rank), **ours},
        path=[script.path_entry],
        argv=[script.name, *script.arguments],
        speaks=True,
    )


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def run_script(worker: Worker, say: Callable[[Any], None], name: str, is_module: bool, folder: str) -> None:
    """Run a script, or a module, as ``__main__`` in this process, whose `sys.argv` and `sys.path` are set already.

    What it raises is shown on stderr, as Python does, and goes on to the caller.

    Args:
        worker: who this is; local rank 0 says what the script has imported.
        say: sends a message to the launcher.
        name, is_module, folder: as `Script` has them.

    Raises:
        UserError: there is no such script.
    """
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # as python -u
    if _AGENDA_VARIABLE in os.environ:
        from phalanx.faults.inject import install_from_environment  # of no use to any other script

        install_from_environment(when_imported=when_imported)
    known = frozenset(sys.modules)
    said: list[bool] = []

    def learn() -> None:
        if worker.local_rank == 0 and not said:
            said.append(True)
            with contextlib.suppress(OSError):  # the template is gone, and this process soon
                for piece, is_last in pieces(learnable(dict(sys.modules), known)):
                    say(Learnt(worker.rank, piece, is_last))

    _offer_stacks(os.environ)
    report_steps(_open_page(os.environ), learn)
    end_groups_well()
    try:
        _run_module(name) if is_module else _run_file(name)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _show(error)
        raise
    learn()


def _show(error: BaseException) -> None:
    """As Python shows an exception that nobody caught, without our own frames."""
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    else:
        error.__traceback__ = frames_of_user(error)
        sys.excepthook(type(error), error, error.__traceback__)


def _open_page(environ: Mapping[str, str]) -> ProgressWriter | None:
    """The page that the executor reads; training goes on without one that cannot be written."""
    path = environ.get(PROGRESS_VARIABLE)
    try:
        return ProgressWriter(path, int(environ.get(ATTEMPT_VARIABLE, "0"))) if path else None
    except OSError as error:
        print(f"steps are not reported: {path}: {error.strerror}", file=sys.stderr)
        return None


def _offer_stacks(environ: Mapping[str, str]) -> None:
    """Have this process write its stacks beside its page whenever the executor asks for them."""
    if path := environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError):  # py-spy may do without
            register(dump_beside(path))


def _run_file(name: str) -> None:
    path = Path.cwd() / name
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror})", cure="give the path of a Python script", field="script", value=name
        ) from None
    code = compile(source, str(path), "exec", dont_inherit=True)
    exec(code, vars(_new_main(str(path))))


def _run_module(name: str) -> None:
    """As ``python -m``; the function is the one that Python itself calls for that, private but as old as it."""
    _new_main(None)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _new_main(path: str | None) -> ModuleType:
    """A fresh ``__main__``, with what Python gives it."""
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path) if path is not None else None
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __loader__=loader)
    if path is not None:
        vars(main).update(__file__=path, __cached__=None)
    sys.modules["__main__"] = main
    return main
