"""A helper thread: it runs work in parallel with its owner, and the process can exit without waiting for it.

The pools of the standard library are waited for when a process ends, so user code that blocks for
ever in one would keep the process for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Queue
from typing import Final, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
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
