"""All runs under a folder, each read from its tail: how far it is, its last figures, why it ended, what people noted.

Nothing here waits for a run or changes one, but for `run.json`, which holds what people say of it:

``{"name": "baseline", "note": "lr too high", "tags": ["good"], "imported": "csv: them.csv"}``

What stands there counts more than `run.name`, `run.note` and `run.tags` of the run's config.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from phalanx.core.errors import UserError, not_permitted
from phalanx.core.files import open_regular, read_regular, write_json
from phalanx.core.host import boot_id
from phalanx.core.units import duration
from phalanx.telemetry.config import TAG
from phalanx.telemetry.living_ranks import LIVING, State, living_state
from phalanx.telemetry.loggers import parse_line, usual_step_s
from phalanx.telemetry.rank_deaths import dead_ranks
from phalanx.telemetry.run_access import (
    REFUSED,
    as_text,
    is_closed,
    is_folder,
    is_there,
    read_table,
    refused_part,
    written_at,
)
from phalanx.telemetry.run_presence import Presence, moved_words, presences
from phalanx.telemetry.span_progress import span_progress
from phalanx.telemetry.writer_place import WRITER

Sort = Literal["written", "name", "state", "step", "tokens", "loss", "validation_loss", "tokens_per_s"]
SORTS: tuple[Sort, ...] = get_args(Sort)

ENDED = "ended.json"
"""How the newest start of a run ended, where the process could still say so; it counts while no figures are newer."""
ALL_DONE = "all was done"

_TAIL_BYTES = 1 << 16
_EVALUATION_WITHIN_BYTES = 1 << 20
"""Held-out text is looked at every so many steps: the last time lies further back than the tail."""
_CONFIG_MOST_BYTES = 64 << 20
_DEEPEST = 3
_USUAL_STEPS = 50
_MOST = 10**18
"""What is larger does not count anything."""
_EVALUATION = b'"kind": "evaluation"'
_STEP = b'{"kind": "step"'


@dataclass(frozen=True)
class Culprit:
    """The rank for which the launcher ended all others: its process was killed, or left, without a word.

    Attributes:
        start: of which start of the run, from 1.
        what: such as ``killed by SIGKILL``.
    """

    rank: int
    pid: int
    start: int
    what: str

    @property
    def why(self) -> str:
        """For people."""
        return f"rank {self.rank} (process {self.pid}) {'was ' if self.what.startswith('killed') else ''}{self.what}"


@dataclass(frozen=True)
class RunRow:
    """One run of a table. None: not known.

    Attributes:
        name: what a person called it, else its path below the folder that was asked for.
        loss: of the last step, nats; NaN or infinite where it was.
        validation_loss: of the newest evaluation.
        tokens_per_s: of the last stretch that was measured.
        written: when its figures were last written to, seconds since 1970.
        why: why it ended, or what of it cannot be read; empty: nothing is known.
        step_s: seconds of a usual step.
    """

    name: str
    folder: str
    state: State
    step: int | None
    total_steps: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    written: float
    why: str
    note: str
    tags: tuple[str, ...]
    step_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has not become null, and `why` tells of them."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Tail:
    """The end of a metrics.jsonl: its newest lines of each kind.

    Attributes:
        step: the newest line of a step; empty: none is there.
        saved: step of the newest checkpoint that is named there.
        problem: why the file cannot be read.
        steps: the last lines of steps as they stand there, the newest first.
    """

    step: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    saved: int | None
    written: float | None
    problem: str
    steps: tuple[bytes, ...] = ()


def list_runs(
    folder: Path,
    *,
    tag: str = "",
    sort: Sort = "written",
    also: str = "",
    read: Callable[[Path, Path], RunRow] | None = None,
) -> list[RunRow]:
    """The runs in `folder` and up to three levels below, or `folder` itself where it is one.

    Args:
        tag: only runs that have it.
        sort: newest, farthest and fastest first, but names and losses from the least; what is not known comes last.
        also: a file by which a folder counts as one, too.
        read: gives the row of a folder; None: `read_run`.

    Raises:
        UserError: there is no such folder.
    """
    try:
        is_folder, problem = folder.is_dir(), "is a file" if folder.exists() else "is not there"
    except OSError as error:
        is_folder, problem = False, f"cannot be read ({error.strerror})"
    if not is_folder:
        raise UserError(f"no folder of runs: it {problem}", cure="give the folder that runs lie in", value=str(folder))
    closed: list[Path] = []
    rows = [(read or read_run)(path, folder) for path in run_folders(folder, closed=closed, also=also)]
    rows += [closed_row(path, folder) for path in closed]
    return sorted((row for row in rows if not tag or tag in row.tags), key=lambda row: sort_place(row, sort))


def read_run(path: Path, below: Path | None = None, *, stalled_after_s: float | None = None) -> RunRow:
    """What the files of one run say; whatever is missing, torn or foreign in them is left out or told in `why`.

    Args:
        below: the folder that its name is relative to.
        stalled_after_s: see `phalanx.telemetry.living_ranks.living_state`.
    """
    tail, refused = read_tail(path / "metrics.jsonl"), refused_part(path)
    try:
        config, problem = read_config(path), tail.problem
    except UserError as error:
        config = {}
        # a run that has only begun, or was imported, has none
        problem = tail.problem or (error.problem if not refused and is_there(path / "config.json") else "")
    kept = _texts(config.get("run")) | _texts(read_table(path / "run.json"))
    total = _total_steps(config)
    try:
        state, why = _state(path, tail, kept, total, stalled_after_s)
    except PermissionError:  # of what says how it is: `refused` names it
        state, why = "unknown", ""
    if tail.problem and (REFUSED in tail.problem or tail.written) and state not in (*LIVING, "imported", "finished"):
        state = "unknown"
    step = _whole(tail.step.get("step"))
    if step is None and state == "finished":  # its figures were removed
        step = _whole((read_table(path / ENDED) or {}).get("step"))
    step_s, written = usual_step_s(tail.steps), tail.written
    if step is None and not tail.problem and not refused and _has_spans(path):  # a loop of somebody's own
        step, step_s, written = span_progress(path / "telemetry")
    shown = as_text(path.relative_to(below)) if below not in (None, path) else as_text(Path(path.resolve().name))
    return RunRow(
        name=kept.get("name") or shown,
        folder=str(path),
        state=state,
        step=step,
        total_steps=total,
        tokens=_whole(tail.step.get("tokens")),
        loss=_figure(tail.step, "loss"),
        validation_loss=_figure(tail.evaluation, "validation_loss"),
        tokens_per_s=_figure(tail.step, "tokens_per_s"),
        written=written or written_at(path),
        why=problem or "; ".join(filter(None, (refused, why, moved_words(path, is_running=state in LIVING)))),
        note=kept.get("note", ""),
        tags=tuple(kept.get("tags", ())),
        step_s=step_s,
    )


def closed_row(path: Path, below: Path) -> RunRow:
    """Of a folder that this user may not look into: a run may lie there. See `read_run`."""
    shown = as_text(path.relative_to(below)) if path != below else as_text(Path(path.resolve().name))
    nothing = (None, None, None, None, None, None)  # step … tokens_per_s
    return RunRow(shown, str(path), "unknown", *nothing, written_at(path), REFUSED, "", ())


def _state(
    path: Path, tail: Tail, kept: Mapping[str, Any], total: int | None, stalled_after_s: float | None
) -> tuple[State, str]:
    """What a run does, and why it does no more, or is not well."""
    step, said = _whole(tail.step.get("step")), _said(path, tail)
    here = presences(path)
    if is_locked(path) or (step is None and records_spans(path)):
        return living_state(here, usual_step_s(tail.steps), stalled_after_s)
    if here and not {presence.life() for presence in here} <= {"gone", "elsewhere"}:
        return living_state(here, usual_step_s(tail.steps), stalled_after_s)
    if here:
        return _without_lock(path, here, step, tail.written)
    why = _why(path, tail, kept, said)
    if "imported" in kept or is_there(path / "telemetry" / "imported.json"):
        return "imported", why
    if said in ("", ALL_DONE) and step is not None and total is not None and step >= total:
        return "finished", ""  # not stopped in the last evaluation
    if said == ALL_DONE and (step is None or total is None):  # its figures were removed, or its settings are damaged
        return "finished", ""
    if step is None and not said and not tail.problem and _has_spans(path):
        return _of_own_loop(path)
    return _ended_as(path, step, why), why


def _of_own_loop(path: Path) -> tuple[State, str]:
    """Of a run that holds spans and nothing else: somebody's own script wrote them, and writes no more."""
    dead = dead_ranks(path / "telemetry")
    if not dead:
        return "finished", ""
    first = dead[0]
    more = f" and {len(dead) - 1} more" if len(dead) > 1 else ""
    causes = "it was killed, it crashed, or it never closed its recording"
    return "died", f"the process of rank {first.rank}{more} ended without a word ({first.host}): {causes}"


def read_tail(path: Path) -> Tail:
    """The newest lines of a metrics.jsonl, from its last 64 KiB; the newest evaluation from its last MiB."""
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            start = max(0, found.st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).splitlines(keepends=True)[1 if start else 0 :]
            newest: dict[str, dict[str, Any]] = {}
            steps: list[bytes] = []
            for line in reversed(lines):
                is_step = line.startswith(_STEP)
                if is_step and len(steps) < _USUAL_STEPS:
                    steps.append(line)
                # nearly all are of steps: of those only the last one is decoded
                if "step" in newest and is_step:
                    continue
                if (entry := parse_line(line)) is not None:
                    newest.setdefault(entry["kind"], entry)
            if start and "evaluation" not in newest:
                begin = max(0, start - _EVALUATION_WITHIN_BYTES)
                file.seek(begin)
                newest["evaluation"] = _last_evaluation(file.read(start - begin + _TAIL_BYTES))
    except FileNotFoundError:
        return Tail({}, {}, None, None, "")
    except OSError as error:
        why = REFUSED if isinstance(error, PermissionError) else f"cannot be read ({error.strerror})"
        return Tail({}, {}, None, None, f"{path.name} {why}")
    # A line that is torn at the end of a young file is no damage; lines of which none is one of figures are.
    if not newest.get("evaluation") and newest.keys() <= {"evaluation"} and any(line.endswith(b"\n") for line in lines):
        problem = f"{path.name} is damaged: no line of it can be read as figures"
        return Tail({}, {}, None, found.st_mtime, problem)
    saved = newest.get("checkpoint", {}).get("step")
    evaluation = newest.get("evaluation", {})
    return Tail(newest.get("step", {}), evaluation, saved, found.st_mtime, "", tuple(steps))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of the run in `path`, as they were written.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    try:
        tree = json.loads(read_regular(path / "config.json", _CONFIG_MOST_BYTES))
    except FileNotFoundError:
        problem = "has no config.json"
    except PermissionError:
        raise not_permitted(path / "config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"its config.json is damaged ({getattr(error, 'strerror', None) or error})"
    else:
        if isinstance(tree, dict):
            return tree
        problem = "its config.json holds no settings"
    raise UserError(problem, cure="give the folder that `phalanx train` wrote", value=str(path))


def read_kept(path: Path) -> dict[str, Any]:
    """What people said of the run in `path`, in its config and, which counts more, in its run.json."""
    return _configured(path) | _texts(read_table(path / "run.json"))


def _configured(path: Path) -> dict[str, Any]:
    try:
        return _texts(read_config(path).get("run"))
    except UserError:
        return {}


def _texts(found: Any) -> dict[str, Any]:
    """Name, note, tags and where it is from, where a table has them; empty: taken away."""
    table = found if isinstance(found, dict) else {}
    texts = {key: text for key, text in table.items() if key in ("name", "note", "imported") and isinstance(text, str)}
    tags = table.get("tags")
    known = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return texts | ({"tags": known} if known or tags == [] else {})


def keep_note(path: Path, note: str | None = None, name: str | None = None) -> dict[str, Any]:
    """Keep a note of a run, or a name; empty takes it away, None leaves it. Returns what is kept now.

    Raises:
        UserError: there is no run, or it cannot be written to.
    """
    changed = {key: value.strip() for key, value in (("note", note), ("name", name)) if value is not None}
    return {key: value for key, value in _keep(path, changed).items() if value}


def keep_tags(path: Path, add: Iterable[str], remove: Iterable[str]) -> list[str]:
    """Give a run tags and take others away; returns those it has now.

    Raises:
        UserError: there is no run, it cannot be written to, or a tag holds other than letters, digits and ``._:/-``.
    """
    add, remove = list(add), list(remove)
    for tag in (*add, *remove):
        if not TAG.fullmatch(tag):
            raise UserError("is not a tag", cure="use letters, digits and ._:/-, such as good or lr:3e-4", value=tag)
    tags = [tag for tag in dict.fromkeys((*read_kept(path).get("tags", ()), *add)) if tag not in remove]
    _keep(path, {"tags": tags})
    return tags


def note_end(path: Path, step: int | None, why: str, start: int = 0, culprit: Culprit | None = None) -> None:
    """Keep how a start of the run in `path` ended (`ALL_DONE`, or what stopped it); step None: not known.

    What cannot be written is left out: the run is over. What the launcher said of a `culprit` stays: that rank 0 lost
    its peer, or was asked to end, is only what came of it.
    """
    known = read_culprit(path)
    if culprit is None and known is not None and known.start == start:
        return
    with suppress(OSError):
        write_json(path / ENDED, {"step": step, "why": why} | ({} if culprit is None else {"culprit": asdict(culprit)}))


def read_culprit(path: Path) -> Culprit | None:
    """The rank for which the launcher ended the newest start that said how it ended; None: it says of none."""
    found = (read_table(path / ENDED) or {}).get("culprit")
    with suppress(TypeError, ValueError):
        if isinstance(found, dict):
            culprit = Culprit(**found)
            return Culprit(int(culprit.rank), int(culprit.pid), int(culprit.start), str(culprit.what))
    return None


def diff_runs(a: Path, b: Path) -> dict[str, Any]:
    """Settings that differ, by dotted key, and the last figures of two runs.

    Returns:
        ``settings``: rows of `key`, `a` and `b`, None where one lacks the setting; ``a``, ``b``: as `RunRow.to_json`.

    Raises:
        UserError: the settings of one of them cannot be read.
    """
    old, new = (dict(flattened(read_config(path))) for path in (a, b))
    rows = [
        {"key": key, "a": old.get(key), "b": new.get(key)}
        for key in dict.fromkeys((*old, *new))
        if (key in old) != (key in new) or old.get(key) != new.get(key)
    ]
    return {"settings": rows, "a": read_run(a).to_json(), "b": read_run(b).to_json()}


def flattened(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted key; tables in a list are counted from 0: ``data.sources.0.path``."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{key}.")
        else:
            yield key, value


def is_run(path: Path) -> bool:
    """Whether something was trained or imported there: figures, spans, or the lock of a run that begins."""
    begins = is_there(path / ".lock") and is_there(path / "environment.json")
    return begins or is_there(path / "metrics.jsonl") or _has_spans(path)


def _has_spans(path: Path) -> bool:
    telemetry = path / "telemetry"
    return is_closed(telemetry) or any(is_folder(telemetry / name) for name in ("live", "steps"))


def records_spans(path: Path) -> bool:
    """Whether the process of some host writes spans of the run: a loop of somebody else holds no lock of ours."""
    return any(_is_held(writer) for writer in (path / "telemetry" / "live").glob(f"*{WRITER}"))


def is_locked(path: Path) -> bool:
    """Whether a process trains in `path`. The lock is asked for shared, and given back at once."""
    return _is_held(path / ".lock")


def _is_held(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def run_folders(folder: Path, depth: int = 0, closed: list[Path] | None = None, also: str = "") -> Iterator[Path]:
    """Folders of runs; none is looked for inside a run, nor behind links below `folder`, which may lead back.

    Args:
        closed: takes the folders that this user may not look into.
        also: a file by which a folder counts as one, too.
    """
    if is_run(folder) or (also and is_there(folder / also)):
        yield folder
    elif depth < _DEEPEST:
        try:
            inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.is_symlink())
        except OSError as error:
            if closed is not None and isinstance(error, PermissionError):
                closed.append(folder)
            return
        for name in inner:
            yield from run_folders(folder / name, depth + 1, closed, also)


def sort_place(row: RunRow, sort: Sort) -> tuple[bool, Any, str]:
    """Key to sort rows by, as `list_runs` does."""
    value = getattr(row, sort)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return True, 0, row.name
    is_rising = sort in ("name", "state", "loss", "validation_loss")
    return False, value if is_rising else -value, row.name


def _last_evaluation(text: bytes) -> dict[str, Any]:
    """The newest whole line of an evaluation; empty: there is none."""
    end = len(text)
    while (at := text.rfind(_EVALUATION, 0, end)) >= 0:
        begin, stop = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        entry = parse_line(text[begin : stop + 1]) if stop >= 0 else None
        if entry is not None:
            return entry
        end = at
    return {}


def _said(path: Path, tail: Tail) -> str:
    """What the newest start said of its end; empty: nothing, or figures are newer."""
    end = read_table(path / ENDED)
    is_newest = end is not None and written_at(path / ENDED) >= (tail.written or 0)
    return str(end.get("why", "")) if end is not None and is_newest else ""


def _why(path: Path, tail: Tail, kept: Mapping[str, Any], said: str) -> str:
    """Why a run that trains no more ended before its last step, as far as its files tell."""
    if "imported" in kept:
        return str(kept["imported"])
    if said:
        return said
    if (loss := _figure(tail.step, "loss")) is not None and not math.isfinite(loss):
        return f"the loss was {loss} at step {tail.step['step']}"
    refused = path / "out_of_memory.json"
    if (found := read_table(refused)) and written_at(refused) >= (tail.written or 0):
        return f"no memory for a micro-batch of {found.get('micro_batch')} on layout {found.get('layout')}"
    if not tail.step:
        return ""
    step = tail.step["step"]
    if tail.saved is None:
        return "broke off; no checkpoint is named in its last lines"
    if tail.saved >= step:
        return "ended with a checkpoint of its last step"
    return f"broke off {step - tail.saved} step{'s' if step - tail.saved > 1 else ''} after its checkpoint"


def _without_lock(path: Path, here: Sequence[Presence], step: int | None, written: float | None) -> tuple[State, str]:
    """Of a run whose lock nobody holds and of which no rank lives, though ranks have not taken their leave."""
    lives = {presence.life() for presence in here}
    if lives == {"elsewhere"}:
        age = duration(max(time.time() - (written or written_at(path)), 0.0))
        return "unknown", (
            f"cannot tell: it was started on {here[0].host}, and its lock cannot be seen from here; its figures were "
            f"written {age} ago: ask there"
        )
    again = "the same command goes on from its last checkpoint" if step else "start it again"
    culprit = read_culprit(path)
    if culprit is not None and culprit.start == here[0].start:
        return "died", f"{culprit.why}; the launcher ended the others; {again}"
    gone = [presence for presence in here if presence.life() == "gone"]
    is_gone = f"process {gone[0].pid} is gone" if len(here) == 1 else f"all {len(gone)} ranks on this host are gone"
    if here[0].boot_id != boot_id():
        return "died", f"{is_gone}: its host {here[0].host} was started again since; {again}"
    causes = "killed (kill -9, out of memory: see dmesg) or crashed (see its log)"
    return "died", f"{is_gone} without a word; {causes}; {again}"


def _ended_as(path: Path, step: int | None, why: str) -> State:
    """Of a run whose processes have all taken their leave, before its last step."""
    if step is None and not why:
        return "no step yet"
    if why.startswith(("stopped by ", "ended with a checkpoint", "KeyboardInterrupt")):
        return "stopped"
    culprit = read_culprit(path)
    # Where a run broke off, its process left no word of itself either: it is of an older version.
    return "died" if why.startswith("broke off") or (culprit is not None and culprit.why == why) else "failed"


def _total_steps(config: Mapping[str, Any]) -> int | None:
    """Steps of the whole run, as training counts them: given, or from a budget of tokens."""
    try:
        train = config["train"]
        if train.get("steps"):
            return _whole(train["steps"])
        samples: int = math.ceil(train["tokens"] / config["data"]["sequence_length"])
        full: int = train["global_batch"]
        warmup = config["optim"]["batch_warmup"]
        if not warmup["start"]:
            return math.ceil(samples / full)
        # pydantic takes a tenth of a second, and few runs warm their batch up
        from phalanx.optim.config import BatchWarmupConfig
        from phalanx.optim.schedule import steps_for_samples

        return steps_for_samples(BatchWarmupConfig.model_validate(warmup), samples, full)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # of a version that nobody has seen
        return None


def _keep(path: Path, changed: Mapping[str, Any]) -> dict[str, Any]:
    if not is_run(path):
        raise UserError("is not a run", cure="give the folder of a run; `phalanx runs` lists them", value=str(path))
    file = path / "run.json"
    before = read_table(file)
    if before is None and os.path.lexists(file):
        raise UserError("holds no table", cure="repair it, or delete it", value=str(file))
    # What is taken away and stands in the config has to stay away.
    configured = _configured(path)
    kept = {name: value for name, value in {**(before or {}), **changed}.items() if value or configured.get(name)}
    try:
        write_json(file, kept)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise UserError(problem, cure="free space there, or make it writable", value=str(file)) from None
    return configured | kept


def _figure(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    strange = entry.get("not_finite")
    if value is None and isinstance(strange, dict):
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(str(strange.get(name)))
    if isinstance(value, float):
        return value
    return float(value) if type(value) is int and abs(value) < _MOST else None


def _whole(value: Any) -> int | None:
    return int(value) if type(value) in (int, float) and abs(value) < _MOST else None
