"""Run a script as one process that knows of no others, as ``python SCRIPT …`` would: no rank, no world size.

nanoGPT takes a rank for a GPU; without one it runs on a CPU.

    phalanx run -- alone.py train.py config/train_shakespeare_char.py --device=cpu
"""

import os
import runpy
import sys
from pathlib import Path

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
