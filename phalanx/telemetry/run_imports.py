"""Other people's runs as run folders: CSV files, TensorBoard's and Weights & Biases' files become a metrics.jsonl.

Names that others use for our figures become ours (`FIGURES`); the rest keep theirs. Figures of held-out text become
lines of kind ``evaluation``, all others lines of kind ``step``; with wall times, a step has ``time_s`` since the first.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer, open_regular, write_json
from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.tensorboard_files import read_event_files
from phalanx.telemetry.wandb_files import NotWandbError, WandbRun, flat_numbers, read_wandb

Format = Literal["csv", "tensorboard", "wandb"]
Rows = dict[int, dict[str, float]]
"""Figures by name, by step."""

STEPS = ("step", "global_step", "steps", "iteration", "iterations", "iter")
TIMES = ("wall_time", "timestamp")
FIGURES: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss", "train_loss", "training_loss", "loss_train", "lm_loss", "lm_loss_training_lm_loss", "train_lm_loss",
        "epoch_loss",
    ),
    "validation_loss": (
        "validation_loss", "val_loss", "valid_loss", "eval_loss", "loss_val", "loss_validation", "test_loss",
        "lm_loss_validation", "lm_loss_validation_lm_loss_validation", "validation_lm_loss",
        "validation_epoch_loss",
    ),
    "tokens": (
        "tokens", "num_tokens", "consumed_tokens", "total_tokens", "tokens_seen", "train_tokens",
        "train_num_input_tokens_seen",
    ),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok_s", "train_tokens_per_second"),
    "lr": ("lr", "learning_rate", "train_learning_rate", "train_lr", "learning_rate_learning_rate"),
    "grad_norm": ("grad_norm", "gradient_norm", "train_grad_norm", "grad_norm_grad_norm"),
    "time_s": ("time_s", "elapsed_s"),
}  # fmt: skip
"""Ours, and what others call it, in small letters with ``_`` for whatever stands between."""

_OURS = {other: ours for ours, others in FIGURES.items() for other in others}
_FORMATS: dict[str, Format] = {".csv": "csv", ".tsv": "csv", ".wandb": "wandb"}
_EVALUATED = re.compile(r"^(validation|valid|val|eval|test)(?:[_/]|$)")


MOST_STEP = 10**15
_ABSENT = frozenset({"", "none", "null", "na", "n/a", "-"})
"""How tables write that there is no figure."""


def import_run(
    sources: Sequence[Path],
    folder: Path,
    format_: Format | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Format, int, list[str]]:
    """Make a run folder of one run of somebody else.

    Args:
        sources: its files, or folders of event files or of a run of W&B; where two have a figure of the same step, the
            later one counts. See `phalanx.telemetry.tensorboard_files` for folders in a folder.
        folder: must hold no run yet.
        format_: None: by the names of the files, TensorBoard where they say nothing.
        say: called with a line for what is left out: of a table for each of its columns.

    Returns:
        The format, how many steps, and the names of the figures.

    Raises:
        UserError: `folder` holds a run or cannot be written, a file cannot be read or has no steps in it, files are of
            several runs, or TensorBoard is asked for and not installed.
    """
    if any((folder / name).exists() for name in ("metrics.jsonl", "config.json")):
        raise UserError("holds a run already", cure="import into a new folder", value=str(folder))
    by_source = _files(sources)
    files = [path for _, found in by_source for path in found]
    chosen: Format = format_ or _FORMATS.get(files[0].suffix.lower(), "tensorboard")
    rows: Rows = {}
    beside: dict[str, dict[str, Any]] = {}
    if chosen == "wandb":
        beside = _read_wandb(files, rows, say)
    elif chosen == "tensorboard":
        rows = read_event_files(by_source, name_of=our_name, is_step=is_step, say=say)
    else:
        for path in files:
            for step, figures in _read_csv(path, say).items():
                rows.setdefault(step, {}).update(figures)
    if not any(rows.values()):
        problem = "has no figures of steps"
        raise UserError(problem, cure="give files that have some", value=", ".join(map(str, sources)))
    _count_time(rows)
    told = f"{chosen}: {', '.join(path.name for path in files[:3])}{' …' if len(files) > 3 else ''}"
    kept = beside.pop("run.json", {})
    kept["imported"] = told + kept.pop("told", "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_writer(folder / "metrics.jsonl") as file:
            file.writelines(_lines(rows))
        for name, content in {"run.json": kept, **beside}.items():
            write_json(folder / name, content)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", cure="name another", value=str(folder)) from None
    return chosen, len(rows), list(dict.fromkeys(name for step in sorted(rows) for name in rows[step]))


def our_name(other: str) -> str:
    """What we call a figure that others call so: ``Loss/train`` is ``loss``; one that we have not keeps its name."""
    return _OURS.get(_plain(other), other.strip())


def is_step(number: float) -> bool:
    """Whether it counts a step: 1.5 would lie upon step 1."""
    return math.isfinite(number) and number == int(number) and 0 <= number <= MOST_STEP


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _files(sources: Sequence[Path]) -> list[tuple[Path, list[Path]]]:
    """The files of each source."""
    files: list[tuple[Path, list[Path]]] = []
    for source in sources:
        found = [source]
        if source.is_dir():  # W&B links to its newest run
            runs = sorted({path.resolve() for path in source.rglob("*.wandb")})
            found = sorted(source.rglob("*tfevents*")) or runs
        if not found:
            raise UserError("holds no event files, nor a run of W&B", cure="give CSV files by name", value=str(source))
        files.append((source, found))
    return files


def _read_csv(path: Path, say: Callable[[str], None]) -> Rows:
    """Rows of a table with a heading: one column of steps, the others figures; cells without a number are left out."""
    left_out = _LeftOut()
    try:
        with open_regular(path) as file:
            text = _decoded(file.read())
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    delimiter = _delimiter(text.partition("\n")[0])
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    try:
        heading = next(reader, [])
        names = _columns(heading, path, say)
        rows: Rows = {}
        for line in reader:
            cells = {}
            for place, name in names.items():
                cell = line[place].strip() if place < len(line) else ""
                cells[name] = _number(cell, has_decimal_comma=delimiter == ";")
                if cells[name] is not None:
                    left_out.numbered.add(place)
                elif cell.lower() not in _ABSENT:
                    left_out.words.setdefault(place, []).append((reader.line_num, cell))
            step = cells.pop("step", None)
            figures = {name: x for name, x in cells.items() if x is not None}
            if step is not None and is_step(step):
                before = rows.setdefault(int(step), {})
                left_out.again += any(name in before for name in figures)
                before |= figures
            elif step is not None or figures:
                left_out.steps.append((reader.line_num, "none" if step is None else f"{step:g}"))
    except csv.Error as error:
        raise _unreadable(path, str(error)) from None
    left_out.tell(path.name, heading, say)
    return rows


@dataclass
class _LeftOut:
    """What of a table is left out.

    Attributes:
        words: cells without a number: lines and what stands there, by place of the column.
        numbered: places of columns that hold numbers, too.
        steps: lines whose step is none, and what stands there.
        again: rows with figures of a step that an earlier row had, which count no more.
    """

    words: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    numbered: set[int] = field(default_factory=set)
    steps: list[tuple[int, str]] = field(default_factory=list)
    again: int = 0

    def tell(self, name: str, heading: Sequence[str], say: Callable[[str], None]) -> None:
        """A line for each column, and for rows."""
        for place, found in sorted(self.words.items()):
            (number, cell), more = found[0], len(found) - 1
            column = f"column {heading[place].strip()!r}"
            if place in self.numbered:
                also = f", nor are {more} more cells of it" if more else ""
                say(f"{name}: line {number}, {column}: {cell[:40]!r} is no number{also}; left out")
            else:
                say(f"{name}: {column} holds no numbers (line {number}: {cell[:40]!r}); left out")
        said = {number for found in self.words.values() for number, _ in found}
        if rest := [one for one in self.steps if one[1] != "none" or one[0] not in said]:
            (number, step), more = rest[0], len(rest) - 1
            also = f", nor are those of {more} more lines" if more else ""
            say(f"{name}: line {number}: its step ({step}) is no whole number from 0 to 10^15{also}; left out")
        if self.again:
            say(f"{name}: {self.again} lines have figures of a step that came before; the last line of a step counts")


def _columns(heading: Sequence[str], path: Path, say: Callable[[str], None]) -> dict[int, str]:
    """Our names by place: as the heading says, as TensorBoard's page saves one curve, or as W&B saves curves."""
    runs = {cell.rpartition(" - ")[0] for cell in heading if " - " in cell}
    if len(runs) > 1:
        cure = "export the curves of one run, and import each into a folder of its own"
        raise UserError(f"has {len(runs)} runs ({', '.join(sorted(runs)[:3])})", cure=cure, field=str(path))
    names: dict[int, str] = {}
    for place, cell in enumerate(heading):
        name = cell.rpartition(" - ")[2]
        if name.endswith(("__MIN", "__MAX")):
            continue
        plain = _plain(name)
        if plain == "value" and "-tag-" in path.stem:
            name = path.stem.rpartition("-tag-")[2]
        ours = "step" if plain in STEPS else "wall_time" if plain in TIMES else our_name(name)
        if ours in names.values() and ours not in ("step", "wall_time"):
            ours = name.strip()  # of two that we call the same, the second keeps its name
        if ours and ours not in names.values():
            names[place] = ours
        elif ours:
            before = heading[next(at for at, known in names.items() if known == ours)].strip()
            say(f"{path.name}: column {place + 1}, {cell.strip()!r}, says the same as column {before!r}; left out")
    if "step" not in names.values():
        found = ", ".join(heading[:8]) or "nothing"
        cure = f"name the column of steps step (or {', '.join(STEPS[1:])})"
        raise UserError(f"its first line names no steps ({found})", cure=cure, field=str(path))
    return names


def _read_wandb(files: Sequence[Path], rows: Rows, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Add the figures of one run to `rows`; the contents of the other files of its folder, by name.

    The step is a figure that is called so, such as ``train/global_step``, else W&B's own count of calls.
    """
    found: list[WandbRun] = []
    for path in files:
        try:
            found.append(read_wandb(path))
        except (OSError, NotWandbError) as error:
            raise _unreadable(path, error) from None
    ids = list(dict.fromkeys(run.run_id for run in found))
    if len(ids) > 1:
        cure = "import each into a folder of its own"
        raise UserError(f"are {len(ids)} runs ({', '.join(ids[:3])} …)", cure=cure, value=str(files[0].parent))
    found.sort(key=lambda run: run.history[0].get("_timestamp", 0) if run.history else 0)
    strange, again, seen, names = 0, 0, set[tuple[int, int]](), dict[str, str]()
    for number, row in ((number, row) for number, run in enumerate(found) for row in run.history):
        figures = {name: float(x) for name, x in flat_numbers(row) if not name.startswith("_")}
        counts = [name for name in figures if _plain(name.rpartition("/")[2]) in STEPS]
        step = figures[counts[0]] if counts else row.get("_step")
        if step is None or not is_step(step):
            strange += 1
            continue
        ours = rows.setdefault(int(step), {})
        again += bool(ours) and (number, int(step)) not in seen
        seen.add((number, int(step)))
        for name in (name for name in figures if name not in counts):
            if name not in names:  # of two that we call the same, the second keeps its own
                names[name] = name if our_name(name) in names.values() else our_name(name)
            ours[names[name]] = figures[name]
        if isinstance(row.get("_timestamp"), int | float):
            ours["wall_time"] = float(row["_timestamp"])
    where = files[0].parent
    if strange:
        say(f"{where}: {strange} rows have no step that is a whole number from 0 to 10^15; left out")
    if again:
        say(f"{where}: {len(found)} files are of run {ids[0]}; {again} steps are in several: the last file counts")
    last = found[-1]
    told = f", of project {last.project}" if last.project else ""
    told += f", exit status {last.exit_code}" if last.exit_code else ", broke off" if last.exit_code is None else ""
    damaged = sum(run.damaged for run in found)
    told += f", {damaged} damaged places left out" if damaged else ""
    texts = {"name": last.name, "note": " ".join(last.notes.split()), "tags": last.tags, "told": told}
    config = {name: value for run in found for name, value in run.config.items()}
    return {
        "run.json": {name: value for name, value in texts.items() if value},
        **({"config.json": config} if config else {}),
        **({"summary.json": last.summary} if last.summary else {}),
    }


def _count_time(rows: Rows) -> None:
    """Wall times become seconds since the first, where the run does not say its time."""
    times = {step: figures.pop("wall_time") for step, figures in rows.items() if "wall_time" in figures}
    if times and not any("time_s" in figures for figures in rows.values()):
        first = min(times.values())
        for step, at in times.items():
            rows[step]["time_s"] = at - first


def _lines(rows: Mapping[int, Mapping[str, float]]) -> Iterable[bytes]:
    for step in sorted(rows):
        figures: dict[str, Any] = {
            name: int(x) if name == "tokens" and math.isfinite(x) else x for name, x in rows[step].items()
        }
        evaluated = {name: x for name, x in figures.items() if _EVALUATED.match(name)}
        trained = {name: x for name, x in figures.items() if name not in evaluated}
        if set(trained) - {"time_s"}:
            yield metrics_line("step", step, trained)
        if evaluated:
            yield metrics_line("evaluation", step, evaluated)


def _decoded(content: bytes) -> str:
    """As spreadsheets save tables: UTF-8, with a mark or without, and UTF-16."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    return content.decode(encoding, "replace")


def _delimiter(heading: str) -> str:
    """Where numbers have decimal commas, a semicolon parts them."""
    if "\t" in heading:
        return "\t"
    return ";" if heading.count(";") > heading.count(",") else ","


def _number(cell: str, *, has_decimal_comma: bool = False) -> float | None:
    if "_" in cell:  # Python reads 1_000 as a number, and nobody else does
        return None
    try:
        return float(cell.replace(",", ".") if has_decimal_comma else cell)
    except ValueError:
        return None


def _unreadable(path: Path, why: object) -> UserError:
    return UserError(f"cannot be read ({why})", cure="give a CSV file, or one of TensorBoard or W&B", field=str(path))
