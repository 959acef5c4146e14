"""`phalanx detect logs`: why a job failed, by the lines of all its ranks, and which host they point to."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phalanx.cli.options import AS_JSON, NewFile


@click.command("logs")
@click.argument("places", nargs=-1, type=click.Path(path_type=Path), metavar="PLACE…")
@click.option(
    "--healthy",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PLACE",
    help="Logs of a job that ended well: its lines are no news.",
)
@click.option(
    "--rules", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Your rules, tried before ours."
)
@click.option(
    "--window", "window_s", type=float, metavar="SECONDS", help="How long before the end a cause may lie (3600)."
)
@click.option(
    "--learn",
    "labels",
    type=click.Path(path_type=Path),
    metavar="LABELS",
    help="Learn rules from labelled incidents instead.",
)
@click.option("--out", type=NewFile(), metavar="FILE", help="Where --learn writes its rules.")
@AS_JSON
def command(
    places: tuple[Path, ...],
    healthy: tuple[Path, ...],
    rules: tuple[Path, ...],
    window_s: float | None,
    labels: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Why a job failed, by the lines of all its ranks.

    PLACE is the folder of a run or of a job of `phalanx run`, torchrun's --log-dir, or any folder or files with logs of
    ONE job; kernel logs beside them (kern.log, dmesg) help. Prints the class of failure, the first line that shows it,
    and the host that it points to.
    """
    from phalanx.core.errors import UserError

    if labels is not None:
        _learn(labels, out)
        return
    if not places:
        raise UserError("no logs are given", cure="give the folder of a run, or files", field="PLACE")
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.logs.log_judge import LogPolicy
    from phalanx.detect.logs.run_logs import judge_places

    policy = LogPolicy() if window_s is None else LogPolicy(window_s=window_s)
    verdict = judge_places(places, policy, rules=rules, healthy=healthy)
    sys.exit(write_verdict(verdict, as_json=as_json))


def _number(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"


def _learn(labels: Path, out: Path | None) -> None:
    from collections import Counter

    from phalanx.core.errors import UserError
    from phalanx.detect.logs.learnt_rules import learn_rules, read_labels, write_rules

    if out is None:
        raise UserError("--learn has nowhere to write", cure="add --out rules.toml", field="--out")
    incidents = read_labels(labels)
    refused: Counter[str] = Counter()
    rules = learn_rules(incidents, refused=refused)
    if not rules:
        reasons = [f"{count:,} of the templates {why}" for why, count in refused.most_common()]
        reasons = reasons or [
            "no incident has a line after its last step that its class's rules do not explain already"
        ]
        click.echo(f"no rule was learnt from {_number(len(incidents), 'labelled job')}, and nothing was written")
        click.echo("\n".join(f"  {reason}" for reason in reasons))
        sys.exit(3)
    write_rules(out, rules)
    learnt = f"{_number(len(rules), 'rule')} of {_number(len({rule.kind for rule in rules}), 'class', 'es')}"
    click.echo(f"{learnt} learnt from {_number(len(incidents), 'labelled job')}: {out}")
