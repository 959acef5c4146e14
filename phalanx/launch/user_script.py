"""Somebody else's script as a rank: started so that it cannot tell us from torchrun, with hooks that report its steps.

The variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. Python's side is what
``python -u script.py …`` or ``python -u -m module …`` does, in a process that has imported much already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import os
import runpy
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
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
from phalanx.launch.learnt_imports import is_being_imported, learnable, pieces
from phalanx.launch.rank_failures import frames_of_user

_SCHEDULE_VARIABLE = "PHALANX_AGENDA"  # of faults on purpose

ATTEMPT_VARIABLE = "PHALANX_RUN_ATTEMPT"
"""The number of the attempt, for the progress page; torchrun's variables count restarts only."""


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
        spec = RankSpec(
            worker=group.worker(local_rank),
            share=share,
            output_fd=places.output_fds[local_rank] if local_rank < len(places.output_fds) else None,
            target="phalanx.launch.user_script:run_script",
            arguments=(script.name, script.is_module, str(Path(script.folder).resolve())),
            environ={**usual, **environ, **torchrun_environment(group, local_rank), **ours},
            path=[script.path_entry],
            argv=[script.name, *script.arguments],
            speaks=True,
        )
        specs.append(spec)
    return specs


def run_script(worker: Worker, send: Callable[[Any], None], name: str, is_module: bool, folder: str) -> None:
    """Run a script, or a module, as ``__main__`` in this process, whose `sys.argv` and `sys.path` are set already.

    What it raises is shown on stderr, as Python does, and goes on to the caller. Local rank 0 reports what the script
    has imported, by `send`, to the launcher. Name, is_module, folder: as `Script` has them.
    """
    os.chdir(folder)
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
    page = None
    if path := os.environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError):
            register(dump_beside(path))
        try:
            page = ProgressWriter(path, int(os.environ.get(ATTEMPT_VARIABLE, "0")))
        except OSError as error:
            print(f"steps are not reported: {path}: {error.strerror}", file=sys.stderr)
    report_steps(page, report_imports)
    end_groups_well()
    try:
        if is_module:
            # As ``python -m``; the function is the one that Python itself calls for that, private but as old as it.
            _new_main(None)
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            _run_file(name)
    except (SystemExit, KeyboardInterrupt):
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
    exec(code, vars(_new_main(str(path))))


def _new_main(path: str | None) -> ModuleType:
    """A fresh ``__main__``, with what Python gives it."""
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path) if path is not None else None
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __loader__=loader)
    if path is not None:
        vars(main).update(__file__=path, __cached__=None)
    sys.modules["__main__"] = main
    return main


# Hooks on what a script imports; torch is reached by name, never imported from here.

# An optimizer that has stepped so often since the one that counts did takes its place: that one is no longer used.
_TAKES_OVER = 16

_LET_GO_S = 0.1  # without the interpreter's lock, before and after process groups are destroyed


class StepCounter:
    """Calls `count` once per step of the run, however many optimizers there are.

    The first optimizer seen counts. Another takes over when that one is gone, or has not stepped during 16 steps of the
    other: a script may warm up with one and go on with the next, or have one for each parameter.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._leader: Callable[[], Any] = lambda: None
        self._since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()

    def __call__(self, optimizer: Any, arguments: Any = (), keywords: Any = None) -> None:
        """An optimizer has stepped; in a process that a rank has forked this counts for nothing."""
        if self._leader() is not optimizer and not self._takes_over(optimizer):
            return
        if self._since:
            self._since.clear()
        if os.getpid() == self._process:
            self._count()

    def _takes_over(self, optimizer: Any) -> bool:
        steps = self._since.get(optimizer, 0) + 1
        self._since[optimizer] = steps
        if self._leader() is not None and steps <= _TAKES_OVER:
            return False
        self._leader = weakref.ref(optimizer)
        return True


def report_steps(page: ProgressWriter | None, first: Callable[[], None]) -> None:
    """Have the steps of all optimizers of this process reported, unless the script claims the page for itself.

    `first` is called once, after the first step.
    """
    begun: list[bool] = []

    def count() -> None:
        if page is not None and not page.is_claimed:
            page.step()
        if not begun:
            begun.append(True)
            first()

    counter = StepCounter(count)
    when_imported("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(counter))


def end_groups_well() -> None:
    """Have every thread of a process group let go of what it holds before the script goes on after its groups' end.

    With torch 2.13 some scripts never end: a thread of gloo that has just done a step's last all-reduce holds a Python
    object (`torch.autograd.graph` leaves one with every backward), and needs the interpreter's lock to let it go. If
    the script drops its `DistributedDataParallel` first, as any does whose ``main`` returns after
    ``destroy_process_group``, the main thread joins that thread while it holds the lock. Under torchrun 5 of 12 such
    scripts hung (docs/LOG.md).
    """

    def act(module: ModuleType) -> None:
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_and_let_go(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(_LET_GO_S)
            try:
                return destroy(*arguments, **keywords)
            finally:
                time.sleep(_LET_GO_S)

        for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
            if getattr(known := sys.modules.get(name), "destroy_process_group", None) is destroy:
                setattr(known, "destroy_process_group", destroy_and_let_go)  # noqa: B010 - of a module

    when_imported("torch.distributed", lambda module: act(module) if hasattr(module, "destroy_process_group") else None)


def when_imported(name: str, act: Callable[[Any], Any]) -> None:
    """Call ``act(module)`` once the module `name` has been imported: now, or at the end of its first import."""
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        act(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds one module as all others would, and acts after its code has run."""

    def __init__(self, name: str, act: Callable[[Any], Any]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self._act(module)

            loader.exec_module = run_and_act
        return spec
