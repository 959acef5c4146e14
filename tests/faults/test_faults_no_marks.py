"""Nothing that a worker shows while it is under injection says that it is: lines, stacks, names, environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_helpers import GUARD_S, PLAIN_LOOP, TORCH_LOOP, Job, incident, job_folder, running, until

from phalanx.faults.fault_schedule import telling_words
from phalanx.faults.torch_hooks import Spot, disguised
from phalanx.faults.worker_faults import ERRORS, INJECTORS, LINES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

GATED = PLAIN_LOOP.replace(
    "    for step", "    while not __import__('os').path.exists('go'):\n        time.sleep(0.01)\n    for step"
)

LASTING: dict[str, dict[str, Any]] = {
    "unit": {"unit": "seconds", "amount": 0.05},
    "steps": {"unit": "steps", "amount": 2},
}

AT_STEPS = [kind for kind in INJECTORS if kind not in ("nan", "corruption")]
ELSEWHERE = [(kind, phase) for kind in ("exception", "segfault") for phase in ("checkpoint", "start")]


@pytest.fixture
def folder() -> Iterator[Path]:
    with job_folder() as path:
        yield path


def one_of(kind: str, phase: str) -> Any:
    lasts = LASTING["steps" if kind in ("log-lines", "slow") else "unit"]
    settings = {"limit_mb": 64} if kind == "out-of-memory" else {}
    when = {"phase": phase} | ({} if phase == "start" else {"step": 3})
    return incident(kind, lasts=lasts, when=when, **settings)


def shown_by(process: subprocess.Popen[str]) -> str:
    """What the system tells of a process and its threads."""
    proc = Path(f"/proc/{process.pid}")
    names = [path.read_text(errors="replace") for path in proc.glob("task/*/comm")]
    texts = [(proc / name).read_bytes().replace(b"\0", b"\n").decode() for name in ("environ", "cmdline", "comm")]
    return "\n".join([*names, *texts])


@pytest.mark.parametrize("kind", AT_STEPS)
def test_a_worker_shows_nothing(kind: str, folder: Path) -> None:
    job = Job(folder, GATED).prepare(one_of(kind, "step"))
    with running(job.start()) as process:
        shown = until(lambda: text if "notes.json" in (text := shown_by(process)) else "", "its environment")
        (folder / "go").touch()
        out, err = process.communicate(timeout=GUARD_S)
    assert [record.refused for record in job.records] == [""]
    assert telling_words(shown + out + err) == []


@pytest.mark.parametrize(("kind", "phase"), ELSEWHERE)
def test_nor_at_its_start_or_in_a_checkpoint(kind: str, phase: str, folder: Path) -> None:
    (folder / "go").touch()
    job = Job(folder, GATED.replace("steps=6", "steps=600")).prepare(one_of(kind, phase))
    code, out, err = job.run()
    assert code
    assert "loop.py" in err or phase == "start"
    assert telling_words(out + err) == []


@pytest.mark.campaign(but=("exception",))
@pytest.mark.parametrize("kind", ["exception", "abort", "slow"])
def test_a_worker_with_torch_shows_nothing(kind: str, folder: Path) -> None:
    job = Job(folder, TORCH_LOOP, "optimizer").prepare(incident(kind, lasts=LASTING["steps"], when={"step": 3}))
    _, out, err = job.run()
    assert [record.refused for record in job.records] == [""]
    assert telling_words(out + err) == []
    if kind != "slow":
        assert "optimizer.py" in err


@pytest.mark.campaign(but=("deadlock",))
@pytest.mark.parametrize("kind", ["sleep", "deadlock"])
def test_the_stacks_of_a_worker_that_hangs_show_nothing(kind: str, folder: Path) -> None:
    job = Job(folder, TORCH_LOOP, "optimizer").prepare(incident(kind, lasts={"unit": "forever"}))
    with running(job.start()) as process:
        until(lambda: job.records, "the record")
        dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(process.pid)]
        stack = until(lambda: out if "loop.py" in (out := output_of(dump)) else "", "a stack with the script in it")
    assert telling_words(stack) == []


def output_of(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    if "Permission" in result.stderr:
        pytest.skip("py-spy may not look into other processes here")
    return result.stdout


def test_what_is_said_tells_nothing() -> None:
    assert [telling_words(text) for text in (*LINES, *(text for _, text in ERRORS.values()))] == [[]] * 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Segmentation fault (core dumped)", []),
        ("faulthandler default segfault", []),
        ("File phalanx/faults/inject.py", ["fault", "inject"]),
        ("Injected on purpose", ["inject", "on purpose"]),
        ("default fault", ["fault"]),
    ],
)
def test_words_that_tell(text: str, words: list[str]) -> None:
    assert telling_words(text) == words


def test_a_disguised_function_is_seen_elsewhere() -> None:
    def outer(value: int) -> list[Any]:
        return [sys._getframe().f_code.co_name, (lambda: sys._getframe().f_lineno)(), value + len(os.sep)]

    spot = Spot("train.py", "forward", 1234)
    assert disguised(outer, spot)(4) == ["forward", 1234, 5]
    frames = disguised(outer, spot).__code__
    assert (frames.co_filename, frames.co_qualname) == ("train.py", "forward")
    assert {line for _, _, line in frames.co_lines()} == {1234}
