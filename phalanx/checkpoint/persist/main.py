"""The persister process: takes tasks from its keeper, each into a thread of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import nullcontext, suppress
from typing import NoReturn

import psutil

from phalanx.checkpoint.format.shard_plan import JobPlan, ShardPlan
from phalanx.checkpoint.keeper_contract import PersistOutcome, PersistTask
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.persist.persister_process import TO_PERSISTER, ReceivedPlans, Submit, TaskDetails
from phalanx.checkpoint.persist.publication import Endings, withdraw
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.fault_points import Points, points_from_environment
from phalanx.ipc.local_socket import receive, send
from phalanx.ipc.processes import die_with_parent, name_process
from phalanx.ipc.shared_memory import read_document
from phalanx.ipc.stop_request import STOP_SIGNALS

_WRITERS = 2  # shards that are written at a time where there is no hurry
_NICE = 10
_LOWEST_IO = 7


def main(connection: int, parent: int | None) -> NoReturn:
    """Serve the keeper at the descriptor `connection` until it hangs up; dies with `parent` where there is one."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):  # meant for the job; the keeper decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    name_process("phalanx persist")
    if parent is not None:
        die_with_parent(parent)
    with socket.socket(fileno=connection) as keeper:
        Server(keeper, points_from_environment()).serve()
    os._exit(0)  # also in the middle of a task: nobody is left that would want it


class Server:
    """Serves the tasks of the keeper at the other end of a connection."""

    def __init__(self, keeper: socket.socket, points: Points) -> None:
        self._keeper = keeper
        self._points = points
        self._sending = threading.Lock()
        self._turns = threading.BoundedSemaphore(_WRITERS)
        self._plans = ReceivedPlans(ShardPlan.from_bytes)
        self._jobs = ReceivedPlans(JobPlan.from_bytes)
        self._endings = Endings()

    def serve(self) -> None:
        """Until the keeper hangs up."""
        while True:
            message, descriptors = receive(self._keeper, TO_PERSISTER)
            if message is None:
                return
            if isinstance(message, Submit):
                task = self._task(message, descriptors)
                os.umask(task.destination.umask)  # of the latest attempt; threads have none of their own
                threading.Thread(target=self._work, args=(task,), name=f"rank {task.plan.rank}", daemon=True).start()
            else:
                details = TaskDetails.from_bytes(_read(descriptors[0]))
                os.umask(details.destination.umask)
                threading.Thread(target=_abandon, args=(details,), name="abandon", daemon=True).start()

    def _task(self, message: Submit, descriptors: list[int]) -> PersistTask:
        slot, memory, *plans = descriptors
        details = TaskDetails.from_bytes(_read(memory))
        plan = self._plans.get(message.plan, plans[0])
        job = self._jobs.get(message.job, plans[1]) if message.job else None
        for descriptor in plans:
            os.close(descriptor)
        return PersistTask(plan, details.record, slot, details.destination, job, message.hurry)

    def _work(self, task: PersistTask) -> None:
        if not task.hurry:
            # Give way to training, with all threads that this one starts: Linux has priorities of threads.
            thread = threading.get_native_id()
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, thread, _NICE)
            with suppress(OSError, AttributeError, psutil.Error):
                psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_IO)
        turn = nullcontext() if task.hurry else self._turns
        PersistWork(task, self._points, self._report, turn, endings=self._endings).run()

    def _report(self, outcome: PersistOutcome) -> None:
        with self._sending, suppress(OSError):  # a keeper that is gone needs no answer
            send(self._keeper, outcome)


def _abandon(details: TaskDetails) -> None:
    with suppress(Exception):
        store = open_store(details.destination.url, details.destination.options)
        withdraw(store, details.writing, details.record.rank, details.problem)
        store.clean(details.record.attempt)


def _read(descriptor: int) -> bytes:
    content = read_document(descriptor)
    os.close(descriptor)
    return content
