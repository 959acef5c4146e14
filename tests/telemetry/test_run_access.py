"""Runs of which another user has closed a part: the rest is listed, and what is closed is named with its cure."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import click._textwrap  # noqa: F401  what errors are wrapped with; the other user may not be able to import it later
import pytest
from dashboard_helpers import client_of
from trace_runs import four_ranks, write_run

from phalanx.cli.main import _status_of
from phalanx.telemetry.run_list import list_runs, read_run

NOBODY = 65534
REFUSED = "cannot be read (permission denied)"
IMPORTED: set[tuple[str, ...]] = set()
"""Commands that this process has called."""
STEPS = [{"kind": "step", "step": step, "loss": 2.0, "step_s": 0.19, "tokens": step * 64} for step in range(1, 9)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two runs with spans, figures and logs, where another user finds them: pytest's own folders are closed."""
    monkeypatch.setenv("COLUMNS", "400")
    folder = Path(tempfile.mkdtemp(prefix="phalanx-runs-"))
    folder.chmod(0o755)
    for name in ("base", "other"):
        write_run(folder / name, four_ranks(8), metrics=STEPS)
        (folder / name / "config.json").write_text('{"train": {"steps": 8}}')
        (folder / name / "logs").mkdir()
        (folder / name / "logs" / "train.log").write_text("2026-11-26T02:00:00.000Z INFO [rank 0 start 1] hello\n")
    yield folder
    for place in folder.rglob("*"):
        place.chmod(0o755)
    shutil.rmtree(folder)


def as_another_user(call: Callable[[], str]) -> str:
    """What `call` says as a user that the files do not belong to; it must have been called before, to be imported."""
    if os.geteuid() != 0:
        return call()  # the modes hold for this user, too
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.alarm(60)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = call()
        except BaseException as error:
            said = f"failed: {error!r}"
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def phalanx(*arguments: object) -> Callable[[], str]:
    def call() -> str:
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            status = _status_of([str(one) for one in arguments])
        return f"{out.getvalue()}rc {status}"

    command = tuple(one for one in arguments if isinstance(one, str))
    if command not in IMPORTED:
        call()  # as the owner, so that all is imported
        IMPORTED.add(command)
    return call


def ask(*arguments: object, closed: Path) -> str:
    call = phalanx(*arguments)
    mode = closed.stat().st_mode
    closed.chmod(0)
    try:
        return as_another_user(call)
    finally:
        closed.chmod(mode)


@pytest.mark.campaign(but=("config.json", "telemetry"))
@pytest.mark.parametrize("part", ["telemetry", "metrics.jsonl", "config.json", "telemetry/live", "."])
def test_one_closed_part_hides_no_other_run(runs: Path, part: str) -> None:
    (runs / "base" / "telemetry" / "live").mkdir()
    said = ask("runs", runs, closed=runs / "base" / part)
    base, other = (next(line for line in said.splitlines() if line.startswith(name)) for name in ("base", "other"))
    assert REFUSED in base and REFUSED not in other and said.endswith("rc 0"), said
    assert "finished" in other
    assert REFUSED in ask("status", runs, closed=runs / "base" / part)


def test_what_is_known_of_a_run_with_closed_telemetry_is_shown(runs: Path) -> None:
    said = ask("runs", runs, closed=runs / "base" / "telemetry")
    (base,) = (line for line in said.splitlines() if line.startswith("base"))
    assert "finished" in base and "8/8" in base and f"telemetry {REFUSED}" in base


def test_of_a_run_with_closed_figures_no_state_is_claimed(runs: Path) -> None:
    said = ask("runs", runs, closed=runs / "base" / "metrics.jsonl")
    assert "unknown" in next(line for line in said.splitlines() if line.startswith("base"))


@pytest.mark.campaign(
    but=(
        "telemetry-trace summary",
        "a part-detect machines",
        "telemetry/spans/host0-detect stragglers",
        "a part-trace slow",
    )
)
@pytest.mark.parametrize("command", ["trace summary", "trace slow", "detect stragglers", "detect machines"])
@pytest.mark.parametrize("part", ["telemetry", "telemetry/spans/host0", "a part"])
def test_commands_name_what_is_closed_and_its_cure(runs: Path, command: str, part: str) -> None:
    (file,) = (runs / "base/telemetry/steps/host0").glob("*.parquet")
    closed = file if part == "a part" else runs / "base" / part
    if command in ("trace slow", "detect machines") and part == "telemetry/spans/host0":
        return  # they read sums
    said = ask(*command.split(), runs / "base", closed=closed)
    assert REFUSED in said and "chmod -R g+rX" in said and said.endswith("rc 2"), said
    assert str(closed) in said and "bucket" not in said and "Traceback" not in said


def test_closed_figures_are_not_called_damaged(runs: Path) -> None:
    said = ask("trace", "summary", runs / "base", closed=runs / "base/metrics.jsonl")
    assert f"metrics.jsonl {REFUSED}" in said and "move damaged files" not in said
    assert f"metrics.jsonl {REFUSED}" in ask("detect", "loss", runs / "base", closed=runs / "base/metrics.jsonl")


def test_closed_logs_are_not_empty_logs(runs: Path) -> None:
    assert "hello" in phalanx("logs", runs / "base")()
    for closed in ("logs", "logs/train.log"):
        said = ask("logs", runs / "base", closed=runs / "base" / closed)
        assert f"{closed} {REFUSED}" in said and said.endswith("rc 2"), said


def test_judges_abstain_and_name_it(runs: Path) -> None:
    said = ask("detect", "all", runs / "base", closed=runs / "base/telemetry")
    assert "failed" not in said and said.count("chmod -R g+rX") >= 3, said
    assert "is not readable" in ask("detect", "all", runs / "base", closed=runs / "base")


def test_the_dashboard_lists_the_others(runs: Path) -> None:
    client = client_of(runs)  # the other user need not be able to read our own files, such as pages' templates

    def pages() -> str:
        asked = [client.get("/"), client.get("/run?run=base")]
        return "\n".join(f"{one.status_code} {one.text}" for one in asked)[:50_000]

    for closed in (runs / "base" / "telemetry", runs / "base"):
        pages()
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            said = as_another_user(pages)
        finally:
            closed.chmod(mode)
        assert "\n500" not in said and "failed:" not in said and "other" in said and REFUSED in said, said[:3000]


def test_a_place_that_raises_is_told_in_the_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    (runs / "base" / "metrics.jsonl").unlink()
    monkeypatch.setattr("phalanx.telemetry.run_list.records_spans", refuse)
    assert read_run(runs / "base").state == "unknown"
    assert len(list_runs(runs)) == 2
