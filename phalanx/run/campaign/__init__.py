"""Cases of the fault campaign, run with the real ``phalanx run`` and judged; see docs/faults.md."""
