"""`phalanx faults`: what goes wrong on purpose, and how well `phalanx run` handles it. Its help imports only click."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Make things go wrong in a known way, and judge how well `phalanx run` handles them; see docs/faults.md."""


@command.command()
@click.argument("manifests", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="MANIFEST …")
@click.option("--folder", type=click.Path(path_type=Path), default="campaign", show_default=True, help="For results.")
@click.option("--guard", default=600.0, show_default=True, metavar="SECONDS", help="Until a case is ended.")
@click.option("--resume", is_flag=True, help="Leave out cases that have a result in the folder.")
@click.option("--keep", is_flag=True, help="Keep the folders of the runs.")
def run(manifests: tuple[Path, ...], folder: Path, guard: float, resume: bool, keep: bool) -> None:
    """Run each case with the real `phalanx run` on this machine, judge it and print a table.

    A MANIFEST is a JSON file: what goes wrong, and what is right. Exit status 1: a case was not right.
    """
    from rich.console import Console  # not before: help comes without what these import

    from phalanx.core.errors import UserError
    from phalanx.faults.case_manifest import load
    from phalanx.faults.referee import Results
    from phalanx.run.campaign.case_run import run_cases, show_results

    if not guard >= 1:  # nan, too
        raise UserError("is no time to run a case in", cure="give seconds, such as 600", field="--guard", value=guard)
    if folder.exists() and not folder.is_dir():
        raise UserError("is not a folder", cure="give another place for results", field="--folder", value=str(folder))
    cases = []
    files: dict[str, Path] = {}
    for path in manifests:
        case = load(path)
        if case.id in files:
            cure = "give each manifest an id of its own: results are kept by it"
            raise UserError(f"{path} has the id of {files[case.id]}", cure=cure, field="id", value=case.id)
        files[case.id] = path
        cases.append(case)
    todo = Results(folder).pending(cases) if resume else cases
    console = Console(emoji=False, width=None if sys.stdout.isatty() else 132)
    run_cases(todo, folder, guard_s=guard, keep=keep, console=console)
    sys.exit(0 if show_results(cases, folder, console) else 1)
