"""Every command with every kind of bad path and bad file, in this process: one line that names it, and no traceback."""

from __future__ import annotations

import io
import json
import os
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from phalanx.cli.main import main


def _file(content: bytes, name: str = "odd-file") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _loop(folder: Path) -> Path:
    (folder / "odd-loop").symlink_to("odd-loop")
    return folder / "odd-loop"


def _empty_folder(folder: Path) -> Path:
    (folder / "odd-folder").mkdir()
    return folder / "odd-folder"


KINDS: dict[str, Callable[[Path], Path]] = {
    "missing": lambda folder: folder / "odd-missing",
    "below a file": lambda folder: _file(b"x")(folder) / "below",
    "too long a name": lambda folder: folder / ("odd-" + "L" * 300),
    "loop of links": _loop,
    "device": lambda _: Path(os.devnull),
    "empty folder": _empty_folder,
    "empty file": _file(b""),
    "binary": _file(bytes(range(256)) * 8),
    "deep JSON": _file(b"[" * 100_000),
    "JSON in UTF-16": _file(json.dumps({"id": "x"}).encode("utf-16")),
    "a list": _file(b"[1, 2]\n"),
    "name of no UTF-8": _file(bytes(range(256)) * 8, os.fsdecode(b"odd-\xff\xfe.json")),
    "no such name of no UTF-8": lambda folder: folder / os.fsdecode(b"odd-\xff"),
}

# The commands that take paths, with {} for the bad one.
COMMANDS = """
train {}
explain {}
data prepare {}
data info {}
plan {}
simulate network {}
alerts test {}
alerts list {}
generate {}
generate {} --prompts {}
evaluate {}
status {}
logs {}
runs ls {}
runs diff {} {}
runs note {} words
runs tag {} +good
runs import {} new
trace summary {}
trace slow {}
trace compare {} {}
trace report {}
trace export {} new.json
trace import {} new
trace sql {} select
dashboard {}
detect all {}
detect corruption {}
detect diverge {} {}
detect drift {}
detect hang {}
detect logs {}
detect logs {} --rules {}
detect logs --learn {} --out new.toml
detect loss {}
detect machines {}
detect offenders {}
detect stragglers {}
detect generate new --noise {}
faults run {}
checkpoint list {}
checkpoint show {}
checkpoint verify {}
checkpoint diff {} {}
checkpoint prune {}
checkpoint convert {} new
checkpoint convert {} new --to hf
checkpoint convert {} new --to config
checkpoint export-hf {} new
checkpoint import-hf {} new
run status --folder {}
run logs --folder {}
run incidents --folder {}
run stop --folder {}
run drain host --folder {}
evaluate {} --data {}
simulate network --cluster {}
simulate network --traffic {}
simulate network --fabric {}
plan validate --tables {}
detect machines odd-new --policy {}
detect machines odd-new --names {}
detect hang --stacks {}
"""
# Where there is something to answer: an empty folder has no runs, and lines of any kind may be logs.
_LINES = {"empty folder", "empty file", "device", "binary", "deep JSON", "JSON in UTF-16", "a list", "name of no UTF-8"}
ANSWERS = {
    f"{words} {{}}": {"empty folder"} for words in ("alerts list", "status", "runs ls", "dashboard", "detect all")
}
ANSWERS |= {"detect logs {}": _LINES, "detect logs --learn {} --out new.toml": {"device", "empty file"}}
ANSWERS |= {"detect logs {} --rules {}": {"empty file"}, "simulate network --fabric {}": {"device", "empty file"}}


@pytest.mark.parametrize("words", COMMANDS.strip().splitlines())
def test_a_bad_path_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr("phalanx.dashboard.serving.serve", lambda *_: None)
    problems = []
    for kind, make in KINDS.items():
        place = tmp_path / kind
        place.mkdir()
        monkeypatch.chdir(place)
        bad = str(make(place))
        try:
            status, said = _ask(*(bad if word == "{}" else word for word in words.split()))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            problems.append(f"{kind}: {type(error).__name__}: {error} in {where.filename}:{where.lineno}")
            continue
        is_named = any(name in said for name in ("odd-", Path(os.devnull).name, "train: is required"))
        if status == 2 and is_named and len(said.strip().splitlines()) == 1:
            continue
        if status == 2 or kind not in ANSWERS.get(words, ()):
            problems.append(f"{kind}: {status} {said[-300:]!r}")
    assert not problems, "\n".join(problems)


def _ask(*arguments: str) -> tuple[object, str]:
    """Exit status and what was said on stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code, err.buffer.getvalue().decode()  # type: ignore[attr-defined]
