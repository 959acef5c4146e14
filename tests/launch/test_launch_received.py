"""Signals collected through a pipe."""

from __future__ import annotations

import os
import signal
import threading

from phalanx.ipc.stop_request import ReceivedSignals

GUARD_S = 240.0


def test_what_comes_is_given_once_and_in_order() -> None:
    with ReceivedSignals([signal.SIGUSR1, signal.SIGUSR2]) as received:
        assert received.take() == []
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        taken = received.take(GUARD_S)
        assert taken == [signal.SIGUSR2, signal.SIGUSR1]
        assert received.take() == []


def test_others_wake_who_waits_and_are_not_given() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        with ReceivedSignals([signal.SIGUSR1]) as received:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert received.take(GUARD_S) == []
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


def test_one_that_was_blocked_is_collected_and_blocked_again() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        with ReceivedSignals([signal.SIGUSR1]) as received:
            assert received.take(GUARD_S) == [signal.SIGUSR1]
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_outside_the_main_thread_none_comes_and_nothing_changes() -> None:
    handler, taken = signal.getsignal(signal.SIGUSR1), []

    def collect() -> None:
        with ReceivedSignals([signal.SIGUSR1]) as received:
            taken.append((received.take(), signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    assert taken == [([], handler)]
