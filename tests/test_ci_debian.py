"""The script that installs what some tests run against, on machines that are made up: what goes wrong is said, and CI
goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "debian"
TOOLS = ("bash", "env", "timeout", "mktemp", "tail", "sed", "rm", "touch", "chmod")
SLURM = ("munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "scontrol")
PROMETHEUS = ("prometheus", "promtool")
PROGRAMS = (*SLURM, "chromium", *PROMETHEUS)

ALL = "tests against a real Slurm, browser and Prometheus"

INSTALLS = f"""
here=${{0%/*}}
add() {{ for name in "$@"; do touch "$here/$name"; chmod +x "$here/$name"; done; }}
case "$*" in
*update*) exit 0 ;;
*"install -y --no-install-recommends slurmctld slurmd slurm-client munge") add {" ".join(SLURM)} ;;
*"install -y --no-install-recommends chromium fonts-dejavu-core") add chromium ;;
*"install -y --no-install-recommends prometheus") add {" ".join(PROMETHEUS)} ;;
*) exit 9 ;;
esac
"""


class Machine:
    """One on which only these programs are."""

    def __init__(self, folder: Path, user: int = 0) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.has("id", f"echo {user}")

    def has(self, name: str, does: str) -> None:
        """A program."""
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)

    def runs(self) -> str:
        """What the script says; it must not fail."""
        bash = shutil.which("bash") or "bash"
        environ = {"PATH": str(self.bin), "TMPDIR": str(self.bin.parent)}
        done = subprocess.run([bash, str(SCRIPT)], env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert {path.name for path in self.bin.parent.iterdir()} == {"bin"}
        return done.stdout


def test_where_it_is_there_nothing_is_done(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in PROGRAMS:
        machine.has(name, "")
    assert machine.runs() == ""


def test_root_installs_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("apt-get", INSTALLS)
    assert machine.runs() == ""
    assert machine.runs() == ""


def test_others_install_it_with_sudo(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=1000)
    machine.has("apt-get", INSTALLS)
    assert machine.runs() == f"this is not root, and there is no sudo: {ALL} are skipped\n"
    machine.has("sudo", '[ "$2" = true ] && exit 1; exit 0')
    assert "sudo asks for a password" in machine.runs()
    machine.has("sudo", '[ "$1" = -n ] && shift; [ "$1" = true ] || exec "$@"')
    assert machine.runs() == ""
    assert (machine.bin / "slurmctld").exists()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (
            'case "$*" in *update*) exit 0 ;; esac; echo "E: Unable to locate package slurmd"; exit 100',
            "apt-get install for Slurm ended with status 100",
        ),
        ('echo "Err:1 http://deb.debian.org bookworm InRelease"; exit 100', "apt-get update ended with status 100"),
        ("exit 124", "apt-get update took longer than 300 s"),
        ("exit 0", "Slurm: after its installation these are not in PATH: munged slurmctld"),
    ],
)
def test_what_goes_wrong_is_said(tmp_path: Path, does: str, words: str) -> None:
    machine = Machine(tmp_path)
    machine.has("apt-get", does)
    said = machine.runs()
    assert words in said and said.endswith("are skipped\n")
    for line in ("E: Unable to locate package slurmd", "Err:1 http://deb.debian.org bookworm InRelease"):
        assert (line in does) == (line in said)


def test_what_cannot_be_installed_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("apt-get", f'case "$*" in *slurmd*) echo "E: no slurmd"; exit 100 ;; esac\n{INSTALLS}')
    said = machine.runs()
    assert "E: no slurmd" in said and said.endswith("Slurm could not be installed: tests against it are skipped\n")
    assert [name for name in PROGRAMS if not (machine.bin / name).exists()] == list(SLURM)


def test_a_machine_without_apt_is_told(tmp_path: Path) -> None:
    assert "no apt-get" in Machine(tmp_path).runs()
