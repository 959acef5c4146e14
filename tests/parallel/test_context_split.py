"""How a sequence is shared by context ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.parallel.context.blocks import Piece, SequenceSplit


@given(st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_pieces_cover_the_sequence_once(size: int, unit: int, balanced: bool) -> None:
    split = SequenceSplit(2 * size * unit, size, balanced)
    held = [p for rank in range(size) for piece in split.pieces(rank) for p in range(piece.start, piece.stop)]
    assert sorted(held) == list(range(split.length))
    assert all(sum(p.length for p in split.pieces(rank)) == split.local_length for rank in range(size))


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)))
def test_what_a_piece_sees_is_what_its_queries_see(a: int, b: int, length: int, window: int | None) -> None:
    queries, keys = Piece(a, a + length), Piece(b, b + length)
    seen = [
        j <= i and (window is None or i - j < window)
        for i in range(queries.start, queries.stop)
        for j in range(keys.start, keys.stop)
    ]
    assert queries.sees(keys, window) == any(seen)
    assert queries.sees_all(keys, window) == all(seen)


def test_zig_zag_gives_every_rank_as_many_keys() -> None:
    split = SequenceSplit(32, 4, balanced=True)
    work = [sum(p + 1 for piece in split.pieces(rank) for p in range(piece.start, piece.stop)) for rank in range(4)]
    assert len(set(work)) == 1


def test_with_windows_only_neighbours_are_needed() -> None:
    split = SequenceSplit(64, 4, balanced=False)
    needs = {(r, o): split.needed(r, o, 9) for r in range(4) for o in range(4)}
    assert {pair for pair, pieces in needs.items() if pieces} == {
        (r, o) for r in range(4) for o in (r, r - 1) if o >= 0
    }


def test_an_uneven_sequence_is_refused_with_its_cure() -> None:
    with pytest.raises(UserError, match=r"parallel\.context = 3.*30 tokens.*multiple of 6|multiple of 6"):
        SequenceSplit(32, 3, balanced=True)
