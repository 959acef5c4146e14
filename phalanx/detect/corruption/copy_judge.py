"""Silent data corruption: which rank holds other bits than its peers, or computes other bits from the same batch.

    verdict = judge_run(Path("runs/mine"))

Copies of a tensor are equal bit by bit in a healthy run: after gradients are reduced, replicas make the same update
from the same numbers. So one rank that holds other bits than most of those with the same part has lost some, in memory
or in arithmetic. So it is with a micro-batch that several ranks compute. Of two that differ nobody can say which is
right: that is reported, and nobody is blamed. Nor is anybody where ranks compute otherwise than their peers (another
library, device or number of threads), since then rounding is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.detect.corruption.digest_file import (
    FILE,
    QUANTITIES,
    RecomputedStep,
    StepDigests,
    UnlikeCopies,
    UnlikeReplays,
    read_records,
)
from phalanx.detect.detection import Advice, Culprit, Detection, JudgeVerdict, Onset
from phalanx.telemetry.run_access import is_there
from phalanx.telemetry.run_list import is_run

NAME = "corruption"

_SHOWN = 3


class CorruptionPolicy(Config):
    """Numbers of this judge."""

    evict_after: int = Field(
        2, ge=1, description="starts of a run in which a host is named until its eviction is advised; before, a check"
    )


@dataclass(frozen=True)
class CorruptionEvidence:
    """What ranks have compared.

    Attributes:
        checked: steps whose digests were compared, ascending.
        compared: tensors with copies on other ranks, at most, in one of these steps.
        layout: of the run when it was checked last, such as ``dp4``; empty: never was.
        unlike: what differed, in the order of steps.
        recomputed: steps that were computed twice and gave two results.
        equal: start and step where all copies were equal.
    """

    checked: tuple[int, ...] = ()
    compared: int = 0
    layout: str = ""
    unlike: tuple[UnlikeCopies | UnlikeReplays, ...] = ()
    recomputed: tuple[RecomputedStep, ...] = ()
    equal: tuple[tuple[int, int], ...] = ()


def judge_run(run: Path, policy: CorruptionPolicy | None = None) -> JudgeVerdict:
    """The verdict on a run by the digests in its folder.

    Raises:
        UserError: there is no such run.
    """
    # a job of `phalanx run` may hold no run of ours: then there are no digests, and that is said
    if not any(is_there(run / name) for name in (FILE, "config.json", "job.json")) and not is_run(run):
        raise UserError("is no run", cure="give the folder of a run; `phalanx runs` lists them", field=str(run))
    return judge_corruption(read_evidence(run), policy or CorruptionPolicy())


def read_evidence(run: Path) -> CorruptionEvidence:
    """From ``telemetry/digests.jsonl`` of a run."""
    checked: dict[int, StepDigests] = {}
    unlike: list[UnlikeCopies | UnlikeReplays] = []
    recomputed: list[RecomputedStep] = []
    equal: list[tuple[int, int]] = []
    for record in read_records(run):
        if isinstance(record, StepDigests):
            checked[record.step] = record
            if record.compared and not record.unlike:
                equal.append((record.start, record.step))
        elif isinstance(record, RecomputedStep):
            recomputed.append(record)
        else:
            unlike.append(record)
    layout = next((record.layout for record in reversed(checked.values())), "")
    compared = max((record.compared for record in checked.values()), default=0)
    return CorruptionEvidence(tuple(sorted(checked)), compared, layout, tuple(unlike), tuple(recomputed), tuple(equal))


def judge_corruption(evidence: CorruptionEvidence, policy: CorruptionPolicy) -> JudgeVerdict:
    """Who is to blame for state that differs."""
    steps = evidence.checked
    differed = bool(evidence.unlike or evidence.recomputed)
    if not steps and not differed:
        cure = "set telemetry.digests_every to a number of steps that the run makes"
        return JudgeVerdict(NAME, abstains=(f"no digests in {FILE}; {cure}",))
    looked_at = f"{len(steps)} checked {'step' if len(steps) == 1 else 'steps'}"
    looked_at += f" up to step {steps[-1]:,}" if steps else ""
    looked_at += f", {evidence.compared} tensors with copies on other ranks (layout {evidence.layout})"
    if not differed and not evidence.compared:
        return JudgeVerdict(NAME, abstains=(_without_copies(evidence.layout),), looked_at=looked_at)
    findings = [finding for record in evidence.unlike for finding in _findings(record)]
    detections = [
        *_of_ranks(findings, policy, evidence),
        *_of_nobody(findings, evidence),
        *_of_steps(evidence.recomputed),
    ]
    return JudgeVerdict(NAME, tuple(detections), looked_at=looked_at, tables={"unlike": _table(findings)})


def _without_copies(layout: str) -> str:
    where = f"in the layout {layout} " if layout not in ("", "1") else "with one rank "
    return (
        f"{where}no rank holds a copy of what another holds; spread the run with parallel.replicate = 3 or more, or "
        "have micro-batches computed twice (telemetry.replay_every)"
    )


@dataclass(frozen=True)
class _Finding:
    """One tensor, or micro-batch, whose bits are not the same everywhere."""

    record: UnlikeCopies | UnlikeReplays
    title: str  # of what differs
    digests: Mapping[int, str]  # by rank
    named: tuple[int, ...]  # by strict majority; empty: nobody
    doubt: str = ""  # why nobody is named
    tensor: str = field(default="", compare=False)


def _findings(record: UnlikeCopies | UnlikeReplays) -> Iterator[_Finding]:
    if isinstance(record, UnlikeCopies):
        title = f"{record.quantity} {record.tensor}"
        yield _Finding(record, title, record.digests, *_minority(record, record.digests), tensor=record.tensor)
        return
    for owner, digests in record.digests.items():
        if len(set(digests.values())) > 1:
            title = f"loss and gradients of a micro-batch of rank {owner}"
            yield _Finding(record, title, digests, *_minority(record, digests))


def _minority(record: UnlikeCopies | UnlikeReplays, digests: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """Who holds something else than the strict majority; and why it is nobody."""
    if len({record.programs.get(rank, "") for rank in digests}) > 1:
        return (), "these ranks do not compute alike (libraries, device or threads differ), so rounding may be enough"
    if len(digests) == 2:
        return (), "of two copies nobody can say which is right"
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return (), f"no digest is that of most of the {len(digests)} ranks"
    return tuple(rank for rank, own in sorted(digests.items()) if own != digest), ""


def _of_ranks(
    findings: Sequence[_Finding], policy: CorruptionPolicy, evidence: CorruptionEvidence
) -> Iterator[Detection]:
    """One detection for each rank that is named, that of most starts first."""
    by_rank: dict[tuple[int, str], list[_Finding]] = {}
    for finding in findings:
        for rank in finding.named:
            by_rank.setdefault((rank, finding.record.hosts.get(rank, "")), []).append(finding)
    for (rank, host), mine in sorted(by_rank.items(), key=lambda item: -len(_starts(item[1]))):
        yield _of_rank(rank, host, mine, policy, evidence)


def _of_rank(
    rank: int, host: str, mine: Sequence[_Finding], policy: CorruptionPolicy, evidence: CorruptionEvidence
) -> Detection:
    first, where = mine[0], f"rank {rank}" + (f" on host {host}" if host else "")
    at_first = [finding for finding in mine if finding.record.step == first.record.step]
    peers = len(first.digests) - len(first.named)
    is_replay = isinstance(first.record, UnlikeReplays)
    does = "computes" if is_replay else "holds"
    starts = len(_starts(mine))
    advice: Advice = "evict" if starts >= policy.evict_after else "check"
    agreed = first.record.agreed
    why = [
        f"{_some(at_first)} at step {first.record.step:,}: {peers} of {len(first.digests)} ranks have the same bits, "
        f"{where} has others",
        f"all copies were equal at step {agreed:,}" if agreed >= 0 else "no check before it in this start was equal",
    ]
    if starts > 1:
        why.append(f"it was named in {starts} starts of the run")
    machine = host or f"the host of rank {rank}"
    return Detection(
        what="silent corruption",
        sentence=f"{where} {does} other bits than {peers} of its {len(first.digests) - 1} peers ({_some(at_first)})",
        who=(Culprit("rank", str(rank), (rank,), (host,) if host else ()),),
        since=Onset(first.record.unix_s, first.record.step),
        confidence=0.99 if agreed >= 0 or is_replay else 0.9,
        why=tuple(why),
        then=(
            f"take {machine} out of the job" if advice == "evict" else f"run `phalanx check` on {machine}",
            _go_on(first.record, mine[-1].record, evidence),
        ),
        advice=advice,
        figures={"step": first.record.step, "last_agreed_step": agreed, "tensors": len(at_first), "starts": starts},
    )


def _of_nobody(findings: Sequence[_Finding], evidence: CorruptionEvidence) -> Iterator[Detection]:
    """What differs without a majority: one detection for each set of ranks and reason."""
    groups: dict[tuple[tuple[int, ...], str], list[_Finding]] = {}
    for finding in findings:
        if not finding.named:
            groups.setdefault((tuple(sorted(finding.digests)), finding.doubt), []).append(finding)
    for (ranks, doubt), mine in groups.items():
        first = mine[0].record
        at_first = [finding for finding in mine if finding.record.step == first.step]
        hosts = tuple(dict.fromkeys(filter(None, (first.hosts.get(rank, "") for rank in ranks))))
        alike = len({first.programs.get(rank, "") for rank in ranks}) <= 1
        on = f" on {', '.join(hosts)}" if hosts else ""
        check = f"run `phalanx check`{on}: one of the ranks is wrong" if alike else "start ranks alike, then look again"
        agreed = first.agreed
        yield Detection(
            what="unlike copies",
            sentence=f"{_joined(ranks)} have different bits of what should be equal ({_some(at_first)})",
            since=Onset(first.unix_s, first.step),
            confidence=0.99 if alike else 0.5,
            why=(
                doubt,
                f"all copies were equal at step {agreed:,}" if agreed >= 0 else "no check before it was equal",
            ),
            then=(check, _go_on(first, mine[-1].record, evidence)),
            advice="watch" if alike else "program",
            figures={"step": first.step, "last_agreed_step": agreed, "tensors": len(at_first)},
        )


def _of_steps(recomputed: Sequence[RecomputedStep]) -> Iterator[Detection]:
    """Results that did not come again: of which rank is not known."""
    if recomputed:
        first, count = recomputed[0], len(recomputed)
        more = f", and so did {count - 1} later" if count > 1 else ""
        yield Detection(
            what="step not repeated",
            sentence=f"step {first.step:,} gave other gradients when it was computed again{more}",
            since=Onset(first.unix_s, first.step),
            confidence=0.9,
            why=(f"the norm of its gradient jumped to {first.first}, and was {first.second} the second time",),
            then=("set telemetry.replay_every, which names the rank", "run `phalanx check` on all hosts of the run"),
            figures={"step": first.step, "steps": count},
        )


def _go_on(
    record: UnlikeCopies | UnlikeReplays, last: UnlikeCopies | UnlikeReplays, evidence: CorruptionEvidence
) -> str:
    # A later start that made the step again, and whose copies agreed there: it began before the corruption.
    again = {start for start, step in evidence.equal if start > last.start and step <= record.step}
    steps = [step for start, step in evidence.equal if again and start >= min(again)]
    if again and max(steps) >= last.step and isinstance(last, UnlikeCopies):
        return (
            f"the run has recovered: its start {min(again)} made step {record.step:,} again, and all copies were equal "
            f"up to step {max(steps):,}; later checkpoints of start {record.start} stay unused"
        )
    if record.agreed < 0:
        return f"distrust every checkpoint of this start up to step {record.step:,}"
    return (
        f"go on from a checkpoint of step {record.agreed:,} or before: later ones, up to {record.step:,}, are suspect"
    )


def _starts(findings: Iterable[_Finding]) -> set[int]:
    return {finding.record.start for finding in findings}


def _some(findings: Sequence[_Finding]) -> str:
    """What differs, the first in the order of a step first."""
    order = sorted(findings, key=lambda one: _place(one.record))
    titles = list(dict.fromkeys(finding.title for finding in order))
    more = f" and {len(titles) - _SHOWN} more" if len(titles) > _SHOWN else ""
    return ", ".join(titles[:_SHOWN]) + more


def _place(record: UnlikeCopies | UnlikeReplays) -> int:
    return QUANTITIES.index(record.quantity) if isinstance(record, UnlikeCopies) else -1


def _joined(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _table(findings: Sequence[_Finding]) -> list[dict[str, object]]:
    return [
        {
            "step": finding.record.step,
            "start": finding.record.start,
            "what": finding.title,
            "named": list(finding.named),
            "doubt": finding.doubt,
            "digests": {str(rank): digest for rank, digest in finding.digests.items()},
        }
        for finding in findings
    ]
