"""`phalanx checkpoint keep`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.keeper_start import address_for, end_keeper, is_listening


def test_a_keeper_is_started_beforehand_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = address_for(str(tmp_path / "run" / "checkpoints"), {"XDG_RUNTIME_DIR": str(tmp_path)})
    program = "import sys; from phalanx.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "checkpoint", "keep", str(tmp_path / "run"), "--ttl", "60", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and str(address) in process.stdout.readline()
            assert is_listening(address)
            assert process.poll() is None
        finally:
            end_keeper(address)
        assert process.wait(60) == 0
    assert not is_listening(address)
