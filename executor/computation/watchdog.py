"""
Code limits: user code that hangs is interrupted, so that one key does not stop all others.

Whoever runs user code says when a key's turn begins and ends; a watcher looks four times within the
limit, and if it has seen the same turn at each look, interrupts it. It counts looks, not seconds: a
process that was itself stopped for an hour has not hung. Looking costs user code nothing.

In a process's main thread (a Spark task, `LocalRunner.run`) a signal interrupts, also within calls that
block, such as a sleep or a read from a socket. In other threads an exception is raised at the next
step of Python code; a call that blocks for ever cannot be interrupted there, and is told of instead.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from millpond.statestore.check import check
from millpond.statestore.errors import InvalidError

__all__ = ["CodeTimeoutError", "OnStuck", "UserCodeWatchdog"]

_LOOKS: Final = 4
_INTERRUPTIONS_MAX: Final = 2
"""Code that does not end at so many interruptions is stuck."""

_STEPS_TO_ARRIVE: Final = 1_000
"""Python looks for such an exception at each turn of a loop."""

OnStuck = Callable[[InvalidError], None]
"""Told of code that cannot be interrupted, in a thread that is not its own."""


class CodeTimeoutError(BaseException):
    """
    Raised within user code that has taken too long.

    It is no `Exception`, so that code which catches those does not go on.
    """


class UserCodeWatchdog:
    """
    How long one computation's code may take for a key; for one thread at a time.

    Args:
        computation: its name, for errors.
        timeout_ms: the limit for a key's turn, and for each record or timer when they run one by one.
        on_stuck: told if the code cannot be interrupted; ``None``: it is interrupted again and again.
    """

    def __init__(self, computation: str, timeout_ms: float, on_stuck: OnStuck | None = None) -> None:
        self._computation = computation
        self._timeout_ms = timeout_ms
        self._on_stuck = on_stuck
        self._lock = threading.Lock()
        self._key = ""
        self._turn = 0
        self._is_running = False
        self._is_stuck = False
        self._was_raised = False
        self._seen = -1
        self._looks = 0
        self._interruptions = 0

    def error(self) -> InvalidError:
        """
        What is said of the turn at hand.
        """
        return InvalidError(
            "user code takes longer than it may",
            computation=self._computation,
            key=self._key,
            user_code_timeout_ms=self._timeout_ms,
        )

    # -- for who runs the code -------------------------------------------------------------

    def begin(self, key: str) -> None:
        """
        A key's code begins; from here on `CodeTimeoutError` may be raised.

        Raises:
            CodeTimeoutError: code was stuck before; when it comes back nobody waits for more of it.
        """
        if self._is_stuck:
            raise CodeTimeoutError
        self._key = key
        self._turn += 1
        self._is_running = True

    def end(self) -> None:
        """
        It has ended; once this has returned nothing is raised any more.
        """
        with self._lock:
            self._is_running = False
            if self._was_raised:
                # It may have ended by itself at the last moment: what is still on its way arrives here.
                self._was_raised = False
                _await_raised()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """
        Look after the turns of a bundle, which must run in this thread.
        """
        # An exception that came right at a turn's end may have kept `end` from being heard.
        self._is_running = False
        if _may_use_signals():
            with self._by_signal():
                yield
        else:
            with self._by_thread():
                yield

    # -- watching --------------------------------------------------------------------------

    @contextmanager
    def _by_signal(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self._on_signal)
        every_s = self._timeout_ms / _LOOKS / 1_000
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._hangs():
            raise CodeTimeoutError

    @contextmanager
    def _by_thread(self) -> Iterator[None]:
        done = threading.Event()
        watched = threading.get_ident()
        watcher = threading.Thread(
            target=self._look_until, args=(done, watched), name="millpond-code-limit", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _look_until(self, done: threading.Event, watched: int) -> None:
        while not done.wait(self._timeout_ms / _LOOKS / 1_000):
            with self._lock:
                if not self._hangs():
                    continue
                if self._interruptions <= _INTERRUPTIONS_MAX or self._on_stuck is None:
                    self._was_raised = True
                    _raise_in(watched, CodeTimeoutError)
                    continue
                self._is_stuck = True
            self._on_stuck(self.error())
            return

    def _hangs(self) -> bool:
        """
        Whether the same turn has been seen at so many looks as make a limit.
        """
        if not self._is_running or self._turn != self._seen:
            self._seen = self._turn
            self._looks = self._interruptions = 0
            return False
        self._looks += 1
        if self._looks < _LOOKS:
            return False
        self._looks = 0
        self._interruptions += 1
        return True


def _may_use_signals() -> bool:
    """
    Whether this is the main thread, and nobody else uses the alarm.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """
    Have an exception raised in a thread at its next step.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _await_raised() -> None:
    """
    Catch what is on its way to this thread, if anything is; afterwards nothing is.

    A thread has one place for such an exception, so one more replaces it and arrives in its stead. To empty the place
    would do as well, but CPython would go on looking into it: slowly, and in 3.11 under a debugger for ever.
    """
    try:
        _raise_in(threading.get_ident(), CodeTimeoutError)
        for _ in range(_STEPS_TO_ARRIVE):
            continue
    except CodeTimeoutError:
        return
    check(False, "an exception for the own thread arrives at once")
