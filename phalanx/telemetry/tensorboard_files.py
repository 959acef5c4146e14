"""TensorBoard's event files: the scalars of one run, which may lie in several folders.

TensorBoard takes each folder for a run of its own; Keras and others write one run into ``train`` and ``validation``,
with the same tags in both. Such a folder gives its figures their place: ``loss`` of ``validation`` is
``validation/loss``. The same tag in folders that are not called so is of several runs, of which none is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import open_regular

PLACES = {
    "train": "", "training": "",
    "validation": "validation", "valid": "validation", "val": "validation", "eval": "validation",
    "evaluation": "validation", "test": "test",
}  # fmt: skip
"""What a folder of this name holds figures of: by the place that their names get."""

WALL_TIME = "wall_time"


@dataclass
class _Scalars:
    """Of one place of a run.

    Attributes:
        rows: figures by tag, by step.
        wall_times: seconds since 1970, by step.
        owners: which folder a tag is from.
    """

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    wall_times: dict[int, float] = field(default_factory=dict)
    owners: dict[str, Path] = field(default_factory=dict)

    def forget(self, step: int) -> None:
        """What a later start did again, as TensorBoard does."""
        for table in (self.rows, self.wall_times):
            for kept in [kept for kept in table if kept >= step]:
                del table[kept]


def read_event_files(
    sources: Sequence[tuple[Path, Sequence[Path]]],
    *,
    name_of: Callable[[str], str],
    is_step: Callable[[float], bool],
    say: Callable[[str], None],
) -> dict[int, dict[str, float]]:
    """The figures of one run by name, by step.

    Args:
        sources: files or folders that were given, and the event files of each; what is given later counts more.
        name_of: what a tag is called here.
        is_step: whether a number counts a step.
        say: called with a line for what is left out.

    Raises:
        UserError: a file cannot be read, folders below one source are of several runs, or TensorBoard is not installed.
    """
    places: dict[str, _Scalars] = {}
    folders = {path.parent.resolve() for _, files in sources for path in files}
    for source, files in sources:
        for scalars in places.values():
            scalars.owners.clear()  # who gives two sources says that they are of one run
        own = source.resolve() if source.is_dir() else source.parent.resolve()
        for path in files:
            folder = path.parent.resolve()
            is_alone = folder == own and (len(sources) == 1 or len(folders) == 1)
            place = "" if is_alone else PLACES.get(folder.name.lower(), "")
            _take(path, folder, places.setdefault(place, _Scalars()), is_step, say)
    return _named(places, name_of)


def _take(
    path: Path, folder: Path, scalars: _Scalars, is_step: Callable[[float], bool], say: Callable[[str], None]
) -> None:
    """Add what one file holds."""
    read: dict[str, list[tuple[int, float, float]]] = {}
    repeated: Counter[str] = Counter()
    for step, wall_time, tag, value in _events(path):
        if tag is None:
            scalars.forget(step)
            for values in read.values():
                values[:] = [one for one in values if one[0] < step]
        else:
            read.setdefault(tag, []).append((step, wall_time, value))
    for tag, values in read.items():
        steps = {step for step, _, _ in values}
        if len(values) > 1 and steps == {0}:
            say(f"{path.name}: {tag!r}: {len(values)} values were written without a step; left out")
            continue
        if strange := [step for step in steps if not is_step(step)]:
            say(f"{path.name}: {tag!r}: {strange[0]} counts no steps, nor do {len(strange) - 1} more of it; left out")
            values = [one for one in values if is_step(one[0])]
        repeated[tag] = len(values) - len({step for step, _, _ in values})
        if values and scalars.owners.setdefault(tag, folder) != folder:
            raise _several(tag, scalars.owners[tag], folder)
        for step, wall_time, value in values:
            scalars.rows.setdefault(step, {})[tag] = value
            scalars.wall_times.setdefault(step, wall_time)
    if again := +repeated:
        tag, count = again.most_common(1)[0]
        more = f", nor are those of {len(again) - 1} more tags" if len(again) > 1 else ""
        say(f"{path.name}: {tag!r}: of a step that has several values the last one counts; {count} are left out{more}")


def _several(tag: str, first: Path, second: Path) -> UserError:
    problem = f"holds several runs: {first.name} and {second.name} both have {tag!r}"
    cure = "import each into a folder of its own; of one run that went on, give its folders one by one"
    return UserError(problem, cure=cure, value=str(second.parent))


def _named(places: dict[str, _Scalars], name_of: Callable[[str], str]) -> dict[int, dict[str, float]]:
    """All of a run: of tags that would have one name here, the first gets it, and others keep theirs."""
    rows: dict[int, dict[str, float]] = {}
    taken: set[str] = set()
    for place in sorted(places, key=["", *dict.fromkeys(filter(None, PLACES.values()))].index):
        scalars, names = places[place], dict[str, str]()
        for step, figures in scalars.rows.items():
            for tag, value in figures.items():
                if tag not in names:
                    whole = f"{place}/{tag}" if place and PLACES.get(_first_word(tag), "") == "" else tag
                    ours = name_of(whole)
                    names[tag] = ours if ours not in taken else whole
                    taken.add(names[tag])
                rows.setdefault(step, {})[names[tag]] = value
            rows[step].setdefault(WALL_TIME, scalars.wall_times[step])
    return rows


def _first_word(tag: str) -> str:
    return tag.lower().replace("_", "/").partition("/")[0]


def _events(path: Path) -> Iterator[tuple[int, float, str | None, float]]:
    """Step, seconds since 1970, tag and value of each scalar; a tag that is None: a start that goes on at the step."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        problem = f"event files need a package that is not installed ({error})"
        raise UserError(problem, cure="run: pip install 'phalanx-train[tensorboard]'", field=str(path)) from None
    try:
        open_regular(path).close()
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    is_one = False
    try:
        for event in EventFileLoader(str(path)).Load():
            is_one = True
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                yield int(event.step), 0.0, None, 0.0
            for value in event.summary.value if event.HasField("summary") else ():
                if value.metadata.plugin_data.plugin_name == "scalars":
                    figure = float(make_ndarray(value.tensor).item())
                    yield int(event.step), float(event.wall_time), value.tag, figure
    except Exception as error:  # its reader raises what it likes on files that are none
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    if not is_one:  # the first record of each file says its version
        packed = path.suffix in (".gz", ".zip", ".xz", ".bz2", ".zst")
        raise _unreadable(path, "it is packed: unpack it first" if packed else "no record of events is in it")


def _unreadable(path: Path, why: Any) -> UserError:
    return UserError(f"cannot be read ({why})", cure="give an event file of TensorBoard", field=str(path))
