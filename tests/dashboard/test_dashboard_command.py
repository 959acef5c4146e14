from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from dashboard_helpers import make_run
from fastapi.testclient import TestClient

from phalanx.cli.dashboard_command import command
from phalanx.core.errors import UserError
from phalanx.dashboard.access_guard import AccessGuard
from phalanx.dashboard.serving import Listening
from phalanx.run.secrets import Token


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_what_would_show_the_token_to_others_is_refused(tmp_path: Path) -> None:
    assert "in clear" in refused(str(tmp_path), "--port", "0", "--host", "0.0.0.0")
    assert "in clear" in refused(str(tmp_path), "--port", "0", "--host", "example.org")
    assert "let everybody in" in refused(str(tmp_path), "--port", "0", "--host", "0.0.0.0", "--no-token")
    assert "asks for its token" in refused("--port", "0", "http://127.0.0.1:1")
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    connected = refused("--port", "0", "http://example.org:80", "--driver-token", str(token))
    assert "in clear" in connected


def test_wrong_places_are_named(tmp_path: Path) -> None:
    assert "is not there" in refused(str(tmp_path / "nowhere"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be listened on" in refused(str(tmp_path), "--port", str(taken.getsockname()[1]))
    certificate = tmp_path / "file.pem"
    certificate.write_text("none")
    assert "come together" in refused(str(tmp_path), "--certificate", str(certificate))
    assert "cannot be used" in refused(
        str(tmp_path), "--certificate", str(certificate), "--key", str(certificate), "--port", "0"
    )


@pytest.mark.slow
def test_it_serves_until_it_is_asked_to_end(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "base")
    token = tmp_path / "secret" / "token"
    words = ["dashboard", str(tmp_path / "runs"), "--port", "0", "--token-file", str(token)]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx.cli.main", *words], stdout=subprocess.PIPE, text=True, env=os.environ | own
    )
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{64}", address)
        assert address.endswith(token.read_text().strip())
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        with httpx.Client(follow_redirects=True, trust_env=False, timeout=60) as client:
            assert "base" in client.get(address).text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_runs_of_a_storage_url_are_served_and_their_copy_goes_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "there" / "base")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served: list[tuple[Path, str]] = []

    def serve(app: AccessGuard, listening: Listening, token: Token | None, say: Callable[[str], None]) -> None:
        (copy,) = Path(tempfile.gettempdir()).glob(f"phalanx-dashboard-*/{tmp_path.name}-there")
        client = TestClient(app, base_url="http://127.0.0.1:8642")  # type: ignore[arg-type]
        served.append((copy, client.get("/runs/table").text))

    monkeypatch.setattr("phalanx.dashboard.serving.serve", serve)
    (tmp_path / "there").rename(tmp_path / f"{tmp_path.name}-there")
    url = f"file://{tmp_path}/{tmp_path.name}-there"
    result = CliRunner().invoke(command, [url, "--no-token"], catch_exceptions=False)
    assert result.output.startswith(f"fetching what {url} has of runs")
    ((copy, table),) = served
    assert "base" in table and not copy.parent.exists()
    assert "no run lies there" in refused(f"file://{tmp_path}/nowhere")
    assert "knows no" in refused("nothing://bucket")
