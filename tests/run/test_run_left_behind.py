"""What killed processes have left on a host is taken away, and what lives stays; limits of files that are too low."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.keeper_start import clear_left_keepers, log_of
from phalanx.core.errors import UserError
from phalanx.run import left_behind
from phalanx.run.executor.page_folder import PREFIX
from phalanx.run.file_limit import allow_files


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(prefix="left") as name:  # short, for sockets
        yield Path(name)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_what_nobody_uses_goes_and_what_is_used_stays(temporary: Path, tmp_path: Path) -> None:
    secret = tmp_path / f"{PREFIX}x" / "job-secret"
    secret.parent.mkdir()
    secret.write_text("hidden")
    (secret.parent / "owner").touch()
    private = temporary / f"phalanx-{os.geteuid()}"
    private.mkdir()
    listening(private / "driver-dead").close()
    for name in ("keeper-1.lock", "keeper-1.log", "keeper-2.lock"):
        (private / name).touch()
    (private / "keeper-2.log").write_text("why it ended")
    runs = [tmp_path / f"phalanx-progress-{os.getuid()}" / name for name in ("used", "left", "young", "empty")]
    for run in runs:
        run.mkdir(parents=True)
        if run.name != "empty":
            (run / "0.page").write_bytes(bytes(4096))
        if run.name != "young":
            os.utime(run, (1e9, 1e9))
    with listening(private / "driver-alive"), (runs[0] / "0.page").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        gone = left_behind.clear_left(tmp_path, temporary)
        assert not left_behind.clear_left(tmp_path, temporary)
    assert {path.name for path in gone} == {
        f"{PREFIX}x",
        "driver-dead",
        "keeper-1.lock",
        "keeper-2.lock",
        "left",
        "empty",
    }
    assert {path.name for path in private.iterdir()} == {"driver-alive", "keeper-2.log"}
    assert not secret.parent.exists() and [run.exists() for run in runs] == [True, False, True, False]


def test_the_files_of_a_keeper_that_is_about_to_begin_stay(temporary: Path) -> None:
    address = temporary / "keeper-1"
    (temporary / "keeper-1.lock").touch()
    log_of(address).touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        assert clear_left_keepers(temporary) == [] and log_of(address).exists()
    assert [path.name for path in clear_left_keepers(temporary)] == ["keeper-1.lock"]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("hosts", "hard"), [(1, 64), (1000, 1024)])
def test_too_low_a_limit_of_files_is_said_before_anything_fails(
    monkeypatch: pytest.MonkeyPatch, hosts: int, hard: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (hard, hard))
    with pytest.raises(UserError, match=rf"only {hard} files open here, and this job needs .*ulimit -n"):
        allow_files(hosts)


@pytest.mark.parametrize(("limits", "raised"), [((64, 4096), 4096), ((64, resource.RLIM_INFINITY), 65_536)])
def test_a_limit_that_may_be_raised_is(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: seen.append(given))
    allow_files(3)
    assert seen == [(raised, limits[1])]
