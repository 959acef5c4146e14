"""Ways of saving checkpoints beside training: ours, and torch's."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.session.open_session import open_session
from phalanx.ipc.tree_peers import TreePeers
from support.stall.task import Task


class Contender(Protocol):
    """What the loop of the benchmark calls."""

    def ask(self, step: int) -> None: ...
    def fence(self) -> None: ...
    def after_step(self, step: int) -> None: ...
    def settle(self) -> None:
        """Wait until nothing goes on in the background."""

    def durable_s(self) -> list[float]:
        """Seconds from the end of the step until each checkpoint was durable."""
        ...

    def close(self) -> None: ...


class Ours:
    """A session; `overlap` as in `Session.watch`."""

    def __init__(
        self, task: Task, store: TCPStore, folder: Path, config: CheckpointConfig, overlap: bool | None = None
    ) -> None:
        self._config = config
        self.events: list[Any] = []
        self._peers = TreePeers(store, task.rank, 2, host="127.0.0.1", name="here", timeout_s=600.0)
        self.session = open_session(str(folder), config, peers=self._peers, report=print)
        self.session.watch(task.tensors, None, _role, overlap=overlap)
        self.ask, self.fence = self.session.ask, self.session.fence
        self._taken = 0

    def after_step(self, step: int) -> None:
        self.session.after_step(step, lambda: {"step": step})

    def settle(self) -> None:
        while self.session.is_under_way:
            time.sleep(0.02)
            self.durable_s()
        self.durable_s()

    def durable_s(self) -> list[float]:
        self.events += self.session.events()
        return [event.durable_s for event in self.events if event.name]

    def close(self) -> None:
        self.session.finish(clean=True)
        self._peers.close()


class Theirs:
    """``torch.distributed.checkpoint.async_save``, the newest two kept.

    Args:
        kind: in a thread or a process.
        keep_stager: give it a stager that keeps its memory from one save to the next.
    """

    def __init__(
        self,
        task: Task,
        store: TCPStore,
        folder: Path,
        every: int,
        kind: AsyncCheckpointerType,
        *,
        keep_stager: bool = False,
    ) -> None:
        dist.init_process_group("gloo", store=PrefixStore("theirs", store), rank=task.rank, world_size=2)
        self._task, self._folder, self._every, self._kind = task, folder, every, kind
        shared = kind is AsyncCheckpointerType.PROCESS
        options = StagingOptions(False, shared, False, False)
        self._stager = DefaultStager(options) if keep_stager else None
        self._future: Future[Any] | None = None
        self._paths: list[Path] = []
        self._seconds: list[float] = []

    def ask(self, step: int) -> None:
        """Nothing to ask."""

    def fence(self) -> None:
        """It has copied when it returns."""

    def after_step(self, step: int) -> None:
        if step % self._every:
            return
        self.settle()  # it allows one at a time
        self._paths.append(self._folder / f"step-{step}")
        began_s = time.perf_counter()
        future = dcp.async_save(
            self._task.tensors(),
            storage_writer=dcp.FileSystemWriter(self._paths[-1]),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        future.add_done_callback(lambda _: self._seconds.append(time.perf_counter() - began_s))
        self._future = future

    def settle(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None
        if self._task.rank == 0:
            for path in self._paths[:-2]:
                shutil.rmtree(path, ignore_errors=True)

    def durable_s(self) -> list[float]:
        return list(self._seconds)

    def close(self) -> None:
        self.settle()
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class Nothing:
    """No checkpoints: what all of it is compared with."""

    def ask(self, step: int) -> None:
        """Nothing."""

    def fence(self) -> None:
        """Nothing."""

    def after_step(self, step: int) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def durable_s(self) -> list[float]:
        return []

    def close(self) -> None:
        """Nothing."""


NAMES = ("ours", "ours, overlapping", "dcp thread", "dcp thread, stager", "dcp process", "dcp process, stager", "none")


def make(name: str, task: Task, store: TCPStore, folder: Path, config: CheckpointConfig) -> Contender:
    """The contender called `name`, one of `NAMES`."""
    if name == "none":
        return Nothing()
    if name.startswith("ours"):
        return Ours(task, store, folder, config, overlap="overlapping" in name)
    kind = AsyncCheckpointerType.PROCESS if "process" in name else AsyncCheckpointerType.THREAD
    return Theirs(task, store, folder, config.every_steps, kind, keep_stager="stager" in name)


def _role(name: str) -> Any:
    if name.startswith("model."):
        return "trained"
    return "optimizer" if "exp_avg" in name else "other"
