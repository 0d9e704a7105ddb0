"""Ctrl-C is held back inside our calls, raised as they return, and never lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from checkfreq.keyboard import Keyboard


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keyboard(clock: Clock) -> Iterator[Keyboard]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Keyboard(clock=clock)
    made.attach()
    yield made
    made.detach()
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_outside_of_our_calls_is_raised_at_once(keyboard: Keyboard) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_one_inside_is_raised_once_as_the_outermost_call_returns(keyboard: Keyboard) -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt):
        with keyboard:
            with keyboard:
                interrupt()
                interrupt()
                passed.append("inner")
            passed.append("outer")
        passed.append("after")
    assert passed == ["inner", "outer"]
    with keyboard:
        pass


def test_a_second_one_after_five_seconds_is_raised_where_it_comes(
    keyboard: Keyboard, clock: Clock
) -> None:
    with pytest.raises(KeyboardInterrupt), keyboard:
        interrupt()
        clock.now_s += 4.9
        interrupt()
        clock.now_s += 0.1
        interrupt()
        pytest.fail("it was held back for longer")
    with keyboard:  # it is not raised again
        pass


def test_calls_in_other_threads_hold_nothing_back(keyboard: Keyboard) -> None:
    inside, leave = threading.Event(), threading.Event()

    def call() -> None:
        with keyboard:
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    leave.set()
    thread.join()


def test_a_notebook_that_sets_pythons_handler_before_each_cell_is_followed(
    keyboard: Keyboard,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keyboard.listen()
    held = False
    with pytest.raises(KeyboardInterrupt), keyboard:
        interrupt()
        held = True
    assert held


def test_a_users_handler_is_called_as_the_call_returns_and_an_ignored_signal_stays_so(
    clock: Clock,
) -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.getsignal(signal.SIGINT)
    for set_by_the_user, expected in ((handler, [signal.SIGINT]), (signal.SIG_IGN, [])):
        came.clear()
        signal.signal(signal.SIGINT, set_by_the_user)
        keyboard = Keyboard(clock=clock)
        keyboard.attach()
        with keyboard:
            interrupt()
            assert not came
        assert came == expected
        keyboard.detach()
        assert signal.getsignal(signal.SIGINT) is set_by_the_user
    signal.signal(signal.SIGINT, before)


def test_a_fork_in_the_midst_of_a_call_is_interrupted_at_once(keyboard: Keyboard) -> None:
    with keyboard:
        pid = os.fork()
        if pid == 0:
            try:
                interrupt()
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
