"""Writers that are killed: `python run_journal_writers.py FOLDER SEED…` prints, as JSON, what each was told is there.

For each seed a forked writer appends batches to FOLDER/SEED.db and says so after each; at a moment that the seed gives
it is killed; twice, so that a writer goes on where a killed one left off.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

from phalanx.run.journal import Draft, open_journal


def text_of(sequence: int) -> str:
    return json.dumps({"sequence": sequence, "filling": "x" * (sequence * 37 % 5000)})


def write_until_killed(path: Path, seed: int, told: int) -> None:
    journal = open_journal(str(path), wait_s=60)
    draw = random.Random(seed + 1000 * journal.epoch)
    while True:
        first = journal.last_sequence + 1
        drafts = [Draft("event", journal.epoch, text_of(first + i), float(i)) for i in range(draw.randint(1, 6))]
        os.write(told, f"{journal.append_all(drafts)}\n".encode())


def kill_one(path: Path, seed: int) -> int:
    draw = random.Random(seed)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            write_until_killed(path, seed, theirs)
        finally:
            os._exit(9)
    os.close(theirs)
    heard = b""
    for _ in range(draw.randint(1, 30)):
        heard += os.read(ours, 1)
    select.select([], [], [], draw.random() * 0.004)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while block := os.read(ours, 4096):
        heard += block
    os.close(ours)
    whole = heard.rpartition(b"\n")[0].split()
    return int(whole[-1]) if whole else 0


def main() -> None:
    folder = Path(sys.argv[1])
    heard = {}
    for seed in map(int, sys.argv[2:]):
        path = folder / f"{seed}.db"
        heard[seed] = [kill_one(path, seed), kill_one(path, seed + 1)]
    print(json.dumps(heard))


if __name__ == "__main__":
    main()
