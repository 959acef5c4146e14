"""What one layer costs on one rank: kernels, exchanges, and the host that launches them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from phalanx.plan.communication.context import context
from phalanx.plan.communication.covered import Covered
from phalanx.plan.communication.expert import expert
from phalanx.plan.communication.sharded import sharded
from phalanx.plan.communication.tensor import RowExchange, row_exchange, tensor
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.either import functions
from phalanx.plan.step.weights import of_kind
from phalanx.plan.types import Floats, Job, Strategy, layer_kinds
from phalanx.plan.work.ends import embedding, head
from phalanx.plan.work.layer import layer, slower
from phalanx.plan.work.local import Local, local_of
from phalanx.plan.work.operations import Operation, Passes
from phalanx.plan.work.times import Timed, timed


@dataclass(frozen=True)
class Cost:
    """Seconds of the passes over one micro-batch, by path.

    Attributes:
        exposed: parts that follow each other.
        hidden: what runs beside them.
    """

    exposed: Mapping[str, Passes]
    hidden: Mapping[str, Passes]

    @cached_property
    def total(self) -> Passes:
        """All exposed parts."""
        return Passes.sum(self.exposed.values())


@dataclass(frozen=True)
class Costs:
    """Costs of all pieces of a model: one for each kind of layer, and the ends.

    Attributes:
        kinds: of the layers: keys seen and whether the layer is a mixture.
        layers: for each kind.
    """

    local: Local
    kinds: tuple[tuple[int, bool], ...]
    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost


Known: TypeAlias = MutableMapping[Hashable, Costs]
"""Costs that were worked out for one job on one cluster, by what they depend on."""


def known_costs(job: Job, strategy: Strategy, cluster: Cluster, known: Known) -> Costs:
    """As `costs`, of a strategy with plain numbers; each is worked out once."""
    key = (
        *(strategy.context, strategy.tensor, strategy.expert, strategy.micro_batch, strategy.recompute),
        *(strategy.sequence_parallel, strategy.tensor_overlap, strategy.tensor_chunks, strategy.context_method),
        strategy.shard if strategy.zero == 3 else 0,
    )
    if key not in known:
        known[key] = costs(job, strategy, cluster)
    return known[key]


def costs(job: Job, strategy: Strategy, cluster: Cluster) -> Costs:
    """What the pieces of `job` cost on a rank of `strategy`."""
    local, kinds = local_of(job, strategy), layer_kinds(job.model)
    rows = row_exchange(job, strategy, cluster, local)
    return Costs(
        local=local,
        kinds=kinds,
        layers=tuple(_layer(job, strategy, cluster, local, rows, *kind) for kind in kinds),
        embedding=_end(job, strategy, cluster, embedding(local), rows.scatter_s, rows.gather_s),
        head=_end(job, strategy, cluster, head(local), rows.gather_s, rows.scatter_s),
    )


def _layer(
    job: Job,
    strategy: Strategy,
    cluster: Cluster,
    local: Local,
    rows: RowExchange,
    window: int,
    is_mixture: bool,
) -> Cost:
    kernels = _timed(job, strategy, cluster, slower(layer(local, window, is_mixture), job.added.kernels))
    exchanges = {
        "tensor": tensor(job, strategy, cluster, local, rows),
        "context": context(strategy, cluster, local, kernels.by_path.get("compute/attention", Passes())),
    }
    if is_mixture:
        exchanges["expert"] = expert(strategy, cluster, local)
    if strategy.zero == 3:
        computing = kernels.total + Passes.sum(each.exposed for each in exchanges.values())
        weights = of_kind(job.model, is_mixture, strategy.tensor, strategy.expert).total
        exchanges["data/weights"] = sharded(job, strategy, cluster, weights, computing)
    return _cost(job, cluster, kernels, exchanges)


def _end(
    job: Job,
    strategy: Strategy,
    cluster: Cluster,
    operations: Sequence[Operation],
    forward_s: Floats,
    backward_s: Floats,
) -> Cost:
    """Embedding or head: rows are summed over shares of the vocabulary, or gathered for the last product."""
    exchange = Covered(Passes(forward_s, 0.0, backward_s, 0.0), collectives=Passes(1, 0, 1, 0))
    return _cost(job, cluster, _timed(job, strategy, cluster, operations), {"tensor": exchange})


def _timed(job: Job, strategy: Strategy, cluster: Cluster, operations: Sequence[Operation]) -> Timed:
    return timed(operations, cluster.device, job.precision, strategy.recompute)


def _cost(job: Job, cluster: Cluster, kernels: Timed, exchanges: Mapping[str, Covered]) -> Cost:
    exposed = {**kernels.by_path, **{path: covered.exposed for path, covered in exchanges.items()}}
    hidden = {path: covered.hidden for path, covered in exchanges.items()}
    if cluster.device.kind == "cpu":  # the cores that would compute copy messages meanwhile
        exposed |= {path: covered.exposed + covered.hidden for path, covered in exchanges.items()}
        hidden = {}
    calls = Passes.sum(covered.collectives for covered in exchanges.values())
    exposed["compute/gaps"] = (kernels.launches + calls) * cluster.device.kernel_gap_s
    device = Passes.sum(exposed.values())
    launching_s = cluster.device.launching_s(compiled=job.software.compiled)
    host = (kernels.launches + calls) * (launching_s * job.software.host_factor)
    exposed["compute/host"] = host if cluster.device.kind == "cpu" else _not_covered(host, device)
    return Cost(exposed, hidden)


def _not_covered(host: Passes, device: Passes) -> Passes:
    """How long the device waits for the host that launches its kernels; both kinds of gradients are made in turns."""
    return Passes(
        _more(host.forward, device.forward),
        _more(host.again, device.again),
        _more(host.backward_input + host.backward_weight, device.backward_input + device.backward_weight),
        0.0,
    )


def _more(host_s: Floats, device_s: Floats) -> Floats:
    return functions(host_s, device_s).largest(host_s - device_s, 0.0)
