"""The helper process: compactions and collections outside of the process that runs the pipeline.

A compaction is pure Python and Arrow work over whole files. In a thread it takes turns with the
superstep for the interpreter; in a process of its own it costs the superstep nothing, and on a
busy machine it yields. What it prepares is only a file: it lands by the owner's commit or not at all.

The process is a fresh interpreter that imports this package and nothing of the program that uses
it (no fork of a threaded process, no second run of the user's main module). It ends when its
standard input does, which is when its parent ends, however that happens; it is started when there
is first something to do, and again if it was killed.

A helper thread: it runs work in parallel with its owner, and the process can exit without waiting for it.

The pools of the standard library are waited for when a process ends, so user code that blocks for
ever in one would keep the process for ever.

An executor without a thread: work runs immediately, in the thread that submits it.

A simulation plugs it in where production has threads, so that a run repeats itself.
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
"""It yields to the supersteps, yet is not starved by them: files must not come faster than they are compacted."""

_START: Final = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from millpond.executor.maintenance.helpers import serve; serve(int(sys.argv[2]))"


class HelperProcess(Executor):
    """Does work in another process, one piece after the other; what it is given must pickle.

    A piece that cannot be done because the process died, or did not answer in time, fails
    with `UnavailableError`; the next one gets a fresh process.

    Args:
        name: of the thread that waits for it.
        answer_s_max: how long a piece may take, in seconds; ten minutes by default.

    Example::

        with HelperProcess("millpond-upkeep") as helper:
            compacted = helper.submit(compact_files, objects, compaction, rules, fence=fence, token=token).result()
    """

    def __init__(self, name: str, *, answer_s_max: float | None = None) -> None:
        self._answer_s_max = answer_s_max
        self._is_aborted = False
        self._waiting = ThreadPoolExecutor(1, name)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """The number of the process; ``None`` while there is none."""
        return None if self._child is None else self._child.pid

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Have ``fn`` called in the other process."""
        return self._waiting.submit(self._ask, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the process once it has done what it is doing."""
        self._waiting.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._end()

    def abort(self) -> None:
        """Have what is being done fail, and do nothing more; `shutdown` has still to be called."""
        self._is_aborted = True
        child = self._child
        if child is not None:
            # It ends with its input, whatever it is doing.
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
        command = [sys.executable, "-c", _START, paths, str(os.getpid())]
        # The parent decides when it ends; an interrupt typed at a terminal goes to both. What this
        # thread holds back, the process holds back from its first instruction on.
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
            # It ends with its input.
            _stream(child.stdin).close()
        try:
            child.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _stream(child.stdout).close()


def serve(parent: int) -> None:
    """What the helper process does: one piece of work after the other, until its input or its parent ends.

    Args:
        parent: number of the process that started it.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a library prints must not get between the answers.
    os.dup2(2, 1)
    questions: Queue[bytes] = Queue(maxsize=1)
    # One folder for what the work puts aside, so that it goes with the process.
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
        # Its input ends with the parent, unless a fork of the parent keeps the pipe open.
        while os.getppid() == parent:
            if _is_ready(stream, select.POLLIN, _LOOK_S):
                questions.put(_read(stream, None))
    except (OSError, EOFError):
        pass
    # Files are put whole or not at all; an uncommitted file is an orphan.
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
        # Nothing is written where there is no room after all.
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
    # Unlike `select`, a poll takes files of any number.
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

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: Queue[Callable[[], None] | None] = Queue(maxsize=_WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Queue work after all earlier submissions; an exception is raised where the result is read.

        Waits while too much is waiting already.
        """
        future: Future[_Result] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as failure:  # noqa: BLE001 - raised where the result is read
                future.set_exception(failure)

        self._work.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no more work; submitted work is completed, and waited for unless ``wait`` is false."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        work = self._work.get()
        while work is not None:
            work()
            # What is done is not kept until there is something new.
            del work
            work = self._work.get()


class InlineExecutor(Executor):
    """Does the work in the calling thread; shutting it down changes nothing."""

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Run the work now; an exception is raised where the result is read."""
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as failure:  # noqa: BLE001 - raised where the result is read
            future.set_exception(failure)
        return future


INLINE: Final = InlineExecutor()
"""The shared instance; it has no state."""
