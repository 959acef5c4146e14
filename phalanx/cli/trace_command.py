"""`phalanx trace`: what every rank of a run did and when, and what that says. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, NewFile, StepRange

if TYPE_CHECKING:  # DuckDB, Arrow and rich take tenths of a second; help pages do without them
    from rich.console import Console

    from phalanx.telemetry.queries import Trace

_EXAMPLES = """\b
Examples:
  phalanx trace summary runs/shakespeare
  phalanx trace slow runs/big --steps 1000:1100
  phalanx trace compare runs/before runs/after
  phalanx trace report runs/big --out big.html
  phalanx trace export runs/big timeline.json.gz --steps 120:122 --ranks 0-7 --groups pipeline
  phalanx trace import traces/ runs/imported
  phalanx trace sql runs/big "select rank, max(end_ns - start_ns) from spans where kind = 'forward' group by rank"
"""


class _Ranks(click.ParamType):
    """``0-7,64``."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """All of them, in order."""
        if not isinstance(value, str):
            return value
        ranks: set[int] = set()
        try:
            for part in value.split(","):
                first, dash, last = part.partition("-")
                ranks |= set(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            self.fail(f"{value!r} are no ranks; give some such as 0-7,64", param, ctx)
        return sorted(ranks)


class _Run(click.ParamType):
    """A folder, or a URL of object storage, which stays as it is."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Path:
        """A path, or the URL."""
        return value if isinstance(value, Path) or "://" in str(value) else Path(str(value))


_STEPS = click.option("--steps", type=StepRange(), default=(None, None), metavar="A:B", help="Only these [all].")
_RUN = click.argument("run", type=_Run())


@click.group(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """See what every rank did and when: where a step's time went, who is slow, what changed, one merged timeline.

    RUN is the folder of a run whose ranks wrote spans, also while it goes on, or its URL, such as s3://bucket/run (see
    docs/trace.md).
    """


@command.command()
@_RUN
@_STEPS
@AS_JSON
def summary(run: str | Path, steps: tuple[int | None, int | None], as_json: bool) -> None:
    """Where the time of a step went, what communication cost, which rank is slow."""
    from phalanx.telemetry.queries import Trace
    from phalanx.telemetry.summaries import summarize

    found = summarize(Trace.open(run), *steps)
    if as_json:
        _print_json(found)
        return
    from phalanx.cli.tables import make_console

    _show_summary(make_console(), found)


@command.command()
@_RUN
@_STEPS
@click.option(
    "--excess", type=click.FloatRange(0.001), default=0.05, metavar="X", help="That makes a rank slow [0.05]."
)
@click.option("--most", type=click.IntRange(1), default=10, metavar="N", help="Ranks to show [10].")
@AS_JSON
def slow(run: str | Path, steps: tuple[int | None, int | None], excess: float, most: int, as_json: bool) -> None:
    """Rank the ranks by their own time against the median of those of the same pipeline stage.

    Waiting for others is not their own time. It says nothing where there are fewer than 3 ranks of a stage or 5 steps.
    """
    from phalanx.telemetry.queries import Trace
    from phalanx.telemetry.slow_ranks import find_slow_ranks

    trace = Trace.open(run)
    found = find_slow_ranks(trace, *steps, excess=excess)
    lost = trace.lost()
    if as_json:
        ranks = {"slow": found.slow, "abstains": found.abstains, "ranks": found.ranked[:most]}
        _print_json({"verdict": found.verdict, **ranks, **lost.as_json(), "lost": lost.sentences})
        return
    from phalanx.cli.tables import make_console, make_table, printable

    console = make_console()
    table = make_table(
        "rank", "host", "stage", "steps", "own s", "stage's s", "excess", "forward s", "backward s", "waits s",
        right=(0, 2, 3, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip
    for row in found.ranked[:most]:
        seconds = (f"{row[f'{name}_s']:.4g}" for name in ("forward", "backward", "wait"))
        own = (str(row["steps"]), f"{row['own_s']:.4g}", f"{row['peers_s']:.4g}", f"{row['excess']:+.1%}")
        table.add_row(str(row["rank"]), row["host"], str(row["stage"]), *own, *seconds)
    for line in (found.verdict, *(["; ".join(found.abstains)] if found.slow and found.abstains else [])):
        console.print(printable(line), highlight=False, markup=False)
    _show_lost(console, lost.sentences)
    if found.ranked:
        console.print(table)


@command.command()
@click.argument("run_a", type=_Run())
@click.argument("run_b", type=_Run())
@_STEPS
@AS_JSON
def compare(run_a: str | Path, run_b: str | Path, steps: tuple[int | None, int | None], as_json: bool) -> None:
    """Put two runs side by side: the step, each part of it, exposed communication by group; what grew comes first."""
    from phalanx.telemetry.queries import Trace
    from phalanx.telemetry.summaries import compare as compare_runs

    traces = Trace.open(run_a), Trace.open(run_b)
    found = compare_runs(*traces, *steps)
    _say_lost(*traces)
    if as_json:
        _print_json(found)
        return
    from phalanx.cli.tables import make_console, make_table

    console = make_console()
    console.print(found["verdict"], highlight=False, markup=False)
    table = make_table("seconds of a step", "A", "B", "B - A", "change", right=(1, 2, 3, 4))
    step = found["step_s"]
    whole = {"what": "step (slowest rank)", "a_s": step["a"], "b_s": step["b"], **step}
    exposed = [{**row, "what": f"waiting: {row['what']}"} for row in found["exposed"]]
    for row in (whole, *found["parts"], *exposed):
        change = "new" if row["change"] is None else f"{row['change']:+.1%}"
        table.add_row(row["what"], f"{row['a_s']:.4g}", f"{row['b_s']:.4g}", f"{row['change_s']:+.4g}", change)
    console.print(table)


@command.command()
@_RUN
@_STEPS
@click.option("--out", type=NewFile(), metavar="FILE", help="Where to [RUN's name and -report.html, here].")
def report(run: str | Path, steps: tuple[int | None, int | None], out: Path | None) -> None:
    """Write one page to attach to a mail: the verdict, what it rests on, what to do next.

    It is one HTML file of about 2 MB that needs nothing else. Where evidence is missing it abstains, and says what is
    missing and how to get it.
    """
    from phalanx.dashboard.job_history import history_in
    from phalanx.figures.pages.run_report import write_report

    name = Path(os.path.realpath(run)).name if isinstance(run, Path) else run.rstrip("/").rpartition("/")[2]
    path = out or NewFile().convert(f"{name}-report.html", None, None)
    told = history_in(run) if isinstance(run, Path) else None
    verdict = write_report(run, path, *steps, told=told)
    click.echo(verdict.sentence)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


@command.command()
@_RUN
@click.argument("path", type=click.Path(path_type=Path))
@_STEPS
@click.option("--ranks", type=_Ranks(), metavar="0-7,64", help="Only these [all].")
@click.option("--groups", metavar="A,B", help="Communication of these groups only, such as pipeline [all].")
@click.option("--per-rank", is_flag=True, help="PATH is a folder: a file for each rank as Kineto writes them.")
def export(
    run: str | Path,
    path: Path,
    steps: tuple[int | None, int | None],
    ranks: Sequence[int] | None,
    groups: str | None,
    per_rank: bool,
) -> None:
    """Write one timeline of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing.

    PATH ending in .gz is packed. Arrows lead from sends to their receives.
    """
    from phalanx.telemetry.perfetto import export_per_rank, export_timeline
    from phalanx.telemetry.queries import Trace

    trace, chosen = Trace.open(run), None if groups is None else groups.split(",")
    if per_rank:
        files = export_per_rank(trace, path, *steps, ranks=ranks, groups=chosen)
        click.echo(f"{len(files)} rank{'' if len(files) == 1 else 's'}: {path}")
    else:
        NewFile().convert(path, None, None)
        count = export_timeline(trace, path, *steps, ranks=ranks, groups=chosen)
        click.echo(f"{count} spans: {path}")
    _say_lost(trace)


@command.command("import")
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["kineto", "bytedance", "flight-recorder", "nccl-inspector", "nccl-ras"]),
    help="Of the files [by what they hold].",
)
def import_(sources: Sequence[Path], run: Path, format_: Any) -> None:
    """Make a run folder RUN of other tools' traces, on which all questions work.

    SOURCES are files or folders: PyTorch profiler (Kineto) traces, one for each rank; dumps of NCCL's flight recorder;
    NCCL Inspector's JSON; a job trace of ByteDance's straggler study (Parquet). Answers of ncclras, text or JSON, are
    added to RUN as incidents and communicators.
    """
    from phalanx.telemetry.trace_imports.importing import import_traces

    chosen, ranks, spans = import_traces(sources, run, format_)
    if chosen == "nccl-ras":
        click.echo(f"{chosen}: {spans} incident{'' if spans == 1 else 's'}, {ranks} ranks: {run}")
        return
    click.echo(f"{chosen}: {spans} spans of {ranks} rank{'' if ranks == 1 else 's'}: {run}")


@command.command()
@_RUN
@click.argument("query")
@_STEPS
@click.option("--most", type=click.IntRange(1), default=1000, metavar="N", help="Rows to show [1000].")
@AS_JSON
def sql(run: str | Path, query: str, steps: tuple[int | None, int | None], most: int, as_json: bool) -> None:
    """Ask anything in DuckDB's SQL, read-only.

    Tables: spans, aligned_spans, phases, steps, counters, groups, stages, clocks, incidents, communicators, metrics.
    """
    from phalanx.telemetry.queries import Trace

    trace = Trace.open(run)
    found = trace.sql(query, *steps)
    _say_lost(trace)
    rows = found.slice(0, most).to_pylist()
    if as_json:
        _print_json({"columns": found.column_names, "rows": rows, "more": max(0, len(found) - most)})
        return
    from phalanx.cli.tables import make_console, make_table

    console, table = make_console(), make_table(*found.column_names)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table, markup=False)
    if len(found) > most:
        console.print(f"{len(found) - most} more rows: --most N shows them")


def _show_lost(console: Console, sentences: Sequence[str]) -> None:
    from phalanx.cli.tables import printable

    for line in sentences:  # paths in it may be copied whole
        console.print(printable(f"lost: {line}"), highlight=False, markup=False, soft_wrap=True)


def _say_lost(*traces: Trace) -> None:
    """Beside the answer, which others may read: what is not in it."""
    from phalanx.cli.tables import printable

    for trace in traces:
        for line in trace.lost().sentences:
            click.echo(printable(f"lost: {line}"), err=True)


def _show_summary(console: Console, found: dict[str, Any]) -> None:
    from phalanx.cli.tables import make_table, printable

    def write(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False)

    step, parts = found["step_s"], found["breakdown"]
    write(
        f"steps {found['first_step']} to {found['last_step']} ({found['steps']}), {found['ranks']} ranks on"
        f" {found['hosts']} hosts, {found['spans']} spans\n"
        f"step {step['median']:.4g} s in the median (fastest {step['fastest']:.4g}, slowest {step['slowest']:.4g}),"
        f" {parts['step']:.4g} s in the mean\n"
        f"{found['slow']['verdict']}"
    )
    _show_lost(console, found["lost"])
    write("")
    table = make_table("the mean step went on", "s", "share", right=(1, 2))
    for kind, seconds in parts.items():
        if seconds or kind in ("wait", "other"):
            name = {"wait": "exposed communication", "other": "between spans"}.get(kind, kind)
            table.add_row(name, f"{seconds:.4g}", f"{seconds / parts['step']:.1%}" if parts["step"] else "")
    console.print(table)
    if between := found["between"]:
        write(f"counted twice: {between['twice_s'] / between['step_s']:.2%} of the step")
    if found["exposed"]:
        table = make_table("communication", "runs s", "exposed s", "of the step", "MB", right=(1, 2, 3, 4))
        for row in found["exposed"]:
            seconds = (f"{row['running_s']:.4g}", f"{row['exposed_s']:.4g}", f"{row['share_of_step']:.1%}")
            table.add_row(row["group"] or "(no group)", *seconds, f"{row['bytes_per_step'] / 1e6:.4g}")
        write("")
        console.print(table)
    if found["bubble"]:
        table = make_table("stage", "ranks", "computes s", "waits s", "bubble", right=(0, 1, 2, 3, 4))
        for row in found["bubble"]:
            seconds = (f"{row['compute_s']:.4g}", f"{row['waited_s']:.4g}", f"{row['bubble']:.1%}")
            table.add_row(str(row["stage"]), str(row["ranks"]), *seconds)
        write("")
        console.print(table)
    if found["skew"]:
        table = make_table(
            "launch skew", "collectives", "mean s", "largest s", "due to", "clocks ± s", right=(1, 2, 3, 5)
        )
        for row in found["skew"]:
            often = f"rank {row['last_rank']}: {row['last_share']:.0%} of it"
            error = "unknown" if row["error_s"] is None else f"{row['error_s']:.2g}"
            times = (f"{row['mean_s']:.4g}", f"{row['largest_s']:.4g}")
            table.add_row(row["group"] or "(no group)", str(row["collectives"]), *times, often, error)
        write("")
        console.print(table)
    if mfu := found["mfu"]:
        write(
            f"\nMFU {mfu['begin']:.1%} at the beginning, {mfu['middle']:.1%} in the middle, {mfu['end']:.1%} at the end"
        )
    for one in found["incidents"][-10:]:
        write(f"incident at step {'?' if one['step'] is None else one['step']}: {one['kind']}")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=str))
