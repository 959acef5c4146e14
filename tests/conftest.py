"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes is the machine's affair: a busy one must not make a test fail.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
