"""The user code watchdog: it interrupts code that hangs, so that one key does not stop all others.

It checks four times within the limit and interrupts a turn that it sees at every check. It counts checks, not
seconds: a process that was suspended for an hour has not hung. In a process's main thread (a Spark task,
`LocalRunner.run`) a signal interrupts even blocking calls. In other threads an exception is raised at the
next step of Python code; a call that blocks indefinitely is reported instead.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from millpond.statestore.errors import InvalidError, check

_CHECKS_IN_LIMIT: Final = 4
_INTERRUPTIONS_MAX: Final = 2
"""Code that survives this many interruptions is stuck."""

_STEPS_TO_ARRIVE: Final = 1_000
"""Python delivers such an exception at a turn of a loop."""

OnStuck = Callable[[InvalidError], None]
"""Receives the error of code that cannot be interrupted, in the watchdog's thread."""


class CodeTimeoutError(BaseException):
    """Raised within user code that exceeds its time limit; no `Exception`, which the code might catch and ignore."""


class UserCodeWatchdog:
    """Enforces the time limit of one computation's code per key's turn; used by one thread at a time.

    Without ``on_stuck``, code that cannot be interrupted is interrupted again at every limit.
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
        self._checks = 0
        self._interruptions = 0

    def error(self) -> InvalidError:
        return InvalidError(
            "user code exceeds its time limit",
            computation=self._computation,
            key=self._key,
            user_code_timeout_ms=self._timeout_ms,
        )

    def begin(self, key: str) -> None:
        """Start a key's turn; from now on `CodeTimeoutError` may be raised in this thread.

        After a stuck turn it raises `CodeTimeoutError` at once: the run has given up on this thread.
        """
        if self._is_stuck:
            raise CodeTimeoutError
        self._key = key
        self._turn += 1
        self._is_running = True

    def end(self) -> None:
        """End the turn; `CodeTimeoutError` is not raised after this returns."""
        with self._lock:
            self._is_running = False
            if self._was_raised:
                # The exception may not have arrived yet: absorb it here, or it would hit the engine's own code.
                self._was_raised = False
                _await_raised()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the turns of a bundle, which must run in this thread."""
        # An exception right at a turn's end may have interrupted `end` itself.
        self._is_running = False
        is_main = threading.current_thread() is threading.main_thread()
        may_use_signals = is_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        with self._by_signal() if may_use_signals else self._by_thread():
            yield

    @contextmanager
    def _by_signal(self) -> Iterator[None]:
        def interrupt(_number: int, _frame: FrameType | None) -> None:
            if self._count_check():
                raise CodeTimeoutError

        before = signal.signal(signal.SIGALRM, interrupt)
        every_s = self._timeout_ms / _CHECKS_IN_LIMIT / 1_000
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def _by_thread(self) -> Iterator[None]:
        done = threading.Event()
        watched = threading.get_ident()
        watcher = threading.Thread(
            target=self._check_until, args=(done, watched), name="millpond-code-limit", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _check_until(self, done: threading.Event, watched: int) -> None:
        while not done.wait(self._timeout_ms / _CHECKS_IN_LIMIT / 1_000):
            with self._lock:
                if not self._count_check():
                    continue
                if self._interruptions <= _INTERRUPTIONS_MAX or self._on_stuck is None:
                    self._was_raised = True
                    _raise_in(watched, CodeTimeoutError)
                    continue
                self._is_stuck = True
            self._on_stuck(self.error())
            return

    def _count_check(self) -> bool:
        """Count a check; return True when the same turn has been seen for the whole limit."""
        if not self._is_running or self._turn != self._seen:
            self._seen = self._turn
            self._checks = self._interruptions = 0
            return False
        self._checks += 1
        if self._checks < _CHECKS_IN_LIMIT:
            return False
        self._checks = 0
        self._interruptions += 1
        return True


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _await_raised() -> None:
    """Absorb an exception that is on its way to this thread, if there is one.

    A thread has one place for such an exception, so a second one replaces it and arrives in its stead.
    Emptying the place would not do: CPython would keep looking into it, slowly, and in 3.11 under a debugger
    indefinitely.
    """
    try:
        _raise_in(threading.get_ident(), CodeTimeoutError)
        for _ in range(_STEPS_TO_ARRIVE):
            continue
    except CodeTimeoutError:
        return
    check(False, "an exception for the own thread arrives at once")
