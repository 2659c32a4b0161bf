"""Executors for work beside the supersteps: a process, a thread that nobody waits for, and none at all.

A compaction is pure Python and Arrow work over whole files. In a thread it takes turns with the superstep for the
interpreter; in another process it costs the superstep nothing, and on a busy machine it yields. It prepares only a
file, which lands by the owner's commit or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import IO, Any, Final, ParamSpec, TypeVar

from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_LENGTH: Final = struct.Struct("<Q")
_ANSWER_S_MAX: Final = 600.0
_END_S_MAX: Final = 5.0
_LOOK_S: Final = 1.0
_NICENESS: Final = 5
"""Yields to the supersteps without starving: files must not come faster than they are compacted."""

_START: Final = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from millpond.executor.maintenance.helpers import serve; serve(int(sys.argv[2]))"


class HelperProcess(Executor):
    """Does work in another process, one piece after the other; its functions and arguments must pickle.

    The process is a fresh interpreter that imports this package and nothing of the program that uses it: no fork of a
    threaded process, no second run of the user's main module. It starts with the first work, and again if it was
    killed. It ends when its standard input does, so it ends with its parent, however that happens.

    Work fails with `UnavailableError` if the process died or did not answer within ``answer_s_max`` seconds (ten
    minutes by default); the next work gets a fresh process.
    """

    def __init__(self, name: str, *, answer_s_max: float | None = None) -> None:
        self._answer_s_max = answer_s_max
        self._is_aborted = False
        self._waiting = ThreadPoolExecutor(1, name)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        return None if self._child is None else self._child.pid

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        return self._waiting.submit(self._ask, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the process once it has done its present work."""
        self._waiting.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._end()

    def abort(self) -> None:
        """Let the present work fail and refuse more; `shutdown` must still be called."""
        self._is_aborted = True
        child = self._child
        if child is not None:
            # The child ends with its input, whatever it is doing.
            _stream(child.stdin).close()

    def _ask(self, work: Callable[[], _Result]) -> _Result:
        question = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            child = self._running()
            answer_s_max = self._answer_s_max or _ANSWER_S_MAX
            _write(_stream(child.stdin), question, answer_s_max)
            answer = _read(_stream(child.stdout), answer_s_max)
        except (OSError, EOFError, ValueError) as error:
            self._end()
            raise UnavailableError("the helper process has ended", cause=str(error)) from error
        succeeded, value = pickle.loads(answer)  # noqa: S301 - our own process's words
        if not succeeded:
            raise value
        result: _Result = value
        return result

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_aborted:
            raise EOFError("it was aborted")
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        paths = json.dumps([path or str(Path.cwd()) for path in sys.path])
        # Otherwise a json.py of the current folder would run: the parent's paths come only after the first import.
        command = [sys.executable, "-P", "-c", _START, paths, str(os.getpid())]
        # An interrupt typed at a terminal goes to both, but only the parent may decide when the child ends. The child
        # inherits the blocked signal from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_blocking(_stream(self._child.stdin).fileno(), False)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            _stream(child.stdin).close()
        try:
            child.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _stream(child.stdout).close()


def serve(parent: int) -> None:
    """Do one piece of work after the other in the helper process, until its input or the process ``parent`` ends."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # Output that a library prints must not get between the answers.
    os.dup2(2, 1)
    questions: Queue[bytes] = Queue(maxsize=1)
    # One folder for all scratch files, so that it can be removed when the process ends.
    tempfile.tempdir = tempfile.mkdtemp(prefix="millpond-helper-")
    listener = threading.Thread(
        target=_listen, args=(questions, parent, tempfile.tempdir), name="millpond-listener", daemon=True
    )
    listener.start()
    with contextlib.suppress(BrokenPipeError):
        while True:
            _write(answers, pickle.dumps(_done(questions.get()), protocol=pickle.HIGHEST_PROTOCOL), None)


def _listen(questions: Queue[bytes], parent: int, scratch: str) -> None:
    """Read requests; end the process, whatever it is doing, when the parent closes the pipe."""
    stream = os.fdopen(os.dup(0), "rb", buffering=0)
    try:
        # The input ends with the parent, unless a fork of the parent keeps the pipe open: hence the second check.
        while os.getppid() == parent:
            if _is_ready(stream, select.POLLIN, _LOOK_S):
                questions.put(_read(stream, None))
    except (OSError, EOFError):
        pass
    # Safe at any moment: files are put whole or not at all, and an uncommitted file is an orphan.
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _done(question: bytes) -> tuple[bool, Any]:
    try:
        return True, pickle.loads(question)()  # noqa: S301 - our own process's words
    except MillpondError as error:
        return False, error
    except Exception as error:  # noqa: BLE001 - raised to the caller that reads the result
        return False, UnavailableError("the helper process failed", cause=f"{type(error).__name__}: {error}")


def _write(stream: IO[bytes], data: bytes, timeout_s: float | None) -> None:
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        if timeout_s is not None and not _is_ready(stream, select.POLLOUT, timeout_s):
            raise EOFError("it does not listen")
        # A non-blocking write may find no room after all, and returns None.
        rest = rest[stream.write(rest) or 0 :]


def _read(stream: IO[bytes], timeout_s: float | None) -> bytes:
    return _read_exactly(stream, _LENGTH.unpack(_read_exactly(stream, _LENGTH.size, timeout_s))[0], timeout_s)


def _read_exactly(stream: IO[bytes], length: int, timeout_s: float | None) -> bytes:
    parts, missing = [], length
    while missing:
        if timeout_s is not None and not _is_ready(stream, select.POLLIN, timeout_s):
            raise EOFError("it does not answer")
        part = stream.read(missing)
        if not part:
            raise EOFError("its output has ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _is_ready(stream: IO[bytes], event: int, timeout_s: float) -> bool:
    # Unlike `select`, `poll` takes descriptors above 1,023.
    waiting = select.poll()
    waiting.register(stream, event)
    return bool(waiting.poll(timeout_s * 1_000))


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise InvalidError("a helper process has pipes")
    return stream


_WAITING_MAX: Final = 1_024


class HelperThread(Executor):
    """Does one piece of work after the other; the thread ends with `shutdown`, or with the process.

    A process waits for the standard library's pools before it ends, so user code that blocks indefinitely in one would
    keep the process indefinitely.
    """

    def __init__(self, name: str) -> None:
        self._work: Queue[Callable[[], None] | None] = Queue(maxsize=_WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Queue work after all earlier submissions, and wait while too much is waiting already."""
        future: Future[_Result] = Future()
        self._work.put(partial(_run_into, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no more work; submitted work is completed, and waited for unless ``wait`` is False."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        work = self._work.get()
        while work is not None:
            work()
            # Otherwise the finished work and its arguments would stay alive until the next one arrives.
            del work
            work = self._work.get()


class InlineExecutor(Executor):
    """Does the work in the thread that submits it; a simulation uses it in place of threads, so that a run repeats."""

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()
        _run_into(future, partial(fn, *args, **kwargs))
        return future


def _run_into(future: Future[_Result], work: Callable[[], _Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as failure:  # noqa: BLE001 - raised where the result is read
        future.set_exception(failure)


INLINE: Final = InlineExecutor()
