"""The checksum of the elements in the end of a ``torch.save`` archive, which is a ZIP file. Torch-free.

The archive writer of torch leaves the checksum out of the header before the elements (bit 3 of the flags) and puts it
behind them: into a data descriptor, with which the end begins, and into the directory (APPNOTE.TXT 4.3.9, 4.3.12). So
an archive can be written in one pass over elements that are not known when its ends are made.
"""

from __future__ import annotations

import struct

_DESCRIPTOR = b"PK\x07\x08"
_DIRECTORY_ENTRY = struct.Struct("<4s12xL8xHHH12x")  # signature, CRC-32, lengths of name, extra field and comment
_ENTRY_SIGNATURE = b"PK\x01\x02"
_ELEMENTS = b"/data/0"
_CRC_IN_ENTRY = 16


def with_crc32(tail: bytes, crc32: int) -> bytes:
    """The end of an archive, with the CRC-32 of its elements in it.

    Raises:
        ValueError: it is not the end of an archive of a tensor.
    """
    content = bytearray(tail)
    for place in (len(_DESCRIPTOR), _directory_entry(tail) + _CRC_IN_ENTRY):
        struct.pack_into("<L", content, place, crc32)
    return bytes(content)


def _directory_entry(tail: bytes) -> int:
    """Where in `tail` the directory's entry of the elements begins."""
    if not tail.startswith(_DESCRIPTOR):
        raise ValueError("the end of an archive does not begin with a data descriptor")
    place = tail.find(_ENTRY_SIGNATURE)
    while place >= 0 and tail.startswith(_ENTRY_SIGNATURE, place):
        _, _, name_length, extra_length, comment_length = _DIRECTORY_ENTRY.unpack_from(tail, place)
        first = place + _DIRECTORY_ENTRY.size
        if tail[first : first + name_length].endswith(_ELEMENTS):
            return place
        place = first + name_length + extra_length + comment_length
    raise ValueError("the directory of an archive does not name the elements of a tensor")
