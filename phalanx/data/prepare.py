"""Text to token files: plan, reuse what is there, encode the rest in parallel, and publish a manifest.

A source's folder is complete when it has a manifest, which names its files. Everything in it is written aside and
renamed, and units of work leave a record when they are done: a killed preparation goes on from its finished units.
Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import folder_lock, friendly_os_errors, write_json
from phalanx.data.config import TOKEN_KINDS, DataConfig, SourceConfig
from phalanx.data.encoding.encode import NAMED_SKIPS, collect_splits, delete_strangers, reusable_records, unit_digests
from phalanx.data.encoding.encoding_processes import EncodingJob, encode_all
from phalanx.data.sources.input_files import (
    HoldOutRule,
    InputFile,
    WorkUnit,
    between_characters,
    between_words,
    list_files,
    listing_digest,
    plan_units,
)
from phalanx.data.tokenizers.spec import TokenizerSpec, find_spec, make_spec, open_tokenizer
from phalanx.data.tokens.foreign_tokens import token_splits
from phalanx.data.tokens.prepared_corpus import (
    FORMAT,
    MANIFEST,
    Prepared,
    PreparedSource,
    combined_digest,
    dataset_folder,
    hold_out_tail,
    read_manifest,
    read_source,
    source_name,
    write_splits,
)


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
        workers: processes; None: one per core this process may use.
        progress: called with where it stands.

    Raises:
        UserError: input that is missing, empty or wrong, a full disk, a folder without the right to write.
    """
    report = progress or (lambda _: None)
    spec = make_spec(config, lambda stage: report(Progress(stage)))
    sources = tuple(
        _prepare_source(config, source, source_name(source, i), spec, config.held_out, workers, report)
        for i, source in enumerate(config.sources)
    )
    held_out = tuple(
        _prepare_source(config, source, source_name(source, i), spec, 1.0, workers, report)
        for i, source in enumerate(config.validation_sources)
    )
    prepared = _with_held_out(config, Prepared(open_tokenizer(spec), sources, held_out, spec.key))
    if any(source.splits != before.splits for source, before in zip(prepared.sources, sources, strict=True)):
        report(Progress("too few documents to hold some out: the end of the text is, instead"))
    _check(config, prepared)
    return prepared


def open_prepared(config: DataConfig) -> Prepared:
    """Open what `prepare` made, without looking at the inputs (they may be gone); UserError: it was not prepared."""
    spec = find_spec(config)

    def find(source: SourceConfig, number: int, held_out: float) -> PreparedSource:
        folder = dataset_folder(config, source, spec.key, held_out)
        return read_source(folder, source_name(source, number), source.weight)

    sources = tuple(find(source, i, config.held_out) for i, source in enumerate(config.sources))
    held_out = tuple(find(source, i, 1.0) for i, source in enumerate(config.validation_sources))
    return _with_held_out(config, Prepared(open_tokenizer(spec), sources, held_out, spec.key))


def _with_held_out(config: DataConfig, prepared: Prepared) -> Prepared:
    """`prepared`, the end of a text held out where the choice of documents leaves nothing to evaluate or to train on:
    a corpus of one file, or of few documents."""
    if not config.held_out:
        return prepared

    def of(given: SourceConfig, source: PreparedSource) -> PreparedSource:
        train, needed = source.splits.get("train"), config.sequence_length + 1
        too_short = train is None or train.num_tokens < needed
        if given.kind in TOKEN_KINDS or not (too_short or prepared.num_tokens("validation") < 2):
            return source
        return hold_out_tail(source, config.held_out, needed)

    return replace(prepared, sources=tuple(map(of, config.sources, prepared.sources)))


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
            job = EncodingJob(source, spec, HoldOutRule(held_out, config.validation_seed), folder)
            with friendly_os_errors(folder):
                # Without a manifest the folder counts as unprepared, should this process be killed from here on.
                (folder / MANIFEST).unlink(missing_ok=True)
                if source.kind in TOKEN_KINDS:
                    content = _adopt(job, files, name, report)
                else:
                    tail = held_out if config.validation_split == "tail" and held_out < 1 else 0.0
                    cuts = open_tokenizer(spec).cuts
                    cut = between_characters if cuts.anywhere else between_words if cuts.at_all_words else None
                    content = _encode(job, plan_units(source, files, tail, cut), name, workers, report)
                about = {
                    "format": FORMAT,
                    "source": source.model_dump(mode="json"),
                    "tokenizer": spec.key,
                    "inputs": inputs,
                    "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                }
                write_json(folder / MANIFEST, about | content)
    return read_source(folder, name, source.weight)


def _encode(job: EncodingJob, units: list[WorkUnit], name: str, workers: int | None, report: Report) -> dict[str, Any]:
    """Encode the units that have no valid record; what the manifest says of them. The folder's lock is held."""
    folder = job.folder
    report(Progress(f"{name}: looking for finished work"))
    records = reusable_records(folder, units)
    missing = [unit for unit in units if unit.signature not in records]
    total_bytes = sum(unit.num_bytes for unit in units)
    done_bytes, num_tokens = total_bytes - sum(unit.num_bytes for unit in missing), 0

    def count(more_bytes: int, more_tokens: int) -> None:
        nonlocal done_bytes, num_tokens
        done_bytes += more_bytes
        num_tokens += more_tokens
        report(Progress(f"{name}: tokenising", min(done_bytes, total_bytes), total_bytes, num_tokens))

    count(0, 0)
    for record in encode_all(missing, job, workers, count):
        records[record.signature] = record
    ordered = [records[unit.signature] for unit in units]
    delete_strangers(folder, ordered)
    tokenizer = open_tokenizer(job.tokenizer)
    return {
        "fingerprint": combined_digest([job.tokenizer.key, unit_digests(ordered)]),
        "has_end_of_text": tokenizer.end_of_text is not None,
        "num_skipped": sum(record.num_skipped for record in ordered),
        "skipped": [document for record in ordered for document in record.skipped][:NAMED_SKIPS],
        "splits": write_splits(collect_splits(folder, ordered, tokenizer.vocab_size), folder),
    }


def _adopt(job: EncodingJob, files: list[InputFile], name: str, report: Report) -> dict[str, Any]:
    """Check token files that are used in place; what the manifest says of them."""
    report(Progress(f"{name}: checking token files"))
    vocab_size = open_tokenizer(job.tokenizer).vocab_size
    splits, content = token_splits(job.source, files, vocab_size, job.rule.held_out, job.folder)
    return {
        "fingerprint": content,
        "has_end_of_text": job.source.document_token >= 0,
        "num_skipped": 0,
        "skipped": [],
        "splits": write_splits(splits, job.folder),
    }


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
    if not any(source.splits["train"].num_trained for source in prepared.sources):
        raise UserError(
            "no token of the text to train on is a target: what is trained on is empty in all documents",
            cure="name the fields of prompt and answer (`prompt_field`, `field`) on the source",
            field="data.sources",
        )
    if config.validation_sources and prepared.num_tokens("validation") < 2:
        raise UserError("have no text", cure="add text, or leave them out", field="data.validation_sources")
