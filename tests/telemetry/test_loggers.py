from __future__ import annotations

import importlib.util
import json
import math
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.loggers import Fanout, JsonLines, TensorBoard, open_loggers, read_json_lines


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def steps(path: Path, kind: str = "step") -> list[int]:
    return [line["step"] for line in lines(path) if line["kind"] == kind]


def fill(path: Path, until: int) -> None:
    logger = JsonLines(path)
    for step in range(1, until + 1):
        logger.log(step, {"loss": step / 7})
    logger.close()


def test_a_line_per_step_with_exact_figures(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLines(path)
    logger.log(1, {"loss": 0.1 + 0.2, "tokens": 2**60, "note": "Übung"})
    assert lines(path) == [{"kind": "step", "step": 1, "loss": 0.1 + 0.2, "tokens": 2**60, "note": "Übung"}]
    logger.log_event("evaluation", 1, {"validation_loss": 2.5})
    assert lines(path)[1] == {"kind": "evaluation", "step": 1, "validation_loss": 2.5}
    logger.close()
    logger.close()


def test_numbers_that_json_has_not_become_null_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).log(1, {"loss": math.nan, "norm": math.inf, "low": -math.inf, "lr": 0.5})
    strange = {"loss": "nan", "norm": "inf", "low": "-inf"}
    expected = {"kind": "step", "step": 1, "loss": None, "norm": None, "low": None, "lr": 0.5, "not_finite": strange}
    assert lines(path) == [expected]


def test_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 9)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "step": 10, "lo')
    logger = JsonLines(path, resume_step=6)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    logger.log(7, {"loss": 1.0})
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_in_the_same_folder_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    JsonLines(path, resume_step=0)
    assert path.read_bytes() == b""


def test_a_step_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    logger = JsonLines(path, resume_step=3)
    for step in (2, 3, 4, 4):
        logger.log(step, {"loss": -1.0})
    logger.log_event("evaluation", 3, {"validation_loss": 1.0})
    logger.log_event("evaluation", 3, {"validation_loss": 1.0})
    assert steps(path) == [1, 2, 3, 4]
    assert steps(path, "evaluation") == [3]
    assert lines(path)[1]["loss"] == 2 / 7


def test_a_file_with_nothing_to_drop_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    before = path.stat().st_ino
    JsonLines(path, resume_step=3)
    assert path.stat().st_ino == before


@settings(max_examples=60, deadline=None)
@given(logged=st.integers(0, 12), cut=st.integers(0, 10**6), resume=st.integers(0, 15), data=st.binary(max_size=40))
def test_whatever_the_file_is_each_step_is_there_once_afterwards(
    tmp_path_factory: pytest.TempPathFactory, logged: int, cut: int, resume: int, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    fill(path, logged)
    content = path.read_bytes()
    path.write_bytes(content[: cut % (len(content) + 1)] + data)
    whole = [s for s in steps_before(path) if s <= resume]
    logger = JsonLines(path, resume)
    for step in range(resume + 1, resume + 4):
        logger.log(step, {"loss": 0.0})
    assert steps(path) == [*whole, resume + 1, resume + 2, resume + 3]


def steps_before(path: Path) -> list[int]:
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def test_a_reader_sees_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 2)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "step": 3')
    assert [entry["step"] for entry in read_json_lines(path)] == [1, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
from phalanx.telemetry.loggers import JsonLines
path, resume, until = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
logger = JsonLines(path, resume)
for step in range(resume + 1, until + 1):
    logger.log(step, {"loss": step / 7, "padding": "x" * (step % 50)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_and_resume_leave_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for resume, until in ((0, 30), (10, 25), (20, 40)):
        command = [sys.executable, "-c", KILLED, str(path), str(resume), str(until)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert steps(path) == list(range(1, until + 1))
    assert [line["loss"] for line in lines(path)] == [step / 7 for step in range(1, 41)]


def test_a_folder_that_is_not_there_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="figures cannot be written"):
        JsonLines(tmp_path / "absent" / "metrics.jsonl")


LIMITED = """
import resource, signal, sys
from pathlib import Path
from phalanx.core.errors import UserError
from phalanx.telemetry.loggers import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
logger = JsonLines(Path(sys.argv[1]))
for step in range(1, 10):
    try:
        logger.log(step, {"loss": 0.25})
    except UserError as error:
        print(step, error)
        break
"""


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    result = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert "4 " in result.stdout
    assert "figures cannot be written" in result.stdout
    assert steps(path) == [1, 2, 3]
    assert path.read_bytes().endswith(b"}\n")


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.calls += 1
        raise ConnectionError("no network")

    def log_event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.log(step, values)

    def flush(self) -> None:
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


class Collecting:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.seen.append((step, dict(values)))

    def log_event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.seen.append((kind, step, dict(values)))

    def flush(self) -> None:
        self.seen.append("flush")

    def close(self) -> None:
        self.seen.append("close")


def test_a_failing_remote_logger_is_told_once_and_harms_nothing() -> None:
    main, good, bad = Collecting(), Collecting(), Failing()
    told: list[str] = []
    logger = Fanout(main, {"bad": bad, "good": good}, told.append)
    for step in (1, 2, 3):
        logger.log(step, {"loss": 1.0})
    logger.log_event("evaluation", 3, {"validation_loss": 2.0})
    logger.flush()
    logger.close()
    expected = [(s, {"loss": 1.0}) for s in (1, 2, 3)] + [("evaluation", 3, {"validation_loss": 2.0}), "flush", "close"]
    assert main.seen == good.seen == expected
    assert bad.calls == 4, "it may recover, so it is tried again"
    assert len(told) == 1
    assert "bad fails (ConnectionError: no network)" in told[0]


def test_the_main_logger_may_not_fail_silently() -> None:
    with pytest.raises(ConnectionError):
        Fanout(Failing(), {}).log(1, {})


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_forgets_the_steps_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    killed = TensorBoard(tmp_path, 0, {"train": {"steps": 5}})
    for step in range(1, 6):
        killed.log(step, {"loss": float(step), "phase": "warm-up"})
    killed.close()
    resumed = TensorBoard(tmp_path, 3, {})
    for step in (4, 5, 6):
        resumed.log(step, {"loss": 10.0 * step})
    resumed.log_event("evaluation", 6, {"validation_loss": 7.0})
    resumed.flush()
    resumed.close()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert scalars(tmp_path, "validation_loss") == [(6, 7.0)]


class FakeWandB(ModuleType):
    """Stands for the wandb package: keeps what it is told."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self._failure = failure

    def init(self, **settings: Any) -> FakeWandB:
        if self._failure is not None:
            raise self._failure
        self.inits.append(settings)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = LoggingConfig(wandb=True, wandb_project="p", wandb_entity="team", wandb_mode="offline")
    for resume in (0, 5):
        logger = open_loggers(config, tmp_path, resume, {"seed": 1})
        logger.log(resume + 1, {"loss": 2.0})
        logger.flush()
        logger.close()
    first, second = fake.inits
    assert first == second
    assert first["id"]
    assert first | {"id": ""} == {
        "project": "p",
        "entity": "team",
        "name": tmp_path.name,
        "id": "",
        "resume": "allow",
        "mode": "offline",
        "dir": str(tmp_path),
        "config": {"seed": 1},
    }
    assert fake.defined == [("*", "step")] * 2
    assert fake.logged == [{"step": 1, "loss": 2.0}, {"step": 6, "loss": 2.0}]
    assert fake.finished == 2
    assert steps(tmp_path / "metrics.jsonl") == [1, 6]


def test_wandb_takes_steps_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations come before the figures of their step, and at the step that a resumed run starts from."""
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = open_loggers(LoggingConfig(wandb=True), tmp_path, 0)
    logger.log_event("evaluation", 3, {"validation_loss": 9.0})
    for step in (1, 2, 3):
        logger.log(step, {"loss": float(step)})
    logger.close()
    assert [entry["step"] for entry in fake.logged] == [3, 1, 2, 3]
    assert fake.logged[0] == {"step": 3, "validation_loss": 9.0}


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_wandb_keeps_every_entry(tmp_path: Path) -> None:
    """What W&B itself wrote down offline: each figure, under the step that it was given."""
    config = LoggingConfig(wandb=True, wandb_mode="offline")
    for resume in (0, 2):
        logger = open_loggers(config, tmp_path, resume, {"seed": 1})
        logger.log_event("evaluation", resume, {"validation_loss": 9.0 + resume})
        for step in (resume + 1, resume + 2):
            logger.log(step, {"loss": float(step)})
        logger.close()
    kept = [_history(file) for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
    evaluations = [{"step": 0, "validation_loss": 9.0}, {"step": 2, "validation_loss": 11.0}]
    figures = [[{"step": step, "loss": float(step)} for step in steps] for steps in ((1, 2), (3, 4))]
    assert sorted(kept, key=lambda rows: rows[0]["step"]) == [
        [evaluation, *rows] for evaluation, rows in zip(evaluations, figures, strict=True)
    ]


def _history(file: Path) -> list[dict[str, Any]]:
    """The entries of a file of W&B, without those that it adds itself.

    (A head of 7 bytes, then records as in LevelDB's log: checksum, length, type; whole ones within the first 32 KiB.)
    """
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, place, rows = file.read_bytes(), 7, []
    assert len(content) < 1 << 15
    while place < len(content):
        _checksum, length, _type = struct.unpack_from("<IHB", content, place)
        record = records.Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def test_wandb_absent_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"logging\.wandb: .*pip install 'phalanx-train\[wandb\]'"):
        open_loggers(LoggingConfig(wandb=True), tmp_path, 0)


def test_tensorboard_absent_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"logging\.tensorboard: .*pip install 'phalanx-train\[tensorboard\]'"):
        open_loggers(LoggingConfig(tensorboard=True), tmp_path, 0)


def test_wandb_refusing_stops_a_new_run_but_not_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(PermissionError("no API key")))
    config = LoggingConfig(wandb=True)
    with pytest.raises(UserError, match=r"PermissionError: no API key.*wandb login"):
        open_loggers(config, tmp_path, 0)
    told: list[str] = []
    logger = open_loggers(config, tmp_path, 3, warn=told.append)
    logger.log(4, {"loss": 1.0})
    assert len(told) == 1
    assert "going on without it" in told[0]
    assert steps(tmp_path / "metrics.jsonl") == [4]


def test_only_the_file_by_default(tmp_path: Path) -> None:
    assert isinstance(open_loggers(LoggingConfig(), tmp_path, 0), JsonLines)


def test_loggers_are_imported_without_torch_and_optional_packages() -> None:
    code = "import sys, phalanx.telemetry.loggers; print({'torch', 'wandb', 'tensorboard'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_due() -> None:
    config = LoggingConfig(every_steps=3)
    assert [step for step in range(1, 10) if config.due(step)] == [3, 6, 9]
