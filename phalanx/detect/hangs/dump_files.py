"""Files of NCCL flight-recorder dumps of one job, read without trusting them, and whose they are.

A dump does not say its rank. torch puts it at the end of the file's name; besides, a rank is in all of its groups, and
names itself in its transfers. Where the two contradict each other, what the dump says counts.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.detect.hangs.flight_records import FlightRecord, GroupId, MemberTexts, read_record
from phalanx.telemetry.flight_dump import FlightRecordError, read_dump

_RANK_OF_NAME = re.compile(r"(\d{1,7})(?:\.\w{1,12}){0,2}$")
_OWN = re.compile(r"\b(?:send|recv) (\d{1,7})(?:->|<-)\d{1,7}")
_NO_DUMPS = (".txt", ".log", ".md", ".py", ".html", ".csv")


@dataclass
class DumpedJob:
    """What the dumps of a job say.

    Attributes:
        records: by rank.
        groups: all process groups that any of them names, with their members.
        problems: of files that cannot be used.
        written_s: Unix time of the file that was written first.
    """

    records: dict[int, FlightRecord] = field(default_factory=dict)
    texts: MemberTexts = field(default_factory=MemberTexts)
    groups: dict[GroupId, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    written_s: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that are named anywhere, also those without a dump."""
        return tuple(sorted({*self.records, *(rank for members in self.groups.values() for rank in members)}))

    @property
    def shows_all_ranks(self) -> bool:
        """Whether one of the groups has every rank that is named anywhere, as the default group of a job has."""
        return any(len(set(members)) == len(self.ranks) for members in self.groups.values())

    def add(self, rank: int, dump: Mapping[str, Any]) -> None:
        """Take in the dump of a rank.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, IndexError: it is none.
        """
        record = read_record(dump, self.texts)
        self.records[rank] = record
        for group in record.parts:
            if group.members and group not in self.groups:
                self.groups[group] = self.texts.ranks(group.members)


def dump_files(places: Sequence[str], *, all_kinds: bool = False) -> list[Path]:
    """Files that are meant by names of files, folders and patterns.

    Of a folder all but hidden files and, unless `all_kinds`, notes (``.txt``, ``.log`` …), and no folders in it.

    Raises:
        UserError: there are none.
    """
    found: list[Path] = []
    for place in places:
        path = Path(place)
        if path.is_dir():
            inside = sorted(path.iterdir())
            files = [one for one in inside if one.is_file() and not one.name.startswith(".")]
            found += [one for one in files if all_kinds or one.suffix not in _NO_DUMPS]
        elif path.exists():
            found.append(path)
        else:
            matched = sorted(Path(one) for one in glob.glob(place))  # noqa: PTH207  # may be absolute
            if not matched:
                raise UserError(
                    "is not there, neither a run folder nor dumps",
                    cure="name a run folder, or files, folders or patterns of dumps",
                    field="RUN | DUMPS",
                    value=place,
                )
            found += [one for one in matched if one.is_file()]
    if not found:
        raise UserError("holds no dumps", cure="name files or folders of dumps", field="DUMPS", value=" ".join(places))
    return list(dict.fromkeys(found))


def read_dumped_job(files: Iterable[Path]) -> DumpedJob:
    """Read all dumps; files that are none are listed as problems.

    Raises:
        UserError: none of them is a dump.
    """
    job = DumpedJob()
    named: dict[int, Path] = {}
    written: list[float] = []
    for path in files:
        try:
            dump = read_dump(path)
            rank = rank_of(path.name, dump, job.texts)
            if rank is None:
                job.problems.append(f"{path.name} does not say its rank; let its name end with it, such as dump_3")
            elif rank in named:
                job.problems.append(f"{path.name} is of rank {rank}, as {named[rank].name} is; leave the older one out")
            else:
                job.add(rank, dump)
                named[rank] = path
                written.append(path.stat().st_mtime)
        except (FlightRecordError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            is_said = isinstance(error, FlightRecordError | OSError)
            why = str(error)[:120] if is_said else "it does not hold what a flight recorder writes"
            job.problems.append(f"{path.name} is not a dump that can be used ({why}); dump it anew")
    if not job.records:
        first = job.problems[0].partition(";")[0] if job.problems else "there are no files"
        raise UserError(f"no dump can be read: {first}", cure="name dumps of torch's NCCL flight recorder")
    job.written_s = min(written)
    return job


def rank_of(name: str, dump: Mapping[str, Any], texts: MemberTexts) -> int | None:
    """Whose a dump is: by what it says, else by the file's name; None: neither says it."""
    by_name = _RANK_OF_NAME.search(name)
    named = int(by_name[1]) if by_name else None
    given = dump.get("rank", dump.get("global_rank"))
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    members: dict[str, tuple[int, ...]] = {}
    config = dump.get("pg_config")
    for key, one in config.items() if isinstance(config, dict) else ():
        if isinstance(one, dict) and (text := texts.text(one.get("ranks", ""))):
            members[str(key)] = texts.ranks(text)
    if not members:
        return named
    smallest = min(members.values(), key=len)
    shared = {rank for rank in smallest if all(rank in ranks for ranks in members.values())}
    if named in shared and len(smallest) > 1:  # what transfers say is dearer to find
        return named
    for entry in dump["entries"]:
        own = _OWN.search(str(entry.get("profiling_name", "")))
        group = entry.get("process_group", entry.get("pg_name", ""))
        ranks = members.get(str(group[0] if isinstance(group, list | tuple) and group else group), ())
        if own is not None and int(own[1]) < len(ranks):
            shared &= {ranks[int(own[1])]}
            break
    return shared.pop() if len(shared) == 1 else named
