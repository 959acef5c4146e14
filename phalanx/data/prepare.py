"""Text to token files: plan, reuse what is there, encode the rest in parallel, and publish a manifest.

A source's folder is complete when it has a manifest, which names its files. Everything in it is written aside and renamed,
and units of work leave a record when they are done, so that a killed preparation goes on from its finished units.
Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.data.config import DataConfig, SourceConfig
from phalanx.data.encode import Rule
from phalanx.data.lock import folder_lock, friendly_os_errors
from phalanx.data.pool import encode_all
from phalanx.data.prepared import (
    FORMAT,
    MANIFEST,
    Prepared,
    PreparedSource,
    dataset_folder,
    read_manifest,
    read_source,
    source_name,
    write_splits,
)
from phalanx.data.reuse import collect_splits, delete_strangers, reusable_records, unit_digests
from phalanx.data.sources import listing_digest, list_files, plan_units
from phalanx.data.tokenizers import TokenizerSpec, find_spec, open_tokenizer
from phalanx.data.worker import Job


@dataclass(frozen=True)
class Progress:
    """How far preparing is: the stage in words, and bytes of input and tokens of output where they are known."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0
    num_tokens: int = 0


Report = Callable[[Progress], None]


def prepare(config: DataConfig, *, workers: int | None = None, progress: Report | None = None) -> Prepared:
    """Make sure that the tokens of `config` are on disk, and open them. Instant when nothing changed.

    Args:
        config: what to prepare.
        workers: processes; None: one per core this process may use.
        progress: called with where it stands.

    Raises:
        UserError: input that is missing, empty or wrong, a full disk, a folder without the right to write.
    """
    report = progress or (lambda _: None)
    spec = find_spec(config.tokenizer)
    sources = tuple(
        _prepare_source(config, source, source_name(source, i), spec, config.held_out, workers, report)
        for i, source in enumerate(config.sources)
    )
    held_out = tuple(
        _prepare_source(config, source, source_name(source, i), spec, 1.0, workers, report)
        for i, source in enumerate(config.validation_sources)
    )
    prepared = Prepared(open_tokenizer(spec), sources, held_out)
    _check(config, prepared)
    return prepared


def open_prepared(config: DataConfig) -> Prepared:
    """Open what `prepare` made, without looking at the inputs (they may be gone).

    Raises:
        UserError: it has not been prepared.
    """
    spec = find_spec(config.tokenizer)

    def find(source: SourceConfig, number: int, held_out: float) -> PreparedSource:
        folder = dataset_folder(config, source, spec.key, held_out)
        return read_source(folder, source_name(source, number), source.weight)

    sources = tuple(find(source, i, config.held_out) for i, source in enumerate(config.sources))
    held_out = tuple(find(source, i, 1.0) for i, source in enumerate(config.validation_sources))
    return Prepared(open_tokenizer(spec), sources, held_out)


def _prepare_source(
    config: DataConfig,
    source: SourceConfig,
    name: str,
    spec: TokenizerSpec,
    held_out: float,
    workers: int | None,
    report: Report,
) -> PreparedSource:
    folder = dataset_folder(config, source, spec.key, held_out)
    files = list_files(source)
    with folder_lock(folder, lambda: report(Progress(f"{name}: another process is preparing it, waiting"))):
        inputs = listing_digest(files)
        manifest = read_manifest(folder)
        if manifest is None or manifest["inputs"] != inputs:
            tail = held_out if config.validation_split == "tail" and held_out < 1 else 0.0
            units = plan_units(source, files, tail)
            job = Job(source, spec, Rule(held_out, config.validation_seed), folder)
            with friendly_os_errors(folder):
                _encode(job, units, name, inputs, workers, report)
    return read_source(folder, name, source.weight)


def _encode(job: Job, units: list[Any], name: str, inputs: str, workers: int | None, report: Report) -> None:
    """Encode the units that have no valid record, then publish the manifest. The folder's lock is held."""
    folder = job.folder
    (folder / MANIFEST).unlink(missing_ok=True)
    report(Progress(f"{name}: looking for finished work"))
    records = reusable_records(folder, units)
    missing = [unit for unit in units if unit.signature not in records]
    total = sum(unit.num_bytes for unit in units)
    state = Progress(f"{name}: tokenising", total - sum(unit.num_bytes for unit in missing), total)
    report(state)
    done_bytes, num_tokens = state.done_bytes, 0

    def beat(more_bytes: int, more_tokens: int) -> None:
        nonlocal done_bytes, num_tokens
        done_bytes, num_tokens = done_bytes + more_bytes, num_tokens + more_tokens
        report(Progress(state.stage, min(done_bytes, total), total, num_tokens))

    for record in encode_all(missing, job, workers, beat):
        records[record.signature] = record
    ordered = [records[unit.signature] for unit in units]
    splits = collect_splits(folder, ordered, job.tokenizer.vocab_size)
    manifest = {
        "format": FORMAT,
        "source": job.source.model_dump(mode="json"),
        "tokenizer": job.tokenizer.key,
        "inputs": inputs,
        "fingerprint": unit_digests(ordered),
        "has_end_of_text": job.tokenizer.end_of_text,
        "num_skipped": sum(record.num_skipped for record in ordered),
        "skipped": [name for record in ordered for name in record.skipped][:5],
        "splits": write_splits(splits, folder),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(folder / MANIFEST, manifest)
    delete_strangers(folder, ordered)


def _check(config: DataConfig, prepared: Prepared) -> None:
    needed = config.sequence_length + 1
    for source in prepared.sources:
        split = source.splits.get("train")
        if split is None or split.num_tokens < needed:
            raise UserError(
                f"source {source.name!r} has {0 if split is None else split.num_tokens} tokens to train on, "
                f"a sample needs {needed}",
                cure="add text, hold less out, or make data.sequence_length smaller",
                field="data.sequence_length",
                value=config.sequence_length,
            )
    if (config.held_out or config.validation_sources) and prepared.num_tokens("validation") < 2:
        documents = sum(part.num_documents for _, part in prepared.split("train"))
        raise UserError(
            f"no document was held out ({documents} documents in all)",
            cure="raise it, set data.validation_split = 'tail' for a corpus of one text file, "
            "give data.validation_sources, or set it to 0 to hold nothing out",
            field="data.validation_fraction",
            value=config.validation_fraction,
        )


def folder_of(prepared: Prepared) -> Path:
    """The folder that holds a prepared corpus' sources."""
    return prepared.sources[0].folder.parent
