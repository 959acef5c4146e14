"""Runs of others as run folders: tables and event files, and what is said of all that is left out of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.figures.curves import columns_of
from phalanx.telemetry import run_imports
from phalanx.telemetry.loggers import read_json_lines
from phalanx.telemetry.run_imports import import_run
from phalanx.telemetry.run_list import read_run


def test_csv_of_others(tmp_path: Path) -> None:
    path, second = tmp_path / "log.csv", tmp_path / "val.csv"
    path.write_text(
        "Iteration,Wall time,train/loss,learning_rate,consumed tokens,comment\n"
        "1,100.0,5.5,1e-3,512,hello\n2,102.5,nan,1e-3,1024,\n\nbroken\n3,105,5.0,,1536,x\n"
    )
    second.write_text("step,eval/loss\n3,5.25\n")
    run = tmp_path / "theirs"
    said: list[str] = []
    assert import_run([path, second], run, say=said.append) == (
        "csv",
        3,
        ["loss", "lr", "tokens", "time_s", "validation_loss"],
    )
    assert said == [
        "log.csv: line 5, column 'Iteration': 'broken' is no number; left out",
        "log.csv: column 'comment' holds no numbers (line 2: 'hello'); left out",
    ]
    columns = columns_of(read_json_lines(run / "metrics.jsonl")).to_pydict()
    assert columns["step"] == [1, 2, 3] and columns["time_s"] == [0, 2.5, 5] and columns["validation_loss"][2] == 5.25
    assert columns["loss"][0] == 5.5 and math.isnan(columns["loss"][1]) and columns["lr"][2] is None
    row = read_run(run)
    assert (row.state, row.step, row.tokens, row.loss, row.validation_loss) == ("imported", 3, 1536, 5.0, 5.25)
    assert row.why == "csv: log.csv, val.csv"
    with pytest.raises(UserError, match="holds a run already"):
        import_run([path], run)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfstep;loss\r\n1;2,5\r\n2;-2,4e-1\r\n",
        "step,loss\n1,2.5\n2,-0.24\n".encode("utf-16"),
        "step\tloss\n1\t2.5\n2\t-0.24\n".encode("utf-16"),
    ],
)
def test_csv_as_spreadsheets_save_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    assert import_run([tmp_path / "x.csv"], tmp_path / "run") == ("csv", 2, ["loss"])
    columns = columns_of(read_json_lines(tmp_path / "run" / "metrics.jsonl")).to_pydict()
    assert columns["loss"] == [2.5, -0.24]


def test_a_number_of_python_alone_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,loss\n1,1_000\n2,2\n")
    said: list[str] = []
    import_run([tmp_path / "x.csv"], tmp_path / "run", say=said.append)
    assert said == ["x.csv: line 2, column 'loss': '1_000' is no number; left out"]


@pytest.mark.parametrize(("name", "says"), [("x.csv.gz", "unpack it first"), ("x.tfevents.1", "no record of events")])
def test_what_is_no_event_file_is_not_readable(tmp_path: Path, name: str, says: str) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / name).write_bytes(bytes(range(1, 200)))
    with pytest.raises(UserError, match=f"cannot be read .*{says}"):
        import_run([tmp_path / name], tmp_path / "run")


def test_csv_as_wandb_and_tensorboard_save_curves(tmp_path: Path) -> None:
    wandb = tmp_path / "wandb.csv"
    wandb.write_text(
        '"Step","calm-sky-7 - train/loss","calm-sky-7 - train/loss__MIN"\n"0","4.5","4.5"\n"10","4.0","4"\n'
    )
    assert import_run([wandb], tmp_path / "a") == ("csv", 2, ["loss"])
    saved = tmp_path / "run-logs-tag-Loss_train.csv"
    saved.write_text("Wall time,Step,Value\n1700000000.5,1,4.5\n1700000001.5,2,4.25\n")
    assert import_run([saved], tmp_path / "b") == ("csv", 2, ["loss", "time_s"])
    wandb.write_text('"Step","one - loss","two - loss"\n1,2,3\n')
    with pytest.raises(UserError, match=r"has 2 runs \(one, two\)"):
        import_run([wandb], tmp_path / "c")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "names no steps"),
        (b"a,b\n1,2\n", "names no steps"),
        (b"step,loss\n", "no figures"),
        (b"step,loss\nx,y\n", "no figures"),
        (b"\xff\xfe\x00", "names no steps"),
        (b"step,loss\n1e999,2\n", "no figures"),
        (None, "cannot be read"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        import_run([path], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_event_files_of_others(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def write(steps: range, restart: int = 0) -> None:
        writer = EventFileWriter(str(tmp_path / "tb"), filename_suffix=f".{steps.start}")
        if restart:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            writer.add_event(event_pb2.Event(wall_time=100.0 + restart, step=restart, session_log=start))
        for step in steps:
            values = [
                Summary.Value(tag="Loss/train", simple_value=5 - step / 8),
                Summary.Value(tag="eval/loss", simple_value=6.0),
            ]
            writer.add_event(event_pb2.Event(wall_time=100.0 + step, step=step, summary=Summary(value=values)))
        writer.close()

    write(range(1, 6))
    write(range(3, 5), restart=3)  # went on from step 2, and got less far
    assert import_run([tmp_path / "tb"], tmp_path / "run") == ("tensorboard", 4, ["loss", "validation_loss", "time_s"])
    columns = columns_of(read_json_lines(tmp_path / "run" / "metrics.jsonl")).to_pydict()
    assert columns["step"] == [1, 2, 3, 4] and columns["loss"] == [4.875, 4.75, 4.625, 4.5]
    assert columns["time_s"] == [0, 1, 2, 3] and read_run(tmp_path / "run").validation_loss == 6.0
    foreign = tmp_path / "events.out.tfevents.1"
    foreign.write_bytes(b"no records here" * 9)
    with pytest.raises(UserError, match=r"no figures|cannot be read"):
        import_run([foreign], tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no event files"):
        import_run([tmp_path / "empty"], tmp_path / "none")


def test_event_files_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"phalanx-train\[tensorboard\]"):
        import_run([path], tmp_path / "run")


def test_every_name_of_others_is_written_as_it_is_looked_up() -> None:
    for others in run_imports.FIGURES.values():
        assert [run_imports._plain(other) for other in others] == list(others)


def write_events(folder: Path, figures: dict[str, list[tuple[int, float]]]) -> Path:
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for tag, values in figures.items():
        for step, value in values:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(event_pb2.Event(wall_time=100.0 + step, step=step, summary=summary))
    writer.close()
    return folder


def columns(run: Path) -> dict[str, list[object]]:
    return columns_of(read_json_lines(run / "metrics.jsonl")).to_pydict()


@pytest.mark.parametrize("held_out", ["validation", "valid", "val", "eval"])
def test_folders_of_one_run_give_its_figures_their_place(tmp_path: Path, held_out: str) -> None:
    write_events(tmp_path / "tb" / "train", {"loss": [(1, 3.0), (2, 2.0)], "epoch_loss": [(2, 2.5)]})
    write_events(tmp_path / "tb" / held_out, {"loss": [(2, 2.25)]})
    write_events(tmp_path / "tb" / "test", {"loss": [(2, 2.125)]})
    said: list[str] = []
    import_run([tmp_path / "tb"], tmp_path / "run", say=said.append)
    found = columns(tmp_path / "run")
    assert found["loss"] == [3, 2] and found["epoch_loss"] == [None, 2.5] and not said
    assert found["validation_loss"] == [None, 2.25] and found["test/loss"] == [None, 2.125]
    import_run([tmp_path / "tb" / "train", tmp_path / "tb" / held_out], tmp_path / "two")
    assert columns(tmp_path / "two")["validation_loss"] == [None, 2.25]
    import_run([tmp_path / "tb" / held_out], tmp_path / "alone")  # a run that is called so
    assert columns(tmp_path / "alone")["loss"] == [2.25]


def test_folders_of_several_runs_are_refused_unless_they_are_given_one_by_one(tmp_path: Path) -> None:
    for name, value in (("day1", 3.0), ("day2", 2.0)):
        write_events(tmp_path / "tb" / name, {"loss": [(1, value)]})
    write_events(tmp_path / "tb" / "day1" / "extras", {"score": [(1, 7.0)]})
    with pytest.raises(UserError, match=r"several runs: day1 and day2 both have 'loss'"):
        import_run([tmp_path / "tb"], tmp_path / "run")
    import_run([tmp_path / "tb" / "day1", tmp_path / "tb" / "day2"], tmp_path / "run")
    assert columns(tmp_path / "run")["loss"] == [2.0] and columns(tmp_path / "run")["score"] == [7.0]


def test_scalars_without_a_step_and_of_one_step_are_named(tmp_path: Path) -> None:
    write_events(tmp_path / "a", {"loss": [(0, 1.0)] * 10, "acc": [(1, 0.5), (2, 0.75), (2, 1.0)], "hp": [(0, -1.0)]})
    said: list[str] = []
    import_run([tmp_path / "a"], tmp_path / "run", say=lambda line: said.append(line.partition(": ")[2]))
    assert said == [
        "'loss': 10 values were written without a step; left out",
        "'acc': of a step that has several values the last one counts; 1 are left out",
    ]
    found = columns(tmp_path / "run")
    assert found["step"] == [0, 1, 2] and found["acc"] == [None, 0.5, 1.0] and found["hp"] == [-1, None, None]
    write_events(tmp_path / "b", {"loss": [(0, 1.0), (0, 2.0)]})
    with pytest.raises(UserError, match="no figures of steps"):
        import_run([tmp_path / "b"], tmp_path / "none")


def test_steps_of_a_table_that_count_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,loss\n1,2\n1.5,3\n-4,2\n99999999999999999999999,1\n1e3,0.5\n,7\nnan,8\n")
    said: list[str] = []
    import_run([tmp_path / "x.csv"], tmp_path / "run", say=said.append)
    assert columns(tmp_path / "run")["step"] == [1, 1000] and columns(tmp_path / "run")["loss"] == [2, 0.5]
    also = "is no whole number from 0 to 10^15, nor are those of 4 more lines; left out"
    assert said == [f"x.csv: line 3: its step (1.5) {also}"]


def test_columns_and_lines_that_say_a_thing_twice_are_named_or_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,loss,loss,val_loss,test_loss,iter\n1,2,3,4,5,6\n1,2.5,3,4,5,6\n")
    said: list[str] = []
    import_run([tmp_path / "x.csv"], tmp_path / "run", say=said.append)
    found = columns(tmp_path / "run")
    assert (found["loss"], found["validation_loss"], found["test_loss"]) == ([2.5], [4], [5])
    assert said == [
        "x.csv: column 3, 'loss', says the same as column 'loss'; left out",
        "x.csv: column 6, 'iter', says the same as column 'step'; left out",
        "x.csv: 1 lines have figures of a step that came before; the last line of a step counts",
    ]
