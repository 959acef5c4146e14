"""What somebody on the network hears of a run on two hosts, and what it is good for: every packet is captured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import tiny
from support.chunk_sums import chunk_sums
from support.open_checkpoint import open_checkpoint
from support.recovery.job import Job

from phalanx.checkpoint.format.shard_plan import Piece, Record, ShardPlan
from phalanx.checkpoint.keeper.keeper_start import VARIABLE, end_keeper
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.replicas.fetch import list_held
from phalanx.checkpoint.replicas.replica_link import LABEL, LinkError, Offer, Plan, PlanNeeded, Refused, call
from phalanx.checkpoint.session.open_session import given_secret, mark_of
from phalanx.checkpoint.storage.folder import candidates
from phalanx.ipc.handshake import HELLO_BYTES, derive, hand_out
from phalanx.run.config import toml_value
from phalanx.run.secrets import make_certificate

GUARD_S = 240.0
SUBNET = "100.64.214"
_ALL = 0x0003  # ETH_P_ALL
_WINDOW = 24  # bytes of a weight's memory that are looked for


def _cannot() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "capturing and network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    with suppress(OSError), socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)):
        return ""
    return "this machine lets nobody capture packets"


needs_capture = pytest.mark.skipif(bool(_cannot()), reason=_cannot() or "it can")


class Flow(NamedTuple):
    """One direction of a TCP connection."""

    source: str
    source_port: int
    target: str
    target_port: int

    @property
    def back(self) -> Flow:
        return Flow(self.target, self.target_port, self.source, self.source_port)


class Wire:
    """All TCP between hosts and driver, as long as this is open; what it heard stays."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.settimeout(0.1)
        self._pieces: dict[Flow, dict[int, bytes]] = defaultdict(dict)
        self._heard: set[Flow] = set()  # towards keepers
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def flows(self) -> dict[Flow, bytes]:
        """What was said in each, in order."""
        with self._lock:
            return {flow: _joined(pieces) for flow, pieces in self._pieces.items()}

    def keepers(self) -> dict[Flow, bytes]:
        """Of these, what was said to keepers by others."""
        with self._lock:
            return {flow: _joined(self._pieces[flow]) for flow in self._heard if flow in self._pieces}

    def _listen(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                self._take(self._socket.recv(1 << 17))

    def _take(self, packet: bytes) -> None:
        if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
            return
        head = 14 + (packet[14] & 15) * 4
        source_port, target_port, number = struct.unpack_from("!HHI", packet, head)
        content = packet[head + (packet[head + 12] >> 4) * 4 : 14 + struct.unpack_from("!H", packet, 16)[0]]
        source, target = (socket.inet_ntoa(packet[place : place + 4]) for place in (26, 30))
        if content and source.startswith(SUBNET):
            flow = Flow(source, source_port, target, target_port)
            with self._lock:
                if content.startswith(LABEL):  # which a keeper says first of all
                    self._heard.add(flow.back)
                pieces = self._pieces[flow]
                if len(content) > len(pieces.get(number, b"")):
                    pieces[number] = content


def _joined(pieces: dict[int, bytes]) -> bytes:
    said, at = bytearray(), 0
    for number, content in sorted(pieces.items()):
        fresh = content[max(0, at - number) :]  # what was sent again is not said twice
        said += fresh
        at = max(at, number + len(content))
    return bytes(said)


@contextmanager
def capturing() -> Iterator[Wire]:
    wire = Wire()
    try:
        yield wire
    finally:
        wire.close()


def command(folder: Path, keepers: Path) -> list[str]:
    """`phalanx run` of a training on two hosts with addresses of their own, a snapshot after every step."""
    pem = folder / "driver.pem"
    pem.touch(mode=0o600)
    pem.write_bytes(make_certificate([f"{SUBNET}.1", "127.0.0.1"]))
    environment = {f"host-{number}": {VARIABLE: str(keepers / f"host-{number}")} for number in (1, 2)}
    options = {"network": "namespaces", "subnet": f"{SUBNET}.0/24", "environment": environment}
    settings = {"run.listen": f"{SUBNET}.1:0", "run.backend_options": options, "run.policy.joining_check": "passive"}
    settings |= {f"run.tls.{name}": str(pem) for name in ("certificate", "key", "authority")}
    training = tiny.SETTINGS | {
        "train.steps": 1_000_000,  # until it is ended
        "parallel.replicate": 2,
        "parallel.host_loader": False,  # which takes processes of one machine for those of one host
        "checkpoint.every_steps": 3,
        "checkpoint.keep_last": 1000,
        "checkpoint.memory_every_steps": 1,
    }
    (folder / "tiny.toml").write_text("")
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={toml_value(value)}")]
    script = ["-m", "phalanx", "train", "tiny.toml", *tiny.overrides(folder, folder / "out", training)]
    return ["--hosts", "2", "--workers-per-host", "1", *words, *script]


class Known(NamedTuple):
    """What the job knows and nobody else should."""

    token: str
    of_the_ranks: bytes
    of_the_keepers: bytes
    key: bytes

    def all(self) -> list[bytes]:
        """In every form that could be on a wire."""
        raw = [bytes.fromhex(self.token), self.of_the_ranks, self.of_the_keepers]
        return [*raw, *(secret.hex().encode() for secret in raw), self.key]


def known(folder: Path, aside: Path) -> Known:
    token = (folder / "run" / "secret" / "token").read_text().strip()
    ranks = derive(token.encode(), "for the ranks")
    aside.mkdir(mode=0o700)
    keepers = given_secret(hand_out(aside, ranks))
    assert keepers is not None
    key = (folder / "driver.pem").read_bytes().split(b"-----")[2].split()[1]
    return Known(token, ranks, keepers, key)


@needs_capture
@pytest.mark.slow
def test_a_listener_learns_nothing_of_use_and_no_forgery_is_taken(tmp_path: Path) -> None:
    keepers = tmp_path / "keepers"
    keepers.mkdir(mode=0o700)
    try:
        with capturing() as wire, TrainJob(tmp_path, command(tmp_path, keepers)) as job:
            job.wait_for(lambda: len(wire.keepers()) >= 1 and durable(tmp_path), GUARD_S)
            secrets = known(tmp_path, tmp_path / "aside")
            for flow, said in wire.keepers().items():
                replay(flow, said)
                forge(flow, secrets)
            before = step_of(tmp_path)
            job.wait_for(lambda: step_of(tmp_path) > before + 5, GUARD_S)  # nobody has ended it
            job.commands[-1].send_signal(signal.SIGINT)
            job.wait_for(lambda: job.commands[-1].poll() is not None, GUARD_S)
            assert [event.attempt for event in job.events("running")] == [1], job.output
            flows, replicas = wire.flows(), wire.keepers()
    finally:
        for address in ("host-1", "host-2"):
            end_keeper(keepers / address)
    assert sum(map(len, replicas.values())) > 500_000
    spoken = mark_of(secrets.of_the_keepers).encode()  # by rank to rank, in clear
    assert any(spoken in said for said in flows.values()), "what ranks say was not heard: this proves nothing"
    for flow, said in flows.items():
        for secret in secrets.all():
            assert secret not in said, flow
        for word in (b"Authorization", b"Bearer"):
            assert word not in said, flow
    weights = weights_of(tmp_path)
    assert len(weights) > 20
    for flow in replicas:
        for said in (flows[flow], flows[flow.back]):
            assert not any(weight in said for weight in weights), flow
            assert b"model." not in said and b"Offer" not in said


class TrainJob(Job):
    @property
    def name(self) -> str:
        return "out"


def step_of(folder: Path) -> int:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return max((entry["step"] for entry in map(json.loads, lines) if entry["kind"] == "step"), default=0)


def durable(folder: Path) -> bool:
    return (folder / "out" / "checkpoints").is_dir() and len(candidates(folder / "out" / "checkpoints")) >= 2


def weights_of(folder: Path) -> list[bytes]:
    """Parts of what lay in every durable checkpoint, each of which was a snapshot that was sent too."""
    found = []
    for one in candidates(folder / "out" / "checkpoints")[1:]:
        for tensor in open_checkpoint(one.path).read().values():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            if len(set(content[:_WINDOW])) > _WINDOW // 3:  # no zeros or ones
                found.append(content[:_WINDOW])
    return found


def replay(flow: Flow, said: bytes) -> None:
    """Say again what one of the ranks' keepers has said: it gets the keeper's first words, and is hung up on."""
    with socket.create_connection((flow.target, flow.target_port), GUARD_S) as line, suppress(OSError):
        line.sendall(said[: 1 << 20])
        line.shutdown(socket.SHUT_WR)
        assert len(line.recv(1 << 16, socket.MSG_WAITALL)) <= HELLO_BYTES


def forge(flow: Flow, secrets: Known) -> None:
    """Without the secret nobody is let in; with it, nobody begins an attempt that was not claimed."""
    nowhere = Endpoint("?", (flow.target,), flow.target_port)
    for wrong in (bytes(32), bytes.fromhex(secrets.token), secrets.of_the_ranks):
        with pytest.raises(LinkError, match="does not take the secret"):
            list_held(nowhere, wrong)
    with pytest.raises(LinkError, match="at the address") as refused:
        call(nowhere, secrets.of_the_keepers)
    there = replace(nowhere, host=str(refused.value).rpartition(" there is ")[2])
    newest = max((held.record for held in list_held(there, secrets.of_the_keepers)), key=lambda record: record.step)
    plan = ShardPlan(0, 2, (Piece("w", "uint8", (9,), (0,), (9,), "trained", 0, 9),))
    record = Record(newest.step + 1, newest.attempt + 1000, "set", 0, 1, plan.sha256, 9, chunk_sums(bytes(9), 9))
    link = call(there, secrets.of_the_keepers)
    link.send(Offer(record.to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    assert "has not begun on this host" in link.receive(Refused).why
    link.close()
