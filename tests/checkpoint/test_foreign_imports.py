"""What other loops import, and what must not come with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phalanx.checkpoint


def test_the_names_are_there() -> None:
    from phalanx.checkpoint import Checkpointer, restore_checkpoint, save_checkpoint

    assert (
        Checkpointer.__module__
        == restore_checkpoint.__module__
        == save_checkpoint.__module__
        == "phalanx.checkpoint.foreign.checkpointer"
    )
    with pytest.raises(AttributeError, match="has no attribute 'load'"):
        phalanx.checkpoint.load  # noqa: B018


def test_torch_comes_with_them_only() -> None:
    code = (
        "import sys, phalanx.checkpoint, phalanx.checkpoint.interval, phalanx.checkpoint.stopping\n"
        "assert 'torch' not in sys.modules\n"
        "from phalanx.checkpoint import Checkpointer\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
