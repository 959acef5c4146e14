"""Run one contender in this process and print, on the last line, what it took: ``python -m contenders NAME TASK``.

TASK is a `contenders.task.Task` as JSON. The line is JSON: the stamps of the stopwatch, or the rates of ``gemm``.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from contenders.task import Stopwatch, Task


def main() -> None:
    name, task = sys.argv[1], Task.from_json(sys.argv[2])
    torch.set_num_threads(task.threads)
    contender = importlib.import_module(f"contenders.{name}")
    stopwatch = Stopwatch()
    contender.run(task)
    if stopwatch.stamps:
        print(json.dumps({"stamps": stopwatch.stamps}))


if __name__ == "__main__":
    main()
