"""
An executor without a thread: work is done at once, by whoever submits it.

A simulation plugs it in where production has threads, so that a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, ParamSpec, TypeVar

__all__ = ["INLINE", "InlineExecutor"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class InlineExecutor(Executor):
    """
    Does the work in the calling thread; shutting it down changes nothing.
    """

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """
        Do the work now; whatever it raises is raised to whoever asks for the result.
        """
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as failure:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(failure)
        return future


INLINE: Final = InlineExecutor()
"""The one that everybody may share: it keeps nothing."""
