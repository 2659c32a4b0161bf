"""An executor without a thread: work runs immediately, in the thread that submits it.

A simulation plugs it in where production has threads, so that a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


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
