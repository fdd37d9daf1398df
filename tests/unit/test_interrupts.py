"""Signals that end a program: one way out for all, and none in the middle of a stop."""

from __future__ import annotations

import signal
import threading

import pytest

from cluster import interrupts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_arrive_as_ctrl_c_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with interrupts.as_ctrl_c():
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.as_ctrl_c(), interrupts.held():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_held_signal_arrives_once_at_the_end_of_the_block() -> None:
    steps = []

    def work() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("done")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["done"]


def test_an_error_inside_a_held_block_is_not_lost() -> None:
    with pytest.raises(ValueError, match="inside"):
        with interrupts.held():
            raise ValueError("inside")


def test_threads_are_let_through() -> None:
    ran = []

    def work() -> None:
        with interrupts.held():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
