"""The process of an executor: ``python -m phalanx.run.executor SETTINGS``, which are JSON."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checks.peer_bandwidth import serve_peer
from phalanx.core.errors import UserError
from phalanx.ipc.handshake import derive, hand_out
from phalanx.run import messages
from phalanx.run.clock import unix_s
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.executor.executor import Executor
from phalanx.run.executor.executor_settings import ExecutorSettings
from phalanx.run.executor.host_monitor import HostContext, HostMonitor
from phalanx.run.executor.kernel_log import KernelLog, open_sources
from phalanx.run.executor.page_folder import page_folder
from phalanx.run.executor.reaper import Reaper, choose_containment, run_guarded
from phalanx.run.secrets import TlsFiles, client_context, read_token, without_tokens
from phalanx.run.wire.driver_address import address_towards, parse, published
from phalanx.run.wire.driver_link import DriverLink, ReplacedError

_log = logging.getLogger(__name__)

_DRAIN_S = 5.0

_MOST_GRACE_S = 3600.0  # for ranks that are asked to end by SIGINT, where no SIGTERM follows


def main(argv: Sequence[str] | None = None) -> int:
    """Be the executor that the first argument describes."""
    arguments = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = msgspec.json.decode(arguments[0], type=ExecutorSettings)
        read_token(Path(settings.token))
        containment = choose_containment(_log.info, name=f"{settings.job}-{settings.host}")
        environ = without_tokens(os.environ)
        return run_guarded(containment, lambda reaper: serve(settings, reaper), environ=environ, report=_log.warning)
    except (UserError, msgspec.ValidationError, IndexError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def serve(settings: ExecutorSettings, reaper: Reaper) -> int:
    """Be the executor, in the process that `run_guarded` has made."""
    with page_folder() as pages:
        return asyncio.run(_serve(settings, reaper, pages))


async def _serve(settings: ExecutorSettings, reaper: Reaper, pages: Path) -> int:
    token = read_token(Path(settings.token)).reveal().encode()
    address = settings.address
    if address == "auto":
        drivers = published(Path(settings.driver))()
        address = address_towards(parse(drivers[0]).host)
    context = HostContext(
        settings.host,
        address,
        settings.rack or CheckpointConfig().rack_of(os.environ),
        # Ranks get another secret than the token, with which they could command the job.
        {**without_tokens(os.environ), **hand_out(pages, derive(token, "for the ranks"))},
        pages,
        Path(settings.logs),
        segment_bytes=settings.segment_bytes,
        kept_bytes=settings.kept_bytes,
        driver_lost_s=settings.driver_lost_s,
        hosts=settings.hosts,
    )
    accelerators = Accelerators()
    reaper.release = accelerators.released
    kernel = KernelLog(open_sources(reaper.helper))
    peers = ExitStack()
    monitor = HostMonitor(
        context,
        reaper,
        kernel,
        accelerators,
        rules=[Path(rule) for rule in settings.rules],
        folder=Path(settings.folder),
        is_only_host=settings.is_only_host,
        checkpoints=settings.checkpoints,
        skip=frozenset(settings.skip),
        token=Path(settings.token),
        peer_port=open_to_peers(peers, context.address, token),
    )
    await asyncio.to_thread(accelerators.mark_idle)  # before any rank of ours runs
    own = (Path(name) if name else None for name in (settings.certificate, settings.key, settings.authority))
    link = DriverLink(
        published(Path(settings.driver)),
        token,
        settings.job,
        lambda: executor.hello(),
        lambda message: executor.hear(message),
        ssl=client_context(TlsFiles(*own)) if settings.uses_tls else None,
    )
    executor = Executor(context, link, reaper, monitor, unix_s=unix_s)
    loop = asyncio.get_running_loop()
    # To end it without a driver, SIGINT first asks its ranks to end, and SIGTERM sets that a limit.
    for number, grace_s in ((signal.SIGTERM, 0.0), (signal.SIGINT, _MOST_GRACE_S)):
        loop.add_signal_handler(number, _end, executor, number, grace_s)
    if kernel.fileno() >= 0:
        loop.add_reader(kernel.fileno(), _read_kernel, kernel, executor)
    linking = loop.create_task(_keep_linked(link, executor))
    status = await executor.run()
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await link.drained()
    link.close()
    await linking
    kernel.close()
    peers.close()
    return status


def open_to_peers(closing: ExitStack, address: str, key: bytes) -> int:
    """Let hosts of this job measure the network to this one, until `closing`; the port, 0: it cannot be."""
    try:
        return closing.enter_context(serve_peer(address, key=key))
    except OSError as error:
        _log.warning("the network to this host cannot be measured by others: %s: %s", address, error)
        return 0


def _end(executor: Executor, number: signal.Signals, grace_s: float) -> None:
    executor.hear(messages.Stop(executor.attempt, grace_s))
    executor.hear(messages.End(number.name, 128 + number))


async def _keep_linked(link: DriverLink, executor: Executor) -> None:
    try:
        await link.run()
    except ReplacedError as error:
        executor.hear(messages.End(str(error), 1))
    except Exception as error:  # it hears no driver any more: nothing may be left here
        _log.exception("the connection to the driver cannot be kept")
        executor.hear(messages.End(f"it cannot keep a connection to the driver: {error}", 1))


def _read_kernel(kernel: KernelLog, executor: Executor) -> None:
    descriptor = kernel.fileno()
    try:
        found = executor.monitor.kernel_findings()
        if found:
            executor.link.send(messages.Found(executor.attempt, found))
    except Exception:  # what cannot be read would call this again at once, and for ever
        _log.exception("the kernel's log is not followed any more")
        kernel.close()
    if kernel.fileno() < 0:
        asyncio.get_running_loop().remove_reader(descriptor)


if __name__ == "__main__":
    sys.exit(main())
