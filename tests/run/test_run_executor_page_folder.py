"""Pages of ranks in memory go with their executor, and those of one that was killed when the next one begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from phalanx.run.executor.page_folder import PREFIX, clear_left_pages, page_folder

_OWNER = """
import sys
from pathlib import Path
from phalanx.run.executor.page_folder import page_folder

with page_folder(Path(sys.argv[1])) as folder:
    (folder / "rank-0.1").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def _owner(memory: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder; it gives it back at the end of its stdin."""
    command = [sys.executable, "-c", _OWNER, str(memory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_executor_leaves_goes_with_the_next_start_and_what_lives_stays(tmp_path: Path) -> None:
    killed, left = _owner(tmp_path)
    living, kept = _owner(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert (left / "rank-0.1").exists()
        with page_folder(tmp_path) as own:
            assert {left, kept, own} - {folder for folder in tmp_path.iterdir() if folder.is_dir()} == {left}
            assert (kept / "rank-0.1").exists()
        assert not own.exists()
        living.communicate("")
        assert living.returncode == 0 and not kept.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_what_is_not_ours_to_judge_stays(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}begins").mkdir()  # its owner has not said so yet
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    assert list(clear_left_pages(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 4 and (tmp_path / "elsewhere" / "owner").exists()
