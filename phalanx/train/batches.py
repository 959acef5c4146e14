"""Where a rank's batches come from: a loader of its own, or one that all ranks of its host share (MegaScale 3.4)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from phalanx.data.batch import Batch
from phalanx.data.host_loader import HostLoaderClient, start_host_loader, why_no_host_loader
from phalanx.data.loader import Loader, LoaderState
from phalanx.launch.cores import allowed_cpus
from phalanx.train.config import RunConfig
from phalanx.train.ranks import Ranks
from phalanx.train.trainer import Trainer


class Stream(Protocol):
    """Opens this rank's share of global batches, prepared in the background."""

    def __call__(
        self, state: LoaderState, *, counts: Iterable[int], pin_memory: bool
    ) -> AbstractContextManager[Iterator[tuple[Batch, LoaderState]]]:
        """Batches from `state` on; `counts` are samples of each step over all ranks."""
        ...


def open_stream(config: RunConfig, loader: Loader, ranks: Ranks, trainer: Trainer) -> Stream:
    """How this rank gets its batches; all ranks of a run call it together.

    A host of one rank needs no process for it. The host's first rank starts the loader, which ends with it.
    """
    index, count = trainer.data_index, trainer.data_ranks
    shared = config.parallel.host_loader and ranks.size > 1 and why_no_host_loader() is None
    if not shared:
        return partial(loader.stream, rank=index, ranks=count)
    host = socket.gethostname()
    places = [data_index for name, data_index in ranks.peers.gather([host, index]) if name == host]
    address = _serve(config, loader, ranks, places) if ranks.is_first_of_host and len(places) > 1 else ""
    known = [found for name, found in ranks.peers.gather([host, address]) if name == host and found]
    if not known:
        return partial(loader.stream, rank=index, ranks=count)
    return HostLoaderClient(known[0], rank=index, ranks=count).stream


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """`batches` on `device`, copied on a stream of their own: beside what the GPU still computes for the step before.

    Nothing waits but the GPU, for the copy; on a CPU batches are passed on as they are.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(copies):
            copied = batch.to(device)
        here = torch.cuda.current_stream(device)
        here.wait_stream(copies)
        for tensor in copied.tensors():
            tensor.record_stream(here)  # or its memory would be given to the next copy while it is computed with
        yield copied


def _serve(config: RunConfig, loader: Loader, ranks: Ranks, places: list[int]) -> str:
    """Start this host's loader on any core that this run may use, not on those of its first rank alone."""
    cores = os.sched_getaffinity(os.getppid()) if ranks.worker is not None else allowed_cpus()
    started = start_host_loader(loader.prepared, config.data, indices=places, cores=cores)
    ranks.at_end.callback(started.close)
    return started.address
