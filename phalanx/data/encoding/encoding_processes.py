"""Encoding units of work in several processes at once: JSON lines with units go in, progress and records come out.

A process is started as ``python -m phalanx.data.encoding.encoding_processes PID``, so that it imports neither the
caller's main module nor torch. It ends when its input ends or its parent is gone.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import friendly_os_errors
from phalanx.data.config import SourceConfig
from phalanx.data.encoding.encode import UnitRecord, encode_unit
from phalanx.data.sources.input_files import FilePart, HoldOutRule, WorkUnit
from phalanx.data.tokenizers.spec import TokenizerSpec, open_tokenizer
from phalanx.ipc.processes import die_with_parent, start_helper

Beat = Callable[[int, int], None]
BYTES_PER_WORKER = 2 << 20


@dataclass(frozen=True)
class EncodingJob:
    """What all units of a source have in common."""

    source: SourceConfig
    tokenizer: TokenizerSpec
    rule: HoldOutRule
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "source": self.source.model_dump(exclude_unset=True),
            "tokenizer": asdict(self.tokenizer),
            "rule": asdict(self.rule),
            "folder": str(self.folder),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> EncodingJob:
        """The job that `to_json` described."""
        return EncodingJob(
            SourceConfig.model_validate(value["source"]),
            TokenizerSpec(**value["tokenizer"]),
            HoldOutRule(**value["rule"]),
            Path(value["folder"]),
        )


def _encoder(job: EncodingJob) -> Callable[[WorkUnit, Beat], UnitRecord]:
    """Encodes units of one job in this process; the tokenizer is opened once."""
    tokenizer = open_tokenizer(job.tokenizer)

    def encode(unit: WorkUnit, beat: Beat) -> UnitRecord:
        with friendly_os_errors(job.folder):
            return encode_unit(unit, job.source, tokenizer, job.rule, job.folder, beat)

    return encode


def encode_all(units: Sequence[WorkUnit], job: EncodingJob, workers: int | None, beat: Beat) -> Iterator[UnitRecord]:
    """Encode `units`, yielding records as they are finished, in any order.

    Args:
        units: what to do.
        job: what they have in common.
        workers: processes; None: as many as this process may use cores, fewer for little text. 1 works in this process.
        beat: called with bytes of text and tokens as they are made.

    Raises:
        UserError: the first that a unit raised; what was finished before it stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = min(cores, sum(unit.num_bytes for unit in units) // BYTES_PER_WORKER)
    workers = min(workers, len(units))
    if workers <= 1:
        encode = _encoder(job)
        yield from (encode(unit, beat) for unit in units)
        return
    yield from _in_processes(units, job, workers, beat)


def _in_processes(units: Sequence[WorkUnit], job: EncodingJob, workers: int, beat: Beat) -> Iterator[UnitRecord]:
    todo: queue.SimpleQueue[WorkUnit] = queue.SimpleQueue()
    for unit in sorted(units, key=lambda u: -u.num_bytes):
        todo.put(unit)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    processes = [start_helper("phalanx.data.encoding.encoding_processes") for _ in range(workers)]
    for process in processes:
        _send(process, job.to_json())
    threads = [threading.Thread(target=_serve, args=(p, todo, inbox), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        left = len(units)
        while left:
            message = inbox.get()
            if "problem" in message:
                raise message["problem"]
            if "record" in message:
                left -= 1
                yield UnitRecord.from_json(message["record"])
            else:
                beat(message["bytes"], message["tokens"])
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.wait()


def _serve(
    process: subprocess.Popen[str], todo: queue.SimpleQueue[WorkUnit], inbox: queue.SimpleQueue[dict[str, Any]]
) -> None:
    """Hand units to one process, one at a time, and pass on its messages."""
    assert process.stdout is not None
    while True:
        try:
            unit = todo.get_nowait()
        except queue.Empty:
            return
        try:
            _send(process, asdict(unit))
        except (BrokenPipeError, ValueError):
            break
        for line in process.stdout:
            message = json.loads(line)
            if "problem" in message:
                message["problem"] = UserError(**message["problem"])
            inbox.put(message)
            if "record" in message or "problem" in message:
                break
        else:
            break
    code = process.wait()
    cure = "look above for its last words; -9 is often too little memory: use fewer workers"
    inbox.put({"problem": UserError(f"a preparing process ended with code {code}", cure=cure, field="workers")})


def _send(process: subprocess.Popen[str], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def main() -> None:
    """Serve the parent: the job first, then units, until the input ends."""
    die_with_parent(int(sys.argv[1]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def send(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def beat(num_bytes: int, num_tokens: int) -> None:
        send(bytes=num_bytes, tokens=num_tokens)

    encode: Callable[[WorkUnit, Beat], UnitRecord] | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if encode is None:
                encode = _encoder(EncodingJob.from_json(message))
                continue
            send(record=asdict(encode(WorkUnit(tuple(FilePart(**part) for part in message["parts"])), beat)))
        except UserError as error:
            send(problem={"problem": str(error).removesuffix(f"; {error.cure}"), "cure": error.cure})


if __name__ == "__main__":
    main()
