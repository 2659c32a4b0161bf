"""Compactions as Spark jobs of one task each, started by a thread of the driver.

A task opens the store itself and returns its result. It is pure with respect to the store: a repeated, speculated or
cancelled task leaves an orphan, a file that no commit names. A compaction takes effect only with the driver's commit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import pyarrow as pa
from pyspark import SparkContext, TaskContext

from millpond.gc.compaction import Compacted
from millpond.statestore.errors import MillpondError, UnavailableError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

POOL: Final = "millpond-compactions"
"""Spark's scheduler pool. With fair scheduling, it shares the session with the supersteps."""

_LOG = logging.getLogger("millpond")
_CANCEL_AGAIN_S: Final = 0.2


class SparkCompactions:
    """Prepares compactions, and runs any function, as Spark jobs of one task. Functions and results must pickle.

    A `MillpondError` of the function is raised unchanged. If the job fails or is cancelled, the future raises
    `UnavailableError`. ``tag`` marks the jobs, and no others, so that they can be cancelled.
    """

    def __init__(self, context: SparkContext, *, tag: str, at_once: int) -> None:
        self._context = context
        self._tag = tag
        self._threads = ThreadPoolExecutor(at_once, tag)
        self._futures: set[Future[Any]] = set()
        self._is_closed = False

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        future = self._threads.submit(self._run, partial(fn, *args, **kwargs))
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def compact(self, work: partial[Compacted]) -> Future[Compacted]:
        """Prepare a compaction. The future has its uncommitted file."""
        return self.submit(compact_in_task, work)

    def shutdown(self) -> None:
        """Accept no more work, and cancel the jobs under way."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        running = set(self._futures)
        while running:
            # A job that was about to start escapes one cancellation, so repeat it.
            try:
                self._context.cancelJobsWithTag(self._tag)
            except Exception as error:  # noqa: BLE001 - a context that was stopped has no jobs either
                _LOG.debug("jobs could not be cancelled: %s", error)
            running = wait_for(running, timeout=_CANCEL_AGAIN_S).not_done
        self._threads.shutdown(wait=True)

    def _run(self, work: Callable[[], _Result]) -> _Result:
        if self._is_closed:
            raise UnavailableError("the run is over")
        try:
            # This thread has its own thread in the JVM, so its tag and pool do not affect supersteps.
            self._context.addJobTag(self._tag)
            self._context.setLocalProperty("spark.scheduler.pool", POOL)
            self._context.setJobDescription("Millpond compacts an interval")
            answers = self._context.parallelize([pickle.dumps(work)], 1).mapPartitions(_answers).collect()
        except Exception as error:
            raise UnavailableError(
                "a Spark job of upkeep failed", cause=str(error).partition("\n")[0]
            ) from error
        succeeded, value = pickle.loads(answers[0])  # noqa: S301 - written by the driver's own task
        if not succeeded:
            raise value
        result: _Result = value
        return result


def _answers(questions: Iterable[bytes]) -> Iterator[bytes]:
    """Run a task, and return a `MillpondError`, because a retry would fail in the same way."""
    for question in questions:
        try:
            answer = True, pickle.loads(question)()  # noqa: S301 - written by this run's driver
        except MillpondError as error:
            answer = False, error
        yield pickle.dumps(answer)


def compact_in_task(work: partial[Compacted]) -> Compacted:
    """Run `compact_files` in a Spark task. Each attempt writes its own file, with scratch files in Spark's folder."""
    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    token = f"{work.keywords['token']}\n{attempt}"
    try:
        return work(
            token=hashlib.sha256(token.encode()).hexdigest()[:32],
            scratch=os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None,
        )
    finally:
        # The worker process continues with supersteps, whose soft state needs the memory.
        pa.default_memory_pool().release_unused()
