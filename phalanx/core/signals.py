"""Which signals mean "stop soon": what launchers pass on, ranks heed, and helpers of ranks leave to them. Torch-free.

Slurm sends what its user chose (``--signal``; submitit chooses SIGUSR2), and SIGTERM before its SIGKILL in any case;
others send SIGUSR1, SIGUSR2 or SIGXCPU at their soft limits, the kernel SIGXCPU for CPU time. By default each of them
ends the process: heeding it loses nothing.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Training ends after the step in progress, with a checkpoint, when one of these comes."""
