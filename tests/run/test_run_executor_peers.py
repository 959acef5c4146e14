"""Executors that measure the network between their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.checks.peer_bandwidth import PeerError, measure_peer
from phalanx.checks.runner import CHECKS
from phalanx.run import messages
from phalanx.run.executor.host_monitor import HostContext, check_host
from phalanx.run.executor.main import open_to_peers
from phalanx.run.secrets import ensure_token

OTHERS = frozenset(one.name for one in CHECKS) - {"peers", "clock"}


def outcomes(folder: Path, token: Path, peers: Sequence[str]) -> dict[str, messages.CheckOutcome]:
    context = HostContext("host-1", "127.0.0.1", "", {"HOME": str(folder)}, folder, folder)
    return {one.name: one for one in check_host(context, "quick", peers, [], skip=OTHERS, token=token)}


def test_a_suspect_is_tested_with_hosts_that_know_the_token(tmp_path: Path) -> None:
    token = tmp_path / "secret" / "token"
    key = ensure_token(token).reveal().encode()
    with ExitStack() as doors:
        ports = [open_to_peers(doors, "127.0.0.1", key) for _ in range(2)]
        peers = [f"127.0.0.1:{port}" for port in ports]
        found = outcomes(tmp_path, token, peers)
        assert set(found) == {"peers", "clock"}
        assert found["peers"].outcome == "pass" and found["peers"].unit == "GB/s"
        assert found["clock"].outcome == "pass"
        with pytest.raises(PeerError):
            measure_peer(peers[0], transfer_bytes=0, limit_s=5.0)  # without the token
    assert outcomes(tmp_path, token, [])["peers"].outcome == "skip"


def test_an_address_that_is_not_ours_is_no_reason_to_end() -> None:
    with ExitStack() as doors:
        assert open_to_peers(doors, "203.0.113.7", b"a key of some length") == 0


def test_hosts_test_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    context = HostContext("host-1", "127.0.0.1", "", {"HOME": str(tmp_path)}, tmp_path, tmp_path)
    place = tmp_path / "checkpoints"
    others = frozenset(one.name for one in CHECKS) - {"storage"}
    (found,) = check_host(context, "quick", [], [], checkpoints=str(place), skip=others)
    assert (found.name, found.outcome, found.reason) == ("storage", "pass", str(place))
    assert place.is_dir()
