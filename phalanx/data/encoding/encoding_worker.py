"""A preparing process: units of work come in as JSON lines, progress and results go out the same way.

Started by `phalanx.data.encoding.pool` as ``python -m phalanx.data.encoding.encoding_worker PID``, so that it imports
neither the caller's main module nor torch. It ends when its input ends or its parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import friendly_os_errors
from phalanx.data.config import SourceConfig
from phalanx.data.encoding.encode import UnitRecord, encode_unit
from phalanx.data.sources.input_files import Part, Rule, Unit
from phalanx.data.tokenizers.spec import TokenizerSpec, open_tokenizer
from phalanx.ipc.processes import die_with_parent


@dataclass(frozen=True)
class Job:
    """What all units of a source have in common."""

    source: SourceConfig
    tokenizer: TokenizerSpec
    rule: Rule
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
    def from_json(value: dict[str, Any]) -> Job:
        """The job that `to_json` described."""
        return Job(
            SourceConfig.model_validate(value["source"]),
            TokenizerSpec(**value["tokenizer"]),
            Rule(**value["rule"]),
            Path(value["folder"]),
        )


class Encoder:
    """Does units of one job in this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = open_tokenizer(job.tokenizer)

    def __call__(self, unit: Unit, beat: Any) -> UnitRecord:
        """Encode `unit`; see `encode_unit`."""
        job = self._job
        with friendly_os_errors(job.folder):
            return encode_unit(unit, job.source, self._tokenizer, job.rule, job.folder, beat)


def main() -> None:
    """Serve the parent: the job first, then units, until the input ends."""
    die_with_parent(int(sys.argv[1]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def beat(num_bytes: int, num_tokens: int) -> None:
        say(bytes=num_bytes, tokens=num_tokens)

    encoder: Encoder | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if encoder is None:
                encoder = Encoder(Job.from_json(message))
                continue
            say(record=asdict(encoder(Unit(tuple(Part(**part) for part in message["parts"])), beat)))
        except UserError as error:
            say(problem={"problem": str(error).removesuffix(f"; {error.cure}"), "cure": error.cure})


if __name__ == "__main__":
    main()
