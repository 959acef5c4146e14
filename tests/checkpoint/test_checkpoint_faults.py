"""What happens to checkpoints when processes die, bits flip, disks fill up and others read at the same time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import assert_equal, make_tensors, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_checkpoint import Checkpoint, newest, open_checkpoint
from typing_extensions import Buffer

from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.checkpoint.format.run_sums import RunSums
from phalanx.checkpoint.session.blocking_session import STAGES, save
from phalanx.checkpoint.storage import folder as folders
from phalanx.checkpoint.storage import folder_store
from phalanx.checkpoint.storage.folder import candidates, clean
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.errors import UserError
from phalanx.core.fault_points import Points


def found(folder: Path, report: Callable[[str], None] = pytest.fail) -> Checkpoint:
    checkpoint = newest(folder, report)
    assert checkpoint is not None
    return checkpoint


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child and return how it ended: 0, or the negative number of the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(stage: str) -> Points:
    return Points({stage: lambda **_: os.kill(os.getpid(), signal.SIGKILL)})


@pytest.fixture(params=["names exchanged", "renamed twice"])
def exchanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Whether the file system can let two folders change names."""
    if request.param == "renamed twice":
        monkeypatch.setattr(folders, "exchange", lambda *_: False)
        return False
    for name in ("left", "right"):
        (tmp_path.parent / name).mkdir(exist_ok=True)
    if not folders.exchange(tmp_path.parent / "left", tmp_path.parent / "right"):
        pytest.skip("this file system cannot exchange names")
    return True


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("step", [2, 1], ids=["next-step", "same-step"])
def test_kill_at_any_stage_leaves_the_former_or_the_new_one(
    tmp_path: Path, stage: str, step: int, exchanging: bool
) -> None:
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    ended = in_child(lambda: save(tmp_path, step, make_tensors(2), {"version": 2}, points=killed_at(stage)) and None)
    reached = stage != "checkpoint.between-renames" or (step == 1 and not exchanging)
    assert ended == (-signal.SIGKILL if reached else 0)
    checkpoint = found(tmp_path)
    version = checkpoint.state["version"]
    published = not reached or STAGES.index(stage) > STAGES.index("checkpoint.between-renames")
    assert version == (2 if published else 1)
    assert checkpoint.step == (step if published else 1)
    assert_equal(checkpoint.read(), make_tensors(version))
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir()), "leftovers stay"
    save(tmp_path, 2, make_tensors(3), {"version": 3})
    assert found(tmp_path).state == {"version": 3}


def test_exchanging_names_of_folders(tmp_path: Path) -> None:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not folders.exchange(tmp_path / "left", tmp_path / "right"):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "left" / "right").exists()
    assert (tmp_path / "right" / "left").exists()
    assert not folders.exchange(tmp_path / "left", tmp_path / "absent")


def test_kill_while_bytes_are_written(tmp_path: Path) -> None:
    """SIGKILL after each of the first writes of the data file: no stage in between is taken for a checkpoint."""
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    for kill_after in range(1, 40, 6):

        def work(limit: int = kill_after) -> None:
            calls = iter(range(limit))
            update = RunSums.update

            def counted(self: RunSums, data: Buffer) -> None:
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                update(self, data)

            RunSums.update = counted  # type: ignore[method-assign]
            folder_store.BUFFER_BYTES = 4096  # so that what came before is on the disk
            save(tmp_path, 2, make_tensors(2), {"version": 2})

        assert in_child(work) == -signal.SIGKILL
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".writing")]
        assert found(tmp_path).state == {"version": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.fault_points import Points
points = Points({sys.argv[2]: lambda **_: os.kill(os.getpid(), signal.SIGKILL)})
save(Path(sys.argv[1]), 7, {"weight": torch.ones(3)}, {"fresh": True}, points=points)
"""


@pytest.mark.campaign(but=("checkpoint.tensors-written",))
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["checkpoint.tensors-written", "checkpoint.after-rename"])
def test_kill_of_a_process_of_its_own(tmp_path: Path, stage: str) -> None:
    """The same without fork: nothing of the parent's memory or locks can help."""
    save(tmp_path, 1, {"weight": torch.zeros(3)}, {"fresh": False})
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), stage], check=False).returncode
    assert ended == -signal.SIGKILL
    assert found(tmp_path).state == {"fresh": stage == "checkpoint.after-rename"}


def test_a_living_writer_is_not_disturbed(tmp_path: Path) -> None:
    """Another process saves and cleans up while this one is in the middle of writing."""
    store = LocalStore(tmp_path)
    area = store.begin(5, 1, "aa")
    store.write(area, "half", [b"written"])
    assert in_child(lambda: save(tmp_path, 6, make_tensors(6), {"who": "other"}) and None) == 0
    clean(tmp_path)
    assert store.at(area).read("half") == b"written"
    assert found(tmp_path).step == 6
    store.discard(area)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_a_writer_that_fails_takes_its_folder_away(tmp_path: Path) -> None:
    save(tmp_path, 1, make_tensors(1))

    def refuse(**_: object) -> None:
        raise KeyboardInterrupt

    for stage in STAGES[:4]:
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, make_tensors(2), points=Points({stage: refuse}))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_replacement_that_fails_half_way_gives_the_former_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "exchange", lambda *_: False)
    save(tmp_path, 1, make_tensors(1), {"version": 1})

    def refuse(**_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, make_tensors(2), {"version": 2}, points=Points({"checkpoint.between-renames": refuse}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert found(tmp_path).state == {"version": 1}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-5", "step-00000005.bak", ".hidden"):
        (tmp_path / name).mkdir()
    save(tmp_path, 1, make_tensors(1))
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "step-5",
        "step-00000005.bak",
        ".hidden",
        "step-00000001",
    }
    assert [c.step for c in candidates(tmp_path)] == [1]


def test_steps_beyond_eight_digits_sort_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step, {})
    assert [c.step for c in candidates(tmp_path)] == [100_000_000, 99_999_999, 5]
    assert found(tmp_path).step == 100_000_000


DAMAGES = {
    "file missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "file truncated": (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp has 100 of its"),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (lambda path: os.truncate(path / "manifest.json", 50), "does not match its checksum"),
    "manifest empty": (lambda path: os.truncate(path / "manifest.json", 0), "does not match its checksum"),
    "sums missing": (lambda path: (path / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "bit flipped": (lambda path: flip(path / "__0_0.distcp", 3000), "__0_0.distcp: bytes "),
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json is missing"),
    "a fifo": (lambda path: fifo(path / "__0_0.distcp"), "__0_0.distcp is not a file"),
}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 0x10
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_one_is_passed_over_saying_so(tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    harm(save(tmp_path, 2, make_tensors(2), {"version": 2}))  # type: ignore[no-untyped-call]
    told: list[str] = []
    checkpoint = found(tmp_path, told.append)
    assert checkpoint.state == {"version": 1}
    assert_equal(checkpoint.read(), make_tensors(1))
    assert len(told) == 1
    assert "step-00000002" in told[0]
    assert reason in told[0]
    assert "\n" not in told[0]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: flip(path, 30), ".metadata: does not match its checksum"),
        (lambda path: os.truncate(path, 10), ".metadata has 10 of its"),
        (lambda path: path.unlink(), ".metadata is missing"),
        (fifo, ".metadata is not a file"),
    ],
    ids=["flipped", "truncated", "missing", "a fifo"],
)
def test_damage_to_what_is_not_needed_is_said_and_discards_nothing(
    tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    path = save(tmp_path, 2, make_tensors(2), {"version": 2})
    harm(path / ".metadata")
    told: list[str] = []
    checkpoint = found(tmp_path, told.append)
    assert checkpoint.state == {"version": 2}
    assert_equal(checkpoint.read(), make_tensors(2))
    [line] = told
    assert "step-00000002" in line and words in line and "used all the same" in line
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(path)  # whoever verifies one is told


def test_what_a_link_in_the_way_leads_to_is_left_as_it_is(tmp_path: Path) -> None:
    other = save(tmp_path / "larger disk", 2, make_tensors(1), {"version": 1})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / other.name).symlink_to(other)
    assert found(folder).state == {"version": 1}
    save(folder, 2, make_tensors(2), {"version": 2})
    assert found(folder).state == {"version": 2}
    [aside] = folder.glob("odd-*")
    assert found(other.parent).state == {"version": 1} and aside.samefile(other)


def test_none_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(save(tmp_path, step, make_tensors(step)) / "__0_0.distcp", 99)
    told: list[str] = []
    with pytest.raises(UserError, match=r"no good state is left: .*step-00000002 .*; .*step-00000001 "):
        newest(tmp_path, told.append)
    assert len(told) == 2


def test_without_verification_only_what_is_cheap_is_checked(tmp_path: Path) -> None:
    path = save(tmp_path, 1, make_tensors(1))
    flip(path / ".metadata", 30)
    assert open_checkpoint(path, verify=False).step == 1
    os.truncate(path / "__0_0.distcp", 100)
    with pytest.raises(DamagedCheckpointError, match="100 of its"):
        open_checkpoint(path, verify=False)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = save(tmp_path_factory.mktemp("pristine"), 3, make_tensors(3), {"loader": {"samples": 12}})
    return {file.name: file.read_bytes() for file in path.iterdir()}


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_or_lost_tail_is_detected(
    tmp_path_factory: pytest.TempPathFactory, pristine: dict[str, bytes], data: st.DataObject
) -> None:
    """Every byte of every file counts: nothing was found that can change unnoticed."""
    path = tmp_path_factory.mktemp("harmed", numbered=True) / "step-00000003"
    path.mkdir()
    name = data.draw(st.sampled_from(sorted(pristine)))
    content = bytearray(pristine[name])
    where = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[where] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[where:]
    for other, original in pristine.items():
        (path / other).write_bytes(content if other == name else original)
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(path)


def shift(tree: dict, **changes: object) -> None:
    tree["tensors"]["model.norm"]["chunks"][0].update(changes)


FORGERIES = {
    "outside the folder": (lambda t: t["files"][0].update(name="../../secret"), "no name of a file"),
    "the manifest itself": (lambda t: t["files"][0].update(name="manifest.json"), "no name of a file"),
    "beyond the file": (lambda t: shift(t, offset=10**9), "lies outside the files"),
    "unknown file": (lambda t: shift(t, file="other.distcp"), "lies outside the files"),
    "negative offset": (lambda t: shift(t, offset=-1), "greater than or equal to 0"),
    "chunk too large": (lambda t: shift(t, sizes=[6]), "lies outside its tensor"),
    "chunk too small": (lambda t: shift(t, sizes=[4]), "do not fill it"),
    "more elements than bytes": (
        lambda t: (shift(t, sizes=[10**15]), t["tensors"]["model.norm"].update(shape=[10**15])),
        "fewer bytes than elements",
    ),
    "dimensions": (lambda t: shift(t, sizes=[5, 1]), "dimensions"),
    "field missing": (lambda t: t.pop("step"), "step: Field required"),
    "shape of strings": (lambda t: t["tensors"]["model.norm"].update(shape=["5"]), "valid integer"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, forgery: str) -> None:
    change, reason = FORGERIES[forgery]
    path = save(tmp_path, 1, make_tensors(1))
    rewrite(path, change)  # type: ignore[arg-type]
    with pytest.raises(DamagedCheckpointError, match=reason):
        open_checkpoint(path)


def test_a_tensor_that_is_not_what_the_manifest_says(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.zeros(6)})

    def reshape(tree: dict) -> None:
        tree["tensors"]["a"].update(shape=[2, 3])
        tree["tensors"]["a"]["chunks"][0].update(offsets=[0, 0], sizes=[2, 3])

    rewrite(path, reshape)
    with pytest.raises(DamagedCheckpointError, match="its tensors cannot be read"):
        open_checkpoint(path).read()


def test_an_unknown_dtype_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.zeros(6)})
    rewrite(path, lambda tree: tree["tensors"]["a"].update(dtype="load"))
    with pytest.raises(UserError, match="'load' is no dtype"):
        open_checkpoint(path).read()


def test_a_newer_format_asks_for_an_update(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {})
    rewrite(path, lambda tree: tree.update(format_version=2))
    with pytest.raises(UserError, match=r"format version 2, newer than 1.*update phalanx"):
        open_checkpoint(path)


def failing(number: int) -> Points:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    return Points({"checkpoint.tensors-written": refuse})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_the_bytes_needed(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    with pytest.raises(UserError, match=r"no room for a checkpoint of \d{5} bytes .*keep_last"):
        save(tmp_path, 2, make_tensors(2), points=failing(number))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert found(tmp_path).state == {"version": 1}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_is_told(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1, make_tensors(1))
    with pytest.raises(UserError, match=rf"cannot be written \({os.strerror(number)}\); make the folder writable"):
        save(tmp_path, 2, make_tensors(2), points=failing(number))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    reached: list[str] = []
    with pytest.raises(UserError, match="no room for a checkpoint"):
        save(tmp_path, 1, make_tensors(1), points=Points({"checkpoint.begin": lambda **_: reached.append("begin")}))
    assert not reached
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.errors import UserError
folder = Path(sys.argv[1])
save(folder, 1, {"weight": torch.zeros(10)}, {"version": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    save(folder, 2, {f"weight{i}": torch.zeros(10_000) for i in range(10)}, {"version": 2})
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_system_refusing_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    """A real refusal of write(2) while torch packs a tensor, by a limit on the size of files."""
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "has no room for a checkpoint of" in result.stdout
    assert found(tmp_path).state == {"version": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    # Another program took the room after we looked.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 10**9))
    save(tiny_disk, 1, {"weight": torch.zeros(10)}, {"version": 1})
    with pytest.raises(UserError, match=r"no room for a checkpoint of \d+ bytes"):
        save(tiny_disk, 2, {f"weight{i}": torch.zeros(100_000) for i in range(5)})
    assert [path.name for path in tiny_disk.iterdir()] == ["step-00000001"]
    assert found(tiny_disk).state == {"version": 1}


def test_a_read_only_disk(tiny_disk: Path) -> None:
    save(tiny_disk, 1, make_tensors(1), {"version": 1})
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        save(tiny_disk, 2, make_tensors(2))
    assert found(tiny_disk).state == {"version": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    save(tmp_path, 1, make_tensors(1), {"version": 1})
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(UserError, match="make the folder writable"):
            save(tmp_path, 2, make_tensors(2))
        assert found(tmp_path).state == {"version": 1}
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "checkpoints", 1, {})


def test_reading_while_another_saves_the_same_and_further_steps(tmp_path: Path, exchanging: bool) -> None:
    """Whatever a reader gets is one of the versions written, never a mixture."""
    save(tmp_path, 1, {"weight": torch.full((50,), 0.0)}, {"version": 0})

    def write() -> None:
        for version in range(1, 40):
            save(tmp_path, 1 + version // 10, {"weight": torch.full((50,), float(version))}, {"version": version})

    child = os.fork()
    if child == 0:
        write()
        os._exit(0)
    seen = set()
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        checkpoint = newest(tmp_path, lambda _: None)
        if checkpoint is None and not exchanging:
            continue  # between two renames
        assert checkpoint is not None
        version = checkpoint.state["version"]
        seen.add(version)
        try:
            weight = checkpoint.read()["weight"]
        except DamagedCheckpointError:
            continue  # replaced between opening and reading, which is told
        assert set(weight.tolist()) == {float(version)}
    assert found(tmp_path).state == {"version": 39}
    assert len(seen) > 1
