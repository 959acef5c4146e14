"""What of an earlier, perhaps killed, preparation still holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.data.encoding.encode import SPLITS, UnitRecord, content_hash, record_file, token_dtype, unit_file
from phalanx.data.sources.files import Split, Unit
from phalanx.data.tokens.prepared import MANIFEST, PreparedSplit, combined_digest
from phalanx.data.tokens.shards import Shard

HEADER_BYTES = 128


def reusable_records(folder: Path, units: Sequence[Unit]) -> dict[str, UnitRecord]:
    """Records, by signature, of the units whose output is there and whose input is what it was.

    Files whose size and time of change are as recorded are taken as unchanged. Others are hashed: with the same content
    the unit holds (its record is not rewritten; the manifest will carry the new listing). A unit that shares a changed
    file with another is done again too, since a document may reach from one range of a file into the next.
    """
    records = {unit.signature: _read(folder, unit.signature) for unit in units}
    changed: set[str] = set()
    for unit in units:
        record = records[unit.signature]
        if record is not None and record.times != unit.times and record.content != content_hash(unit):
            changed.update(part.path for part in unit.parts)
            records[unit.signature] = None
    return {
        unit.signature: record
        for unit in units
        if (record := records[unit.signature]) is not None and not any(part.path in changed for part in unit.parts)
    }


def collect_splits(folder: Path, records: Sequence[UnitRecord], vocab_size: int) -> dict[Split, PreparedSplit]:
    """The splits that the units of a source make, in order; those without tokens are left out."""
    dtype = token_dtype(vocab_size).str
    result: dict[Split, PreparedSplit] = {}
    for split in SPLITS:
        parts = [(record.signature, record.splits[split]) for record in records]
        shards = tuple(
            Shard(
                tokens=unit_file(folder, signature, split, "tokens"),
                dtype=dtype,
                offset_bytes=HEADER_BYTES,
                num_tokens=part.num_tokens,
                starts=unit_file(folder, signature, split, "starts") if part.num_documents else None,
                starts_end=part.num_documents,
                mask=unit_file(folder, signature, split, "mask") if part.masked else None,
            )
            for signature, part in parts
            if part.num_tokens
        )
        if shards:
            result[split] = PreparedSplit(
                num_tokens=sum(part.num_tokens for _, part in parts),
                num_documents=sum(part.num_documents for _, part in parts),
                num_bytes=sum(part.num_bytes for _, part in parts),
                shards=shards,
            )
    return result


def unit_digests(records: Sequence[UnitRecord]) -> str:
    """One hash of everything the units wrote."""
    return combined_digest(
        f"{split} {what} {value}"
        for record in records
        for split, part in sorted(record.splits.items())
        for what, value in sorted(part.digests.items())
    )


def delete_strangers(folder: Path, records: Sequence[UnitRecord]) -> None:
    """Delete what earlier preparations left in `folder`: units of other inputs, files of killed processes."""
    mine = {record.signature for record in records}
    for path in folder.iterdir():
        if path.name not in (MANIFEST, "lock") and path.name.split(".")[0] not in mine:
            path.unlink(missing_ok=True)


def _read(folder: Path, signature: str) -> UnitRecord | None:
    try:
        record = UnitRecord.from_json(json.loads(record_file(folder, signature).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return record if all(_whole(folder, record, split) for split in record.splits) else None


def _whole(folder: Path, record: UnitRecord, split: str) -> bool:
    part = record.splits[split]
    return all(unit_file(folder, record.signature, split, what).is_file() for what in part.digests)
