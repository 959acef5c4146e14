"""Which importer reads what, told by what the files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from phalanx.core.errors import UserError
from phalanx.telemetry.trace_imports.bytedance import is_bytedance_trace, read_bytedance_trace
from phalanx.telemetry.trace_imports.kineto import kineto_rank, read_kineto_trace
from phalanx.telemetry.trace_imports.nccl import is_inspector_file, read_flight_dumps, read_inspector_files
from phalanx.telemetry.trace_imports.nccl_ras import import_ras, is_ras_file
from phalanx.telemetry.trace_imports.rows import ImportedRank, write_imported

Format = Literal["kineto", "bytedance", "flight-recorder", "nccl-inspector", "nccl-ras"]
FORMATS: tuple[Format, ...] = get_args(Format)

_NO_TRACES = (".txt", ".md", ".png", ".yaml", ".yml", ".toml")


def import_traces(sources: Sequence[Path], run: Path, format_: Format | None = None) -> tuple[Format, int, int]:
    """Make a run folder of other people's traces.

    Args:
        sources: files, or folders of them: one for each rank, or one for a whole job.
        run: the folder; must have no telemetry yet, but for what NCCL's RAS says, which is added to it.
        format_: None: by what the files hold.

    Returns:
        The format, how many ranks, and how many spans (of NCCL's RAS: incidents).

    Raises:
        UserError: a file cannot be read, or is none of these formats.
    """
    files = _files(sources)
    chosen = format_ or _format_of(files[0])
    if chosen == "bytedance" and len(files) > 1:
        raise UserError("more than one job trace", cure="import each into a folder of its own", field=str(files[1]))
    try:
        if chosen == "nccl-ras":
            return chosen, *import_ras(files, run)
        if chosen == "bytedance":
            ranks = read_bytedance_trace(files[0])
        elif chosen == "flight-recorder":
            ranks = read_flight_dumps(files)
        elif chosen == "nccl-inspector":
            ranks = read_inspector_files(files)
        else:
            ranks = _kineto(files)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError, RecursionError) as error:
        # files of other tools, which may be torn, edited or of a version that nobody has seen
        problem = f"no whole traces of {chosen} ({type(error).__name__}: {error})"
        raise UserError(problem, cure="leave the file out that is not", field=", ".join(map(str, sources))) from error
    return chosen, len(ranks), write_imported(run, ranks, source=f"{chosen}: {', '.join(map(str, sources))}")


def _kineto(files: Sequence[Path]) -> dict[int, ImportedRank]:
    ranks: dict[int, ImportedRank] = {}
    for number, path in enumerate(files):
        trace = read_kineto_trace(path)
        if trace is None:
            raise UserError("is not a trace of PyTorch's profiler", cure="leave it out", field=str(path))
        rank, found = kineto_rank(trace, path, number)
        if rank in ranks:
            raise UserError(f"is a second trace of rank {rank}", cure="give one for each rank", field=str(path))
        ranks[rank] = found
    return ranks


def _files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise UserError("is not there", cure="give a file or folder", field=str(source))
        inside = sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else [source]
        found += [path for path in inside if source.is_file() or _may_be_trace(path)]
    if not found:
        raise UserError("holds no traces", cure="give a file or folder of traces", field=", ".join(map(str, sources)))
    return found


def _may_be_trace(path: Path) -> bool:
    return path.suffix not in (*_NO_TRACES, ".log") and path.name != "LICENSE" and not path.name.startswith(".")


def _format_of(path: Path) -> Format:
    if is_bytedance_trace(path):
        return "bytedance"
    with path.open("rb") as file:
        begin = file.read(2)
    if begin[:1] == b"\x80":  # a pickle's first instruction
        return "flight-recorder"
    if is_ras_file(path):
        return "nccl-ras"
    if is_inspector_file(path):
        return "nccl-inspector"
    if begin == b"\x1f\x8b" or begin[:1] in (b"{", b"["):
        return "kineto" if read_kineto_trace(path) is not None else "flight-recorder"
    raise UserError("is of no format that is known", cure=f"give traces of {', '.join(FORMATS)}", field=str(path))
