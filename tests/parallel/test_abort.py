"""What the first rank to give up says, and who hears it."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from phalanx.core.errors import UserError
from phalanx.parallel import rendezvous
from phalanx.parallel.rendezvous import Abort

NO_ROOM = UserError("no room", cure="take less", field="train.micro_batch", value=4)


def test_all_hear_the_first_word_and_no_other() -> None:
    store = HashStore()
    first, second, third = (Abort(store, rank, 3) for rank in range(3))
    assert second.announced() is None
    first.announce(NO_ROOM)
    second.announce(UserError("something else", cure="wait"))
    for one in (second, third, third):
        assert str(one.announced()) == str(NO_ROOM)
    assert first.announced() is None, "it knows its own"


def test_who_serves_the_store_stays_until_all_have_heard() -> None:
    store = HashStore()
    server, other = Abort(store, 0, 2, serves=True, grace_s=30.0), Abort(store, 1, 2)
    server.linger()  # nobody has given up
    server.announce(NO_ROOM)
    lingering = threading.Thread(target=server.linger)
    lingering.start()
    lingering.join(0.2)
    assert lingering.is_alive()
    assert other.announced() is not None
    lingering.join(10)
    assert not lingering.is_alive()


def test_who_serves_the_store_stays_for_the_words_of_another_too() -> None:
    store = HashStore()
    server, other, last = (Abort(store, rank, 3, serves=rank == 0, grace_s=3600.0) for rank in range(3))
    other.announce(NO_ROOM)
    assert server.announced() is not None
    lingering = threading.Thread(target=server.linger, daemon=True)
    lingering.start()
    lingering.join(0.2)
    assert lingering.is_alive(), "one has not heard yet"
    assert last.announced() is not None
    lingering.join(60)
    assert not lingering.is_alive()


def test_of_ranks_that_say_the_same_one_is_first_and_has_not_to_wait_for_the_others() -> None:
    """As where rank 0 refuses something for all, and each raises that."""
    store = HashStore()
    abort = [Abort(store, rank, 3, serves=rank == 0, grace_s=3600.0) for rank in range(3)]
    for one in abort:
        one.announce(NO_ROOM)
    assert [one.announced() is None for one in abort] == [True, False, False]
    lingering = threading.Thread(target=abort[0].linger, daemon=True)
    lingering.start()
    lingering.join(60)
    assert not lingering.is_alive(), "all have heard why, for they say it themselves"


def test_a_rank_hears_once_whether_it_reads_or_says_something_of_its_own() -> None:
    store = HashStore()
    first, second = Abort(store, 0, 4), Abort(store, 1, 4)
    first.announce(NO_ROOM)
    assert second.announced() is not None
    second.announce(UserError("something else", cure="wait"))
    assert store.add("abort/heard", 0) == 1, "two more have not heard"


def test_a_rank_that_waits_is_ended_and_one_that_is_under_way_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ended, left = HashStore(), threading.Event(), threading.Event()
    monkeypatch.setattr(rendezvous.os, "_exit", lambda status: ended.set())
    Abort(store, 0, 3).announce(NO_ROOM)
    with Abort(store, 1, 3, look_s=0.01, grace_s=0.01).watched(lambda: False):
        assert ended.wait(120)
    ended.clear()

    def under_way() -> bool:
        left.set()
        return True

    with Abort(store, 2, 3, look_s=0.01, grace_s=0.01).watched(under_way):
        assert left.wait(120)
    assert not ended.is_set()


def test_the_first_to_fail_is_the_cause_for_all() -> None:
    store = HashStore()
    first, second, third = (Abort(store, rank, 3) for rank in range(3))
    assert third.cause() is None
    assert first.cause("ValueError: wrong") == (0, "ValueError: wrong")
    assert [one.cause("of its own") for one in (first, second)] == [(0, "ValueError: wrong")] * 2
    assert third.cause() == (0, "ValueError: wrong")


def test_alone_there_is_nobody_to_tell() -> None:
    alone = Abort(None)
    assert alone.cause("ValueError: wrong") is None
    alone.announce(NO_ROOM)
    alone.linger()
    with alone.watched(lambda: False):
        assert alone.announced() is None
