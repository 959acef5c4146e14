"""`phalanx simulate network`: what the fabric between hosts does to a step. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, HTML, group, in_words_of

if TYPE_CHECKING:  # NumPy, pydantic and rich take tenths of a second; help pages do without them
    from rich.table import Table

    from phalanx.plan.hardware.cluster import Cluster
    from phalanx.plan.types import Prediction
    from phalanx.simulate.network_scenario import NetworkScenario
    from phalanx.simulate.network_settings import NetworkDescription
    from phalanx.simulate.traffic import Traffic

_EXAMPLES = """\b
Examples:
  phalanx simulate network --cluster megascale --devices 12288
  phalanx simulate network --devices 3072 --placement scattered --congestion dcqcn
  phalanx simulate network configs/plan/gpt-175b.toml --devices 1024 --flap-s 5 --retransmit-timeout 18 --alone
"""

_FABRIC = group(
    click.option("--fabric", type=click.Path(path_type=Path), metavar="FILE", help="A fabric of your own (TOML)."),
    click.option("--hashing", metavar="RULE", help="ecmp, polarised (all switches hash alike), adaptive or ideal."),
    click.option("--queue-pairs", type=int, metavar="N", help="Connections between two NICs, each hashed for itself."),
    click.option("--placement", metavar="RULE", help="packed, pipeline_first or scattered."),
    click.option("--oversubscription", type=float, metavar="RATIO", help="Bandwidth down over up at ToRs: 1, 2, 4."),
    click.option("--aggregation-oversubscription", type=float, metavar="RATIO", help="The same above them."),
    click.option("--uplink-split", type=int, metavar="N", help="Links that a port up is split into; 2: 2 x 200G."),
    click.option("--rails/--no-rails", "rails", default=None, help="NICs of a host on as many ToRs, or on one."),
    click.option("--fabric-hosts", type=int, metavar="N", help="Hosts of the whole fabric, of which the job has some."),
    click.option("--layers", type=int, metavar="2|3", help="Layers of switches."),
)
_TIMERS = group(
    click.option("--congestion", metavar="KIND", help="dcqcn, swift, mixed (both) or none (pauses only)."),
    click.option("--flap-s", type=float, metavar="S", help="A link goes down for so long in the step looked at."),
    click.option("--flap-link", metavar="nic|uplink", help="Which link."),
    click.option("--retransmit-timeout", type=int, metavar="N", help="NCCL_IB_TIMEOUT: 4.096 µs times 2^N."),
    click.option("--retries", type=int, metavar="N", help="NCCL_IB_RETRY_CNT."),
    click.option("--adaptive-retransmit/--no-adaptive-retransmit", default=None, help="Short timers first."),
)
_OUTPUT = group(
    click.option("--scenario", type=click.Path(path_type=Path), metavar="FILE", help="Your own questions (TOML)."),
    click.option("--alone", is_flag=True, help="Only what the options say, no what-ifs."),
    click.option("--draws", type=int, default=8, metavar="N", help="Draws of hashes and places, each a job [8]."),
    click.option("--sources", is_flag=True, help="Also print every number of the network and where it is from."),
    AS_JSON,
    HTML,
)


@click.command(epilog=_EXAMPLES)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--cluster", default="megascale", metavar="NAME|FILE", help="Cluster [megascale].")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Devices; else all of the cluster's.")
@click.option("--traffic", type=click.Path(path_type=Path), metavar="FILE", help="What a step sends (TOML), no CONFIG.")
@_FABRIC
@_TIMERS
@_OUTPUT
@click.help_option("-h", "--help")
def command(
    config: Path | None,
    overrides: tuple[str, ...],
    cluster: str,
    devices: int | None,
    traffic: Path | None,
    fabric: Path | None,
    scenario: Path | None,
    alone: bool,
    draws: int,
    sources: bool,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Predict what the network between hosts does to a step: colliding hashes, placement, congestion, link flaps.

    Without CONFIG and --traffic the job is the 175B model of MegaScale, pipeline 8 x tensor 8 with 6 chunks, a batch
    of 6,144. Options describe the network as it is; below it come usual what-ifs, each a change of one thing.
    """
    from phalanx.plan.hardware.cluster import load_cluster
    from phalanx.simulate.network_scenario import make_scenario
    from phalanx.simulate.network_settings import network_of
    from phalanx.simulate.network_simulation import what_if

    machine = load_cluster(cluster, devices)
    network = network_of(machine, fabric)
    sent = _traffic(config, overrides, traffic, machine)
    with in_words_of({**options, "draws": draws}, _OPTIONS):
        changes = {_OPTION_KEYS.get(name, name): value for name, value in options.items() if value is not None}
        base = make_scenario("this network", network, changes)
        scenarios = _scenarios(base, scenario, alone)
        report = what_if(network, sent, scenarios, draws, curves=as_json or html is not None)
    _show(report, network, sources=sources, as_json=as_json, html=html)


_OPTION_KEYS = {"oversubscription": "tor_oversubscription", "rails": "rail_optimised", "fabric_hosts": "hosts"}
_OPTIONS = {**{key: name for name, key in _OPTION_KEYS.items()}, "timeout_exponent": "retransmit_timeout"}


def _scenarios(base: NetworkScenario, file: Path | None, alone: bool) -> tuple[NetworkScenario, ...]:
    from phalanx.simulate.network_scenario import read_scenarios, usual_scenarios

    if file is not None:
        return read_scenarios(file, base)
    return (base,) if alone else usual_scenarios(base)


def _traffic(config: Path | None, overrides: tuple[str, ...], file: Path | None, cluster: Cluster) -> Traffic:
    from phalanx.core.errors import UserError
    from phalanx.simulate.traffic import read_traffic, traffic_of

    if file is not None:
        if config is not None:
            raise UserError("says what is sent, and so does CONFIG", cure="give one of the two", field="--traffic")
        return read_traffic(file)
    prediction = _usual(cluster) if config is None else _predicted(config, overrides, cluster)
    return traffic_of(prediction, cluster)


def _predicted(config: Path, overrides: tuple[str, ...], cluster: Cluster) -> Prediction:
    from phalanx.api.planning import check_devices, plan_of
    from phalanx.core.config import load
    from phalanx.plan.predict import predict
    from phalanx.train.config import RunConfig

    loaded = load(RunConfig, config, overrides).value
    check_devices(loaded, cluster.devices)
    planned = plan_of(loaded, cluster)
    return predict(planned.job, planned.strategy, cluster)


_USUAL_TENSOR, _USUAL_PIPELINE, _USUAL_BATCH = 8, 8, 6144


def _usual(cluster: Cluster) -> Prediction:
    """The 175B model of MegaScale's table 2, as its program runs it."""
    from phalanx.core.errors import UserError
    from phalanx.plan.predict import predict
    from phalanx.plan.software import MEGASCALE
    from phalanx.plan.types import Job, Model, Strategy

    block = _USUAL_TENSOR * _USUAL_PIPELINE
    if cluster.devices % block or _USUAL_BATCH % (cluster.devices // block):
        cure = f"take {block} times a divisor of {_USUAL_BATCH:,}, or give a CONFIG or --traffic"
        raise UserError("the usual job cannot be spread so", cure=cure, field="--devices", value=cluster.devices)
    model = Model(layers=96, hidden=12288, heads=128, vocab_rows=64000, max_sequence=2048, block="parallel")
    job = Job(model, sequence=2048, global_batch=_USUAL_BATCH, software=MEGASCALE)
    strategy = Strategy(
        pipeline=_USUAL_PIPELINE,
        shard=cluster.devices // block,
        tensor=_USUAL_TENSOR,
        chunks=6,
        schedule="interleaved_1f1b",
        zero=2,
        tensor_overlap="chunked",
        bucket_bytes=0,
    )
    return predict(job, strategy, cluster)


def _show(report: Any, network: NetworkDescription, *, sources: bool, as_json: bool, html: Path | None) -> None:
    if html is not None:
        from phalanx.figures.pages.page_blocks import write_page
        from phalanx.simulate.network_report import network_figures, network_sections

        write_page(html, f"Network of {report.cluster}", network_sections(report), network_figures(report))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1, allow_nan=False))
        return
    from phalanx.cli.tables import make_console, print_page_path
    from phalanx.simulate.network_report import report_text

    console = make_console()
    console.print(report_text(report, width=console.width), highlight=False)
    if sources:
        console.print(_sources(network), highlight=False)
    print_page_path(console, html)


def _sources(network: NetworkDescription) -> Table:
    from phalanx.cli.tables import make_table

    table = make_table("number", "value", "unit", "how known", "source", right=(1,), whole=(0,))
    for key, number in network.numbers.items():
        table.add_row(key, f"{number.value:g}", number.unit, number.mark, number.source)
    return table
