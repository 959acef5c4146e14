"""``python -m phalanx.run.executor SETTINGS``: turns on the cache of bytecode, then imports the rest."""

from __future__ import annotations

import os
import sys

from phalanx.launch.bytecode import keep_bytecode

if __name__ == "__main__":
    keep_bytecode(os.environ)
    from phalanx.run.executor.main import main

    sys.exit(main())
