"""Which step is written next into a ring of slots that readers share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.sharing.slots import DisagreementError, SlotRing


class TestRing:
    def test_steps_are_written_once_everybody_let_go(self) -> None:
        ring = SlotRing(index=0, ranks=1, ahead=2, expected=2)
        ring.join(7)
        assert ring.due() is None
        for step in range(3):
            ring.want(7, step, step * 4, 4)
        assert ring.due() == (0, 0, 4)
        ring.wrote()
        assert ring.due() == (1, 4, 4)
        ring.wrote()
        assert ring.due() is None  # the one that has not come yet will want step 0 first
        ring.join(8)
        assert ring.want(8, 0, 0, 4)
        assert ring.want(8, 1, 4, 4)
        assert ring.due() is None
        assert not ring.want(8, 2, 8, 4)
        assert ring.due() == (2, 8, 4)

    def test_a_step_that_nobody_waits_for_any_more_is_not_written(self) -> None:
        ring = SlotRing(index=0, ranks=1, ahead=2, expected=1)
        ring.join(1)
        ring.want(1, 0, 0, 4)
        ring.leave(1)
        assert ring.due() is None
        assert ring.is_over

    def test_a_step_out_of_turn(self) -> None:
        ring = SlotRing(index=0, ranks=1, ahead=2, expected=1)
        ring.join(1)
        with pytest.raises(DisagreementError, match="step 1 was asked for, step 0 was expected"):
            ring.want(1, 1, 0, 4)

    @given(data=st.data(), readers=st.integers(1, 4), ahead=st.integers(1, 3))
    @settings(max_examples=40, deadline=None)
    def test_nobody_ever_reads_a_slot_that_was_filled_again(
        self, data: st.DataObject, readers: int, ahead: int
    ) -> None:
        """Readers join, ask, read and leave in any order; all that stay come to the end."""
        ring, slots, steps = SlotRing(index=0, ranks=1, ahead=ahead, expected=readers), [-1] * ahead, 6
        read = dict.fromkeys(range(readers), -1)  # -1: has not come
        asked = dict.fromkeys(range(readers), 0)
        alive = set(range(readers))
        for _ in range(400):
            moves = [(r, "join") for r in alive if read[r] < 0]
            moves += [(r, "ask") for r in alive if read[r] >= 0 and asked[r] < min(steps, read[r] + ahead)]
            moves += [(r, "read") for r in alive if 0 <= read[r] < asked[r] and read[r] < ring.written]
            moves += [(0, "write")] if ring.due() else []
            if not moves:
                break
            reader, move = data.draw(st.sampled_from(moves))
            if move == "join":
                ring.join(reader)
                read[reader] = 0
            elif move == "ask":
                ring.want(reader, asked[reader], 4 * asked[reader], 4)
                asked[reader] += 1
            elif move == "write":
                slots[ring.written % ahead] = ring.written
                ring.wrote()
            else:
                assert slots[read[reader] % ahead] == read[reader]
                read[reader] += 1
                if data.draw(st.integers(0, 20)) == 0:
                    alive.discard(reader)
                    ring.leave(reader)
        assert all(read[reader] == steps for reader in alive)
