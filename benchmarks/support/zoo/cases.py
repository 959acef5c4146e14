"""What the zoo holds: scripts that are healthy, each with its pauses, and hangs with who is guilty of them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[3]
OWN = ROOT / "benchmarks" / "zoo"
SHARED = ROOT.parent / "shared"
"""Scripts and data of others, which are no part of the repository."""

SIGNAL_S, OTHERWISE_S = 25.0, 90.0
"""Within so long a hang is found: where a rank is stopped or dead, and else."""


@dataclass(frozen=True)
class Healthy:
    """A script that is to be left alone.

    Attributes:
        command: script and arguments, as a user gives them; the script's path is relative to the folder it is run in.
        prepare: fills that folder.
        pause_s: the longest time without a step that the script means to have; 0: none.
        steps: whether it makes any that torch sees.
        modules, programs: without which it cannot run.
        shared: files of `SHARED` without which it cannot run.
    """

    name: str
    command: tuple[str, ...]
    prepare: Callable[[Path], None]
    pause_s: float = 0.0
    steps: bool = True
    hosts: int = 1
    workers: int = 2
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why it cannot be run here; empty: it can."""
        lacking = [name for name in self.modules if importlib.util.find_spec(name) is None]
        lacking += [name for name in self.programs if shutil.which(name) is None]
        lacking += [str(SHARED / name) for name in self.shared if not (SHARED / name).exists()]
        return f"needs {', '.join(lacking)}" if lacking else ""


@dataclass(frozen=True)
class Hang:
    """Something that stops a job for good.

    Attributes:
        kind: of `hanging.py`; ``sigstop`` and ``sigkill`` come from outside.
        guilty: who is to be named where anybody is; empty: nobody can be.
        is_sure: whether the guilty have to be named, as evidence tells them from others; one rank alone has none.
        within_s: from the moment that it happens to the verdict.
        script: that a signal reaches; None: `hanging.py`.
        before: steps that come first, from which the usual one is known; of a script that makes none, seconds.
        is_in_pause: it happens some seconds after the script has begun one of its pauses.
        more: arguments of `hanging.py`.
    """

    name: str
    kind: str
    guilty: tuple[int, ...] = (1,)
    is_sure: bool = True
    within_s: float = OTHERWISE_S
    hosts: int = 2
    workers: int = 1
    script: Healthy | None = None
    before: int = 40
    is_in_pause: bool = False
    more: tuple[str, ...] = ()

    def missing(self) -> str:
        """As of a healthy script."""
        return self.script.missing() if self.script is not None else ""


def own(script: str) -> Callable[[Path], None]:
    """The script of ours alone."""

    def prepare(folder: Path) -> None:
        shutil.copyfile(OWN / script, folder / script)

    return prepare


def _pauses(what: str, pause_s: float, *more: str, hosts: int = 1) -> Healthy:
    command = ("pauses.py", "1000", what, "--seconds", str(pause_s), *more)
    return Healthy(what, command, own("pauses.py"), pause_s, hosts=hosts, workers=2 // hosts)


def _script(name: str, *arguments: str, pause_s: float = 0.0, **more: object) -> Healthy:
    script = f"{name.replace('-', '_')}.py"
    return Healthy(name, (script, *arguments), own(script), pause_s, **more)  # type: ignore[arg-type]


# Scripts of others


def _copy(folder: Path, *names: str) -> None:
    for name in names:
        source = SHARED / name
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_file():  # by content alone: what is shared cannot be written
                target = folder / (path.relative_to(source) if source.is_dir() else path.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())


def nanogpt(folder: Path) -> None:
    """Its folder, with the text made into token files by its own script, and what runs it on a CPU."""
    _copy(folder, "zoo/nanoGPT")
    own("alone.py")(folder)
    data = folder / "data" / "shakespeare_char"
    (data / "input.txt").write_bytes((SHARED / TEXT).read_bytes())
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, stdout=subprocess.DEVNULL)


def language_model(folder: Path) -> None:
    """Its folder, with the text cut in three."""
    _copy(folder, "zoo/pytorch-examples/word_language_model")
    lines = (SHARED / TEXT).read_text().splitlines(keepends=True)
    data = folder / "data" / "wikitext-2"
    data.mkdir(parents=True)
    for name, part in (("train", lines[:12_000]), ("valid", lines[12_000:14_000]), ("test", lines[14_000:16_000])):
        (data / f"{name}.txt").write_text("".join(part))


TEXT = "data/text/tinyshakespeare/input.txt"
_NANOGPT = ("zoo/nanoGPT/train.py", TEXT)
_LANGUAGE = ("zoo/pytorch-examples/word_language_model/main.py", TEXT)
_ON_CPU = (
    "alone.py train.py config/train_shakespeare_char.py --device=cpu --dtype=float32 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --lr_decay_iters=2000"
)


def _nanogpt(name: str, more: str, **rest: object) -> Healthy:
    command = tuple(f"{_ON_CPU} {more}".split())
    return Healthy(name, command, nanogpt, workers=1, shared=_NANOGPT, **rest)  # type: ignore[arg-type]


def _language(name: str, more: str, **rest: object) -> Healthy:
    command = ("main.py", "--emsize", "64", "--nhid", "64", "--epochs", "4", *more.split())
    return Healthy(name, command, language_model, workers=1, shared=_LANGUAGE, **rest)  # type: ignore[arg-type]


HEALTHY: Sequence[Healthy] = (
    _nanogpt("nanogpt", "--compile=False --max_iters=2000 --eval_interval=250 --eval_iters=200", pause_s=15),
    _nanogpt(
        "nanogpt-compiled", "--compile=True --max_iters=1000 --eval_interval=250 --eval_iters=20", programs=("g++",)
    ),
    _nanogpt(
        "nanogpt-accumulates",
        "--compile=False --max_iters=60 --eval_interval=20 --eval_iters=100 --gradient_accumulation_steps=64",
        pause_s=10,
    ),
    _language("language-model", "--use-optimizer --lr 0.001"),
    _language("language-model-by-hand", "--lr 20", steps=False),
    _language("language-model-transformer", "--model Transformer --nhead 2 --use-optimizer --lr 0.001"),
    _script("rank0-validates", "1000", pause_s=10),
    replace(_script("rank0-validates", "1000", pause_s=10, hosts=2, workers=1), name="rank0-validates-hosts"),
    _pauses("sleep", 20),
    _pauses("print", 20),
    _pauses("save", 12, "--every", "300", hosts=2),
    _pauses("slow-disk", 30),
    _pauses("download", 30, hosts=2),
    _pauses("receive", 100),
    _pauses("svd", 40),
    _pauses("garbage", 30),
    _pauses("measure", 40),
    _pauses("shuffle", 30),
    _script("slow-loader", "2000", pause_s=45),
    _script("compiles", "400", pause_s=60, programs=("g++",)),
    _script("accumulates", "40", pause_s=8),
    _script("curriculum", "200", pause_s=10),
    _script("gan", "2000", pause_s=15),
    _script("silent", pause_s=40, steps=False),
    _script("single", "2000", pause_s=20, workers=1),
    _script("hugging-face", "out", "300", pause_s=20, modules=("transformers", "accelerate")),
    _script("lightning-form", "8", pause_s=25, modules=("tqdm",)),
    _script("lightning-fit", "6", pause_s=20, modules=("lightning",)),
)

LEFT_OUT = {
    "pytorch-examples/imagenet/main.py": "needs torchvision, which has no build for this machine's torch",
    "pytorch-examples/distributed/ddp-tutorial-series/multigpu_torchrun.py": "calls torch.cuda.set_device and NCCL",
    "pytorch-examples/distributed/FSDP2/example.py": "ends at once without two accelerators",
    "pytorch-examples/distributed/minGPT-ddp/mingpt/main.py": "ends at once without two accelerators; needs hydra",
    "pytorch-examples/distributed/ddp/example.py": "ends at once without two accelerators",
    "nanoGPT/train.py with several ranks": "takes each rank for a CUDA device; it is run as one process",
}
"""Scripts of `SHARED` that cannot run unmodified on a CPU, and why."""

_BY_NAME = {case.name: case for case in HEALTHY}

HANGS: Sequence[Hang] = (
    Hang("stopped", "sigstop", within_s=SIGNAL_S),
    Hang("stopped-first", "sigstop", guilty=(0,), within_s=SIGNAL_S),
    Hang("killed", "sigkill", within_s=SIGNAL_S),
    Hang("deadlock", "deadlock"),
    Hang("deadlock-one-host", "deadlock", guilty=(2,), hosts=1, workers=4),
    Hang("busy-loop", "busy"),
    Hang("busy-loop-four", "busy", guilty=(2,), hosts=2, workers=2),
    Hang("flat-loop", "flat"),
    Hang("own-send-loops", "send"),
    Hang("deadlock-beside-polling", "polling"),
    Hang("fifo", "fifo", guilty=(0,)),
    Hang("traced", "traced"),
    Hang("main-thread-exits", "exits"),
    Hang("mismatched-collectives", "mismatched", guilty=(0,), is_sure=False),
    Hang("skipped-collective", "skipped", is_sure=False),
    Hang("skipped-collective-four", "skipped", guilty=(1,), is_sure=False, hosts=2, workers=2),
    Hang("all-sleep", "sleep", guilty=()),
    Hang("loader-stuck", "loader"),
    Hang("loaders-stuck", "loaders", guilty=()),
    Hang("deadlock-slow-steps", "deadlock", before=6, more=("--pace", "5")),
    Hang("stopped-hugging-face", "sigstop", within_s=SIGNAL_S, script=_BY_NAME["hugging-face"]),
    Hang("stopped-in-pause", "sigstop", within_s=SIGNAL_S, script=_BY_NAME["measure"], is_in_pause=True),
    Hang("killed-in-pause", "sigkill", within_s=SIGNAL_S, script=_BY_NAME["measure"], is_in_pause=True),
    Hang("stopped-silent", "sigstop", within_s=SIGNAL_S, script=_BY_NAME["silent"], before=20),
    Hang("stopped-nanogpt", "sigstop", (0,), False, SIGNAL_S, hosts=1, script=_BY_NAME["nanogpt"]),
)


@dataclass(frozen=True)
class Choice:
    """What is to be run, and what cannot be.

    Attributes:
        left_out: names, and why.
    """

    cases: list[Healthy | Hang]
    left_out: dict[str, str]


def choose(names: Sequence[str], *, hangs: bool) -> Choice:
    """Those of these names, or all; hangs instead of healthy ones.

    Raises:
        ValueError: there is none of a name.
    """
    known = [case.name for case in (HANGS if hangs else HEALTHY)]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"there is no case {wrong[0]!r}; there are {', '.join(known)}")
    wanted = [case for case in (HANGS if hangs else HEALTHY) if not names or case.name in names]
    left_out = {case.name: why for case in wanted if (why := case.missing())}
    return Choice([case for case in wanted if case.name not in left_out], left_out)
