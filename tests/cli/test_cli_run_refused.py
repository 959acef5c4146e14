"""What `phalanx run` refuses: in one line, with field, value and cure, at once, and before anything is touched."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.ipc.processes import Identity, identity_of
from phalanx.run.config import RunConfig
from phalanx.run.drive.main import watching
from phalanx.run.job_folder import Card, write_card


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that would have been started, in a folder where there is a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "file").touch()
    (tmp_path / "a folder").mkdir()
    found: list[str] = []
    monkeypatch.setattr("phalanx.cli.run_start._supervise", lambda given: found.append(given.config.script) or 0)
    monkeypatch.setattr("phalanx.cli.run_start.end_with", lambda status: sys.exit(status))
    return found


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(*words: str) -> UserError:
    result = CliRunner().invoke(group, ["run", *words])
    assert isinstance(result.exception, UserError), (result.exception, result.output)
    assert "\n" not in str(result.exception)
    return result.exception


@pytest.fixture
def over(tmp_path: Path) -> Path:
    """The folder of a job that is over, with a journal that is to stay where it is."""
    folder = tmp_path / "runs" / "t"
    folder.mkdir(parents=True)
    (folder / "journal.db").write_bytes(b"kept")
    write_card(folder, card_of(Identity(1, 1, "x"), status=0))
    return folder


def card_of(driver: Identity, status: int | None = None) -> Card:
    return Card(
        job="t",
        driver_host=socket.gethostname(),
        pid=driver.pid,
        started_ticks=driver.started_ticks,
        boot_id=driver.boot_id,
        began_unix_s=1.0,
        token="secret/token",
        journal="journal.db",
        logs="logs",
        journal_job="t",
        status=status,
    )


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_made(started: list[str], folder: str) -> None:
    error = refused("--folder", folder, "t.py")
    assert error.field == "run.folder" and f"= {folder!r}: cannot be made: " in str(error)
    assert "give another --folder" in error.cure and not started


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(started: list[str], tmp_path: Path) -> None:
    (tmp_path / "a folder").chmod(0o500)
    for folder in ("a folder", "a folder/below"):
        assert refused("--folder", folder, "t.py").field == "run.folder" and not started


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["--set", "run.backend=nobody"], "run.backend", "there is no such back end"),
        (["--set", "run.backend_options.nothing=1"], "run.backend_options.nothing", "there is no such setting"),
        (["--set", "run.backend_options.total_hosts=many"], "run.backend_options.total_hosts", "integer"),
        (["--set", "run.backend_options.network=namespaces"], "run.listen", "do not reach it"),
        (["--set", 'run.rules=["none.toml"]'], None, "none.toml"),
        (["--set", "run.webhook=nothing"], "run.webhook", "is no URL"),
        (["--set", "run.journal=mysql://a@b/c"], "run.journal", "not kept in mysql"),
        (["--set", "run.tls.certificate=no.pem", "--set", "run.tls.key=no.key"], None, "no.pem"),
        (["--set", "run.listen=localhost.nowhere.invalid:0"], None, "localhost.nowhere.invalid"),
        (["--set", "run.working_folder=nowhere"], "run.working_folder", "is no folder"),
        (["--nproc-per-node", "gpu"], "run.workers_per_host", "no GPU"),
        (["--set", "run.nothing=1"], "run.nothing", "there is no such setting"),
        (["--hosts", "1.5"], "run.hosts", "integer"),
        (["--workers-per-host", "0"], None, "workers_per_host = 0"),
        (["--workers-per-host", "10000000"], "run.workers_per_host", "10,000,000 ranks take 76.29 TiB"),
        (["--set", "run.logs.folder=file/logs"], "run.logs.folder", "cannot be made"),
        (["--set", "run.journal=file/journal.db"], "run.journal", "cannot be made"),
        (["--set", "run.token_file=file/token"], "run.token_file", "cannot be made"),
        (["--set", "run.script=none.at.all", "--set", "run.module=true"], "script", "there is no such module"),
    ],
)
def test_nothing_is_touched_before_all_is_looked_at(
    started: list[str], over: Path, words: list[str], field: str | None, says: str
) -> None:
    if "gpu" in words and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    before = sorted(over.rglob("*"))
    error = refused(*words, *([] if "run.module=true" in words else ["t.py"]))
    assert field is None or error.field == field
    assert says in str(error) and error.cure
    assert sorted(over.rglob("*")) == before and not started
    assert CliRunner().invoke(group, ["run", "t.py"]).exit_code == 0
    assert started and (over / "earlier" / "0001" / "journal.db").read_bytes() == b"kept"


@pytest.mark.parametrize("field", ["run.listen", "run.http"])
def test_an_address_that_is_taken_names_who_has_it(started: list[str], over: Path, taken: int, field: str) -> None:
    error = refused("--set", f"{field}=127.0.0.1:{taken}", "t.py")
    assert error.field == field and f"127.0.0.1:{taken}" in str(error)
    assert "in use" in error.problem and f"process {os.getpid()} has it" in error.problem
    assert "port 0 for any" in error.cure and not (over / "earlier").exists() and not started


def test_a_job_that_lives_there_is_told_before_its_port_is_found_taken(
    started: list[str], taken: int, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    own = identity_of(os.getpid())
    assert own is not None
    write_card(folder, card_of(own))
    error = refused("--folder", "a folder", "--set", f"run.listen=127.0.0.1:{taken}", "t.py")
    assert "runs there already" in error.problem
    command = error.cure.partition("`")[2].partition("`")[0]
    assert shlex.split(command) == ["phalanx", "run", "attach", "--folder", "a folder"]


def test_a_module_is_found_where_its_ranks_will_find_it(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a folder" / "package").mkdir()
    with contextlib.chdir("a folder"):  # another working folder of the same process, which Python must not remember
        refused("-m", "t")
    for words in (["-m", "json.tool"], ["-m", "t"], ["-m", "file"], ["-m", "package.train"]):
        result = CliRunner().invoke(group, ["run", "--fresh", *words])
        assert isinstance(result.exception, UserError) == (words[1] in ("file", "package.train"))
    monkeypatch.setenv("PYTHONPATH", f"/nowhere{os.pathsep}{tmp_path / 'a folder'}")
    assert CliRunner().invoke(group, ["run", "-m", "package.train"]).exit_code == 0
    assert started == ["json.tool", "t", "package.train"]


def test_a_script_that_is_none(started: list[str], tmp_path: Path) -> None:
    assert "there is no such file" in refused("no.py").problem
    assert "is a folder" in refused("a folder").problem
    assert not (tmp_path / "runs").exists() and not started


def test_a_folder_with_a_main_is_a_script_as_for_python(started: list[str], tmp_path: Path) -> None:
    (tmp_path / "a folder" / "__main__.py").touch()
    CliRunner().invoke(group, ["run", "a folder"], catch_exceptions=False)
    assert started == ["a folder"]
    config = RunConfig(script="a folder", arguments=("--lr", "1"), working_folder=str(tmp_path))
    assert watching(config).versions[""].script == ["a folder/__main__.py", "--lr", "1"]


def test_a_limit_of_files_that_is_too_low_is_said_before_anything_is_made(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    assert "only 64 files" in refused("t.py").problem
    assert not (tmp_path / "runs").exists() and not started


def test_a_path_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "phalanx", "run", "é.py"]
    shown = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, check=False)
    assert shown.returncode == 2 and "there is no such file" in shown.stderr.decode(), shown


def test_a_character_that_the_terminal_does_not_have_is_no_reason_to_fail() -> None:
    program = "from phalanx.cli.main import _stdout\nwith _stdout():\n    print('ranks 0' + chr(8211) + '1')"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True)
    assert shown.stdout == b"ranks 0?1\n"
