"""Compactions as Spark jobs: each is one task in some executor's Python worker, started by a thread of the driver.

A task opens the store itself, as a superstep's does, and returns what it wrote. It is pure with
respect to the store: a repeated, speculated or cancelled task leaves a file that no commit names,
which is an orphan. Only the driver's commit makes a compaction take effect.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import pyarrow as pa

from millpond.gc.compaction import Compacted
from millpond.statestore.errors import MillpondError, UnavailableError

if TYPE_CHECKING:
    from pyspark import SparkContext

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

POOL: Final = "millpond-compactions"
"""Spark's scheduler pool of these jobs: where the session schedules fairly, they share with the supersteps."""

_LOG = logging.getLogger("millpond")
_CANCEL_AGAIN_S: Final = 0.2


class SparkCompactions(Executor):
    """Runs functions in Spark's executors, each as a job of one task; functions and results must pickle.

    If the job fails or is cancelled, the future raises `UnavailableError`; a `MillpondError` of the
    function is raised as it is.

    Args:
        context: the Spark context.
        tag: marks the jobs, and no others, so that they can be cancelled.
        at_once: how many jobs run at a time.

    Example::

        compactions = SparkCompactions(spark.sparkContext, tag="millpond-compactions-1", at_once=2)
        compacted = compactions.submit(compact_in_task, work).result()
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
        """Call ``fn`` in a task; the future has its result."""
        future = self._threads.submit(self._run, partial(fn, *args, **kwargs))
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work.

        Args:
            wait: whether to wait for the jobs under way.
            cancel_futures: whether to cancel them.
        """
        if cancel_futures:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures)
        running = set(self._futures)
        while cancel_futures and running:
            # A job that was about to start could not be cancelled yet: hence the loop.
            self._cancel()
            running = wait_for(running, timeout=_CANCEL_AGAIN_S).not_done
        self._threads.shutdown(wait=wait)

    def _cancel(self) -> None:
        try:
            self._context.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001 - a context that was stopped has no jobs either
            _LOG.debug("jobs could not be cancelled: %s", error)

    def _run(self, work: Callable[[], _Result]) -> _Result:
        if self._is_closed:
            raise UnavailableError("the run is over")
        try:
            # This thread has a thread of the JVM to itself, whose tags and pool no superstep sees.
            self._context.addJobTag(self._tag)
            self._context.setLocalProperty("spark.scheduler.pool", POOL)
            self._context.setJobDescription("Millpond compacts an interval")
            answers = self._context.parallelize([pickle.dumps(work)], 1).mapPartitions(_answers).collect()
        except Exception as error:
            raise UnavailableError(
                "a Spark job of upkeep failed", cause=str(error).partition("\n")[0]
            ) from error
        succeeded, value = pickle.loads(answers[0])  # noqa: S301 - our own task's words
        if not succeeded:
            raise value
        result: _Result = value
        return result


class SparkCompactionWorker:
    """Prepares compactions in Spark jobs.

    Args:
        executor: runs them.
    """

    def __init__(self, executor: SparkCompactions) -> None:
        self._executor = executor

    def compact(self, work: partial[Compacted]) -> Future[Compacted]:
        """Prepare a compaction; the future has its uncommitted file."""
        return self._executor.submit(compact_in_task, work)

    def shutdown(self) -> None:
        """Cancel the jobs under way and stop."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _answers(questions: Iterable[bytes]) -> Iterator[bytes]:
    """Run a task; a `MillpondError` is returned, as a retry would repeat it."""
    for question in questions:
        try:
            answer = True, pickle.loads(question)()  # noqa: S301 - our own driver's words
        except MillpondError as error:
            answer = False, error
        yield pickle.dumps(answer)


def compact_in_task(work: partial[Compacted]) -> Compacted:
    """`compact_files` in a Spark task: each attempt writes a file of its own, and scratch files go where Spark's do.

    Args:
        work: `compact_files` with its arguments, the file's token among them.
    """
    from pyspark import TaskContext

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
