"""`phalanx checkpoint convert`: into other files or dtypes, weights only, from plain DCP, from and to Hugging Face.

What is written is durable, with checksums, and there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from phalanx import __version__
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import check_file
from phalanx.checkpoint.format.dcp_index import INDEX, index_bytes
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, MANIFEST, SUMS, FileEntry, Manifest, Meta, TensorEntry
from phalanx.checkpoint.format.plain_dcp import PlainCheckpoint, open_plain
from phalanx.checkpoint.format.stored_tensors import Reader, Recut, same
from phalanx.checkpoint.storage.location import open_store
from phalanx.cli.checkpoint_paths import Place, bytes_bar, one_place
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.train.weights.hf_folders import export_run, import_config


@dataclass(frozen=True)
class Origin:
    """The checkpoint that is converted, whatever wrote it."""

    place: Place
    step: int
    tensors: Mapping[str, TensorEntry]
    state: Any
    meta: Meta
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _write_checkpoint(
    folder: str, origin: Origin, state: Any, recut: Recut, reader: Reader, done: Callable[[int], None]
) -> str:
    """Write a checkpoint into `folder` (a path or URL), which holds none yet, and return where it is.

    `done` is called with the number of bytes written since.
    """
    store, meta = open_store(folder), origin.meta
    if store.names() or store.keys("latest-"):
        raise UserError("holds checkpoints already", cure="name a new folder", field="TARGET", value=folder)

    def content(file: str) -> Iterator[memoryview]:
        for part in recut.content(file, reader):
            yield part
            done(len(part))

    try:
        area = store.begin(origin.step, meta.attempt, uuid.uuid4().hex)
        try:
            files: list[FileEntry] = []
            for name in recut.names():
                written = store.write(area, name, content(name))
                files.append(FileEntry(**written.model_dump() | {"sums": recut.sums[name]}))
            tensors = recut.tensors()
            files.insert(0, store.write(area, INDEX, [index_bytes(tensors)]))
            files[0] = FileEntry(**files[0].model_dump())
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                step=origin.step,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                phalanx_version=__version__,
                torch_version=str(torch.__version__),
                attempt=meta.attempt,
                config_sha256=manifests.config_sha256(meta.config),
                config=dict(meta.config),
                state=state,
                metrics=origin.metrics,
                tensors=tensors,
                files=files,
            )
            encoded = manifests.encode(manifest)
            store.write(area, MANIFEST, [encoded])
            store.write(area, SUMS, [manifests.sums_text(files, hashlib.sha256(encoded).hexdigest())])
            return f"{store.url.rstrip('/')}/{store.publish(area, origin.step)}"
        except BaseException:
            store.discard(area)
            raise
    except OSError as error:
        cure = "free space there, or choose another folder"
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError(problem, cure=cure, field="TARGET", value=folder) from error


_DTYPES = click.Choice(["float32", "bfloat16", "float16"])
# What torchtitan and DCP's state-dict functions keep beside the weights.
_NOT_WEIGHTS = ("optimizer.", "optim.", "lr_scheduler.", "dataloader.", "train_state.", "rng.", "ema.")
_STEP_FOLDER = re.compile(r"step-(\d+)")


@click.command("convert")
@click.argument("source")
@click.argument("target")
@click.option("--to", type=click.Choice(["checkpoint", "hf", "config"]), help="What to make; default: see above.")
@click.option("--files", type=click.IntRange(1), default=1, show_default=True, help="Files of tensors to write.")
@click.option("--dtype", type=_DTYPES, help="Round weights to this; with --weights-only or to Hugging Face.")
@click.option("--weights-only", is_flag=True, help="Leave out optimizer, state of the loader, random numbers.")
@click.option("--step", type=click.IntRange(0), help="Optimizer steps done, where a plain checkpoint does not say.")
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with transformers (Hugging Face).")
def convert_command(
    source: str,
    target: str,
    to: str | None,
    files: int,
    dtype: str | None,
    weights_only: bool,
    step: int | None,
    check: bool,
) -> None:
    """Make TARGET from the checkpoint or run SOURCE (of a run, its newest checkpoint). TARGET must be new.

    \b
    checkpoint   the same tensors in --files files, with checksums; SOURCE may be a folder of plain DCP (torchtitan).
                 Of a run folder also its config and tokenizer, so that TARGET can be used as a run.
    hf           a folder that transformers loads, from a run.
    config       a config for `phalanx train` that starts from a Hugging Face folder; the default where SOURCE is one.

    A checkpoint is read by any number of ranks whatever its files: --files is for whoever copies or serves them.
    """  # fmt: skip
    kind = to or ("config" if _is_huggingface(Path(source)) else "checkpoint")
    if kind == "config":
        import_config(Path(source), Path(target), click.echo, check=check)
    elif kind == "hf":
        export_run(Path(source), Path(target), click.echo, dtype=dtype or "float32", check=check)
    else:
        _convert(source, target, files, dtype, weights_only, step)


def _convert(source: str, target: str, files: int, dtype: str | None, weights_only: bool, step: int | None) -> None:
    if dtype is not None and not weights_only:
        problem = "would round the optimizer's state too, from which no run can go on"
        raise UserError(problem, cure="add --weights-only", field="--dtype", value=dtype)
    origin = _origin(one_place(source), step)
    names = [n for n in origin.tensors if not weights_only or _is_weight(n, origin.tensors)]
    if not names:
        cure = "leave out --weights-only; see `phalanx checkpoint show` for its tensors"
        raise UserError("holds no weights", cure=cure, field=origin.place.url)
    recut = Recut({name: same(origin.tensors[name], name, dtype) for name in names}, files)
    is_run = Path(source, "checkpoints").is_dir() and Path(source, "config.json").is_file()
    run = Path(source) if is_run and "://" not in target else None
    folder = str(Path(target) / "checkpoints") if run is not None else target
    state = {} if weights_only else origin.state
    with (
        Reader(origin.place.url, origin.tensors, origin.place.files.open) as reader,
        bytes_bar("writing", recut.data_bytes) as done,
    ):
        written = _write_checkpoint(folder, origin, state, recut, reader, done)
    if run is not None:  # what makes a folder of checkpoints a run that can be sampled from and trained on
        shutil.copyfile(run / "config.json", Path(target) / "config.json")
        if (run / "tokenizer").is_dir():
            shutil.copytree(run / "tokenizer", Path(target) / "tokenizer", dirs_exist_ok=True)
    for note in [] if weights_only else origin.notes:
        click.echo(note)
    size = f"{units.size(recut.data_bytes)} in {len(recut.names())} files"
    click.echo(f"{origin.place.url} is now {written} ({len(names):,} of {len(origin.tensors):,} tensors, {size})")


def _origin(place: Place, step: int | None) -> Origin:
    """What is converted, held against its checksums where it has any."""
    if place.is_plain:
        return _plain_origin(place, step)
    manifest = place.examine()
    with bytes_bar("checking", manifest.size_bytes) as done:
        for file in manifest.files:
            check_file(place.files, file)
            done(file.size_bytes)
    meta = Meta(manifest.config, manifest.attempt)
    return Origin(place, manifest.step, manifest.tensors, manifest.state, meta, dict(manifest.metrics))


def _plain_origin(place: Place, step: int | None) -> Origin:
    found = open_plain(place.files)
    state: dict[str, Any] = {}
    left = dict(found.unreadable)
    for name, value in found.other.items():
        try:
            state[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            left[name] = f"{type(value).__name__} has no place in JSON"
    notes = [f"left out {name}: {reason}" for name, reason in left.items()]
    return Origin(place, _plain_step(found, state, step), found.tensors, {"dcp": state}, Meta(), {}, notes)


def _plain_step(found: PlainCheckpoint, state: Mapping[str, Any], given: int | None) -> int:
    """As given, as the training state says, or as the folder is called."""
    if given is not None:
        return given
    if "train_state.step" in found.tensors:
        return int(found.read(["train_state.step"])["train_state.step"])
    if isinstance(state.get("train_state.step"), int):
        return int(state["train_state.step"])
    named = _STEP_FOLDER.fullmatch(found.files.name)
    if named is None:
        raise UserError("does not say how many steps were done", cure="give --step", field=found.files.url)
    return int(named[1])


def _is_weight(name: str, names: Mapping[str, Any]) -> bool:
    """Whether a tensor is one of the model: under ``model.`` where anything is, else under no other known heading."""
    if any(other.startswith("model.") for other in names):
        return name.startswith("model.")
    return not name.startswith(_NOT_WEIGHTS)


def _is_huggingface(path: Path) -> bool:
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


# Former names of `convert --to hf` and `--to config`, which go on working.


@click.command("export-hf")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dtype", type=_DTYPES, default="float32", show_default=True)
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with transformers.")
def export_command(run: Path, folder: Path, dtype: str, check: bool) -> None:
    """Write the newest checkpoint of RUN as a new FOLDER that transformers loads."""
    export_run(run, folder, click.echo, dtype=dtype, check=check)


@click.command("import-hf")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with transformers.")
def import_command(folder: Path, config: Path, check: bool) -> None:
    """Write CONFIG, a file for `phalanx train` that starts from the weights of the Hugging Face FOLDER."""
    import_config(folder, config, click.echo, check=check)
