"""One contender in this process: ``python -m gpu CONTENDER TASK`` prints what it took, as JSON, on its last line."""

from __future__ import annotations

import importlib
import json
import sys

import torch

from gpu.task import Task


def main() -> None:
    module, name = sys.argv[1].split(".")
    torch.set_float32_matmul_precision("high")
    contender = getattr(importlib.import_module(f"gpu.{module}"), name)
    print(json.dumps(contender(Task.from_json(sys.argv[2]))))


if __name__ == "__main__":
    main()
