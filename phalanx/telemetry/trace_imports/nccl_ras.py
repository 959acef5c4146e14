"""What NCCL's RAS subsystem says of a job (`ncclras`, NCCL 2.24 and later): communicators, and what is wrong with them.

It holds no times of single collectives, so that it becomes no spans, but ``communicators.jsonl`` (a row for each rank
of a communicator and collective: how many it has launched) and incidents: ranks that are dead, silent, in error, or
behind the others. It may be added to a run that has telemetry already, such as that of the job it was asked of.

The JSON form (``ncclras -f json``, 2.28) says all of every rank. The text form says it of ranks that stand out, and
``ncclras -v`` of more of them. The text has no time: that of the file is taken.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.span_writer import note_incident

_FILE = "communicators.jsonl"

# ncclResult_t
_IN_PROGRESS = 7
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}


@dataclass(frozen=True)
class Member:
    """A rank of a communicator, and how many of one collective it has launched.

    Attributes:
        communicator: its hash, 16 hexadecimal digits.
        size: ranks of the communicator; 0: not known.
        rank: within the communicator; -1: a process that is named without one.
        gpu: its CUDA number there; -1: not known.
        status: RUNNING, INIT, FINALIZE, ABORT; NOCOMM (it is alive and not a member), INCOMPLETE (it does not answer),
            DEAD; empty: not said.
        error: what NCCL reports; empty: nothing.
        collective: AllReduce …; empty: `launched` is not said.
        launched: how many; -1: not known.
    """

    communicator: str
    size: int
    rank: int
    host: str = "unknown"
    pid: int = -1
    gpu: int = -1
    status: str = ""
    error: str = ""
    collective: str = ""
    launched: int = -1


@dataclass
class RasAnswer:
    """What one call of ncclras said, at a Unix time."""

    at_ns: int
    members: list[Member] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, members: Sequence[Member], **more: Any) -> None:
        """Note an incident of some ranks."""
        ranks = sorted({one.rank for one in members if one.rank >= 0})
        hosts = list(dict.fromkeys(one.host for one in members if one.host != "unknown"))
        where = [f"process {one.pid} on {one.host}" for one in members if one.rank < 0]
        told = {"source": "ncclras", "ranks_of_communicator": ranks, "hosts": hosts, "processes": where, **more}
        self.incidents.append({"kind": kind, **{name: value for name, value in told.items() if value}})


def is_ras_file(path: Path) -> bool:
    """Whether it begins as an answer of ncclras does, in either form."""
    try:
        with path.open(errors="replace") as file:
            begin = file.read(400)
    except OSError:
        return False
    return ('"nccl_version"' in begin and begin.lstrip().startswith("{")) or bool(
        re.search(r"^NCCL version \S+ compiled with CUDA", begin, re.MULTILINE) and "Job summary" in begin
    )


def read_ras(path: Path) -> RasAnswer:
    """One answer, in either form.

    Raises:
        ValueError, KeyError, TypeError: it is torn.
    """
    text = path.read_text(errors="replace")
    written_ns = path.stat().st_mtime_ns
    if text.lstrip().startswith("{"):
        return _read_json(json.loads(text), written_ns)
    if "Warnings\n" not in text:
        raise ValueError("the text ends before its warnings")
    return _read_text(text, written_ns)


def import_ras(paths: Sequence[Path], run: Path) -> tuple[int, int]:
    """Add answers of ncclras to a run, which is made if absent; how many ranks and incidents.

    Raises:
        UserError: an answer names no communicator.
    """
    answers = [read_ras(path) for path in paths]
    if not any(one.members or one.incidents for one in answers):
        raise UserError("no communicator in it", cure="ask while the job runs: ncclras -v", value=str(paths[0]))
    folder = run / "telemetry"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _FILE).open("a") as file:
        for answer in answers:
            file.writelines(json.dumps({"at_ns": answer.at_ns, **asdict(one)}) + "\n" for one in answer.members)
    for answer in answers:
        for incident in answer.incidents:
            note_incident(folder, incident.pop("kind"), answer.at_ns, **incident)
    processes = {(one.host, one.pid, one.gpu) for answer in answers for one in answer.members}
    return len(processes), sum(len(answer.incidents) for answer in answers)


def _read_json(found: dict[str, Any], written_ns: int) -> RasAnswer:
    answer = RasAnswer(_time_ns(found.get("timestamp", ""), written_ns))
    for one in found["communicators"]:
        name, size = f"{int(one['hash'], 16):016x}", int(one["size"])
        members = [_member(name, size, rank) for rank in one["ranks"]]
        counts = {rank["rank"]: rank.get("collective_counts", {}) for rank in one["ranks"]}
        missing = [_missing(name, size, rank) for rank in one["missing_ranks"]]
        for member in members:
            used = {collective: count for collective, count in counts[member.rank].items() if count} or {"": -1}
            answer.members += [
                Member(**{**asdict(member), "collective": collective, "launched": count})
                for collective, count in used.items()
            ]
        answer.members += missing
        for status, kind in (
            ("DEAD", "NCCL: process dead"),
            ("INCOMPLETE", "NCCL: no answer"),
            ("NOCOMM", "NCCL: left the communicator"),
        ):
            if gone := [member for member in missing if member.status == status]:
                answer.add(kind, gone, communicator=name)
        for error in dict.fromkeys(member.error for member in members if member.error):
            answer.add(f"NCCL: {error}", [one for one in members if one.error == error], communicator=name)
        _compare_status(answer, name, members)
        _compare_counts(answer, name, members, counts)
    if timeouts := found.get("ras", {}).get("timeouts_count", 0):
        answer.add("NCCL: timeouts while asking", [], timeouts=timeouts)
    return answer


def _member(name: str, size: int, rank: dict[str, Any]) -> Member:
    state = rank["status"]
    if state["abort_flag"]:
        status = "ABORT"
    elif state["finalize_called"] or state["destroy_flag"]:
        status = "FINALIZE"
    else:
        status = "RUNNING" if state["init_state"] == 0 else "INIT"
    number = next((state[key] for key in ("init_state", "async_error") if state[key] not in (0, _IN_PROGRESS)), 0)
    error = _ERRORS.get(number, "Unexpected error") if number else ""
    return Member(name, size, rank["rank"], rank["host"], rank["pid"], rank["cuda_dev"], status, error)


def _missing(name: str, size: int, rank: dict[str, Any]) -> Member:
    state = rank["status"]
    status = "DEAD" if state["considered_dead"] else "INCOMPLETE" if state["unresponsive"] else "NOCOMM"
    return Member(name, size, rank["rank"], rank["host"], rank["pid"], rank["cuda_dev"], status)


def _compare_status(answer: RasAnswer, name: str, members: Sequence[Member]) -> None:
    often = Counter(member.status for member in members).most_common()
    for status, _ in often[1:]:
        odd = [member for member in members if member.status == status]
        answer.add(f"NCCL: {status} where others are {often[0][0]}", odd, communicator=name)


def _compare_counts(answer: RasAnswer, name: str, members: Sequence[Member], counts: dict[int, dict[str, int]]) -> None:
    """Ranks that launched fewer of a collective than the one that is farthest: the others wait for them."""
    for collective in dict.fromkeys(key for each in counts.values() for key in each):
        launched = {member.rank: counts[member.rank].get(collective, 0) for member in members}
        most = max(launched.values(), default=0)
        behind = sorted((one for one in members if launched[one.rank] < most), key=lambda one: one.rank)
        if behind:
            answer.add(
                f"NCCL: behind in {collective}",
                behind,
                communicator=name,
                launched=[launched[member.rank] for member in behind],
                others_launched=most,
            )


def _time_ns(text: str, otherwise_ns: int) -> int:
    """Local time, as the job's host writes it."""
    try:
        return int(time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))) * 10**9
    except (ValueError, OverflowError):
        return otherwise_ns


_HEAD = re.compile(r"#\d+-\d+ \(([0-9a-f]+)\) (\w+)")
_RANK = re.compile(
    r"Rank (?P<rank>\d+)(?: has launched up to operation (?P<launched>\d+)|(?P<none> has not launched any operations)"
    r"| has status (?P<status>\w+)| reported (?P<error>.+?))? -- (?:GPU (?P<gpu>\d+)(?: \(NVML \d+\))?"
    r" managed by process (?P<pid>\d+) on node (?P<host>\S+)|\[)"
)
_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing GPUs? (.+)")
_MANY_LAUNCHED = re.compile(r"(\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)")
_MANY_STATUS = re.compile(r"(\d+) ranks have status (\w+)")
_MANY_ERROR = re.compile(r"(\d+) ranks reported (.+)")
_COUNTS = re.compile(r"Communicator ranks have different (\w+) operation counts")
_GROUP = re.compile(r"\s*\d+\s+(\d+)\s+\d+\s+\S+\s+(\d+)\s+\d+\s+(\w+)\s+([\w,]+)$")


def _read_text(text: str, written_ns: int) -> RasAnswer:
    """The text form: a block of lines for each thing that is wrong, those of a communicator under its hash."""
    answer = RasAnswer(written_ns)
    whole, _, wrong = text.partition("\nErrors\n")
    for line in whole.splitlines():
        if (group := _GROUP.match(line)) and not line.lstrip().startswith("("):
            answer.members.append(Member("", int(group.group(2)), -1, status=group.group(3), error=_said(group)))
    name = ""
    for block in re.split(r"\n\s*\n", wrong):
        name = _read_block(answer, [line.strip() for line in block.splitlines() if line.strip()], name)
    return answer


def _said(group: re.Match[str]) -> str:
    return "" if group.group(4) == "OK" else group.group(4)


def _read_block(answer: RasAnswer, lines: Sequence[str], before: str) -> str:
    """Lines without an empty one among them; a communicator's go on in the next block with another collective.

    Returns:
        The communicator that they are of.
    """
    if not lines or set(lines[0]) == {"="}:
        return ""
    head = _HEAD.match(lines[0])
    goes_on = _COUNTS.match(lines[0]) is not None
    name, kind = (head.group(1), head.group(2)) if head else (before, "MISMATCH") if goes_on else ("", lines[0])
    named = list(_members_of(name, kind, lines if goes_on else lines[1:]))
    answer.members += named
    titles = {"DEAD": "NCCL: process dead", "INCOMPLETE": "NCCL: no answer", "TIMEOUT": "NCCL: timeouts while asking"}
    if kind in titles:
        answer.add(titles[kind], named, communicator=name, said=" ".join(lines[1:2]))
    elif kind == "ERROR":
        for error in dict.fromkeys(one.error for one in named):
            answer.add(f"NCCL: {error}", [one for one in named if one.error == error], communicator=name)
    elif kind == "MISMATCH":
        _mismatches(answer, name, named, lines)
    return name


def _mismatches(answer: RasAnswer, name: str, named: Sequence[Member], lines: Sequence[str]) -> None:
    """Ranks that launched fewer collectives than others, or are in another state."""
    often = [int(found.group(2) or 0) for line in lines if (found := _MANY_LAUNCHED.match(line))]
    for collective in dict.fromkeys(one.collective for one in named if one.collective):
        each = [one for one in named if one.collective == collective]
        most = max([*often, *(one.launched for one in each)])
        if behind := sorted((one for one in each if one.launched < most), key=lambda one: one.rank):
            answer.add(
                f"NCCL: behind in {collective}",
                behind,
                communicator=name,
                launched=[one.launched for one in behind],
                others_launched=most,
            )
    usual = next((found.group(2) for line in lines if (found := _MANY_STATUS.match(line))), "")
    for status in dict.fromkeys(one.status for one in named if one.status and one.status != usual):
        odd = [one for one in named if one.status == status]
        answer.add(f"NCCL: {status} where others are {usual or 'otherwise'}", odd, communicator=name)


def _members_of(name: str, kind: str, lines: Sequence[str]) -> Iterator[Member]:
    """Ranks and processes that lines name; what was said of several stands in the line before them."""
    collective, launched, status, error = "", -1, {"DEAD": kind, "INCOMPLETE": kind}.get(kind, ""), ""
    for line in lines:
        if found := _COUNTS.match(line):
            collective, launched, status = found.group(1), -1, ""
        elif found := _MANY_LAUNCHED.match(line):
            launched = int(found.group(2) or 0)
        elif found := _MANY_STATUS.match(line):
            status = found.group(2)
        elif found := _MANY_ERROR.match(line):
            error = found.group(2)
        elif found := _PROCESS.match(line):
            yield Member(name, 0, -1, found.group(2), int(found.group(1)), status=status)
        elif found := _RANK.match(line):
            own = 0 if found["none"] else int(found["launched"]) if found["launched"] else launched
            where = (found["host"], int(found["pid"]), int(found["gpu"])) if found["host"] else ("unknown", -1, -1)
            yield Member(
                name,
                0,
                int(found["rank"]),
                *where,
                status=found["status"] or status,
                error=found["error"] or error,
                collective=collective,
                launched=own if collective else -1,
            )
