"""The run of a pipeline that streaming queries of the user's own feed, each through a function of its stream.

All functions of a pipeline and a store share one run: one set of leases, one superstep at a time, one sequence of
commits. The first batch of any query opens it, `EmbeddedRun.close` or a failure ends it, and the next batch of a query
that was started since then opens it again. What ends it is thus known to each query:

- A failure is everyone's: the other queries that fed the run fail with the same error at their next batch.
- A query that is stopped in the middle of a batch ends the run too, since Spark cancels what is under way; that is no
  failure, and the next batch of another query opens it again.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from millpond.executor.pipeline.names import SIGNALS
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.run import SparkRun
from millpond.statestore.errors import InternalError, InvalidError, QueryStoppedError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG: Final = logging.getLogger("millpond")
_OPENINGS_MAX: Final = 10
"""So often a batch may find that the run has been closed under its hands."""

_TICK_MS: Final = 250.0

_OWNERS: Final[dict[tuple[str, str], EmbeddedRun]] = {}
"""Whose run is open, or being opened, in this process, by the place of the store and the pipeline's name."""

_CLAIM: Final = threading.Lock()
"""Held while `_OWNERS` changes."""


class _Runner(Protocol):
    def open(self, pipeline: EnginePipeline) -> SparkRun: ...


@dataclass(slots=True, eq=False)
class OpenRun:
    """A run from its opening to its end, as the queries that feed it know it.

    Attributes:
        run: the run.
        functions: what consumes the batches of a stream, by stream.
        failure: what has ended it; ``None`` while it is open, and where it was closed.
        is_over: whether it has ended.
    """

    run: SparkRun
    functions: dict[str, Callable[[DataFrame, int], None]] = field(default_factory=dict)
    failure: BaseException | None = None
    is_over: bool = False

    def raise_failure(self) -> None:
        """Raise what has ended the run, if it has failed.

        Raises:
            MillpondError: the failure.
        """
        if self.failure is not None:
            raise self.failure

    def consume(self, stream: str, frame: DataFrame, batch: int) -> None:
        """Consume a batch in one superstep."""
        if stream not in self.functions:
            self.functions[stream] = self.run.on_batch(stream)
        self.functions[stream](frame, batch)


class EmbeddedRun:
    """Opens the run of one pipeline on one store when a batch comes, and ends it; any thread may use it.

    Args:
        pipeline: the pipeline.
        place: where the store lies.

    Attributes:
        pipeline: the pipeline.
    """

    def __init__(self, pipeline: EnginePipeline, place: str) -> None:
        self.pipeline: EnginePipeline = pipeline
        self._name = (place, pipeline.name)
        self._lock = threading.RLock()
        self._options: dict[str, Any] = {}
        self._said: set[str] = set()
        self._runner: _Runner | None = None
        self._streams: set[str] = set()
        self._open: OpenRun | None = None
        self._is_too_late = False

    def join(
        self, stream: str, options: Mapping[str, Any], make: Callable[[Mapping[str, Any]], _Runner]
    ) -> None:
        """Note that a stream has a function, and with which options the run is to be opened.

        The functions share the run, so each option is the same in every call that names it. Once a run has ended, a
        call may change them for the next one.

        Args:
            stream: an injected stream.
            options: those that this call names.
            make: makes the runner, given all options but ``tick_ms``.

        Raises:
            InvalidError: another call has said otherwise, an open run was opened otherwise, or an option is wrong.
        """
        with self._lock:
            for name, value in options.items():
                is_known, is_open = name in self._options, self._open is not None
                before = self._options.get(name)
                if is_known and (is_open or name in self._said) and not _is_same(before, value):
                    raise InvalidError(
                        "the functions of a pipeline share one run: say an option once, or the same each time",
                        pipeline=self.pipeline.name,
                        option=name,
                        given=value,
                        before=before,
                    )
                if is_open and not is_known:
                    raise InvalidError(
                        "the run has begun without this option: say it where its first function is made",
                        pipeline=self.pipeline.name,
                        option=name,
                    )
            all_options = {**self._options, **options}
            self._runner = make({name: value for name, value in all_options.items() if name != "tick_ms"})
            self._options = all_options
            self._said |= options.keys()
            self._streams.add(stream)

    @property
    def run(self) -> SparkRun:
        """The run that is open.

        Raises:
            InvalidError: none is.
        """
        opened = self._open
        if opened is None:
            raise InvalidError(
                "no run is open: the first batch of a query opens it", pipeline=self.pipeline.name
            )
        return opened.run

    def consume(self, stream: str, frame: DataFrame, batch: int) -> OpenRun:
        """Consume one micro-batch of a stream in exactly one superstep and one commit.

        Returns:
            The run that has consumed it.

        Raises:
            MillpondError: the error that ended the superstep, and the run with it.
        """
        for _ in range(_OPENINGS_MAX):
            opened = self._opened(stream)
            try:
                opened.consume(stream, frame, batch)
            except BaseException as failure:
                if self._is_blamed(opened, stream, failure):
                    raise
            else:
                return opened
        raise UnavailableError("the run is closed again and again while a batch waits for it", input=stream)

    def close(self) -> None:
        """Do all the work that is due, and give the leases back; a query that goes on opens the run again.

        Raises:
            MillpondError: what that work has failed with; the leases are released anyway.
        """
        # A batch that comes meanwhile waits, and opens another run then.
        with self._lock:
            opened = self._ended()
            if opened is None:
                return
            try:
                opened.run.run_until_quiet()
                self._tell_of_silent(opened)
            except BaseException:
                opened.run.abandon()
                raise
            opened.run.stop()

    def abandon(self) -> None:
        """Give the leases back without any further work."""
        with self._lock:
            if (opened := self._ended()) is not None:
                opened.run.abandon()

    def _opened(self, stream: str) -> OpenRun:
        """The open run; opened now, for a batch of this stream, if there is none."""
        with self._lock:
            if self._open is not None:
                return self._open
        self._claim()
        with self._lock:
            if self._is_too_late:
                raise UnavailableError("the process ends: the next one takes the batch", input=stream)
            if self._open is None:
                self._open = self._begun()
                atexit.register(self._close_at_exit)
                self._tell_who_waits(self._open, stream)
            return self._open

    def _claim(self) -> None:
        takes = self._options.get("on_held", "take") == "take"
        with _CLAIM:
            former = _OWNERS.get(self._name)
            if takes or former is None:
                _OWNERS[self._name] = self
        if takes and former is not None and former is not self:
            former._give_way()  # noqa: SLF001 - of the same class

    def _begun(self) -> OpenRun:
        if self._runner is None:
            raise InternalError("a function of the pipeline is called before one was made")
        try:
            run = self._runner.open(self.pipeline)
        except BaseException:
            self._disclaim()
            raise
        run.start_ticker(self._options.get("tick_ms", _TICK_MS))
        return OpenRun(run)

    def _disclaim(self) -> None:
        with _CLAIM:
            if _OWNERS.get(self._name) is self:
                del _OWNERS[self._name]

    def _is_blamed(self, opened: OpenRun, stream: str, failure: BaseException) -> bool:
        """Note what a batch has failed with; return whether its query is to fail as well, and not to try again."""
        stop = failure if isinstance(failure, QueryStoppedError) else None
        with self._lock:
            if not opened.is_over:
                if opened.run.is_active:
                    return True
                opened.failure = failure if stop is None else None
                self._ended()
                opened.run.abandon()
            # Without a failure it was closed, or a query was stopped: this one, or another.
            is_own_stop = stop is not None and stop.details.get("input") == stream
            return is_own_stop or opened.failure is not None

    def _ended(self) -> OpenRun | None:
        """Forget the open run, which is to be stopped."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.is_over = True
            self._said.clear()
            self._disclaim()
            atexit.unregister(self._close_at_exit)
        return opened

    def _give_way(self) -> None:
        """End the run because another pipeline of its name is about to run on its store, in this process."""
        with self._lock:
            opened = self._ended()
            if opened is None:
                return
            opened.failure = InvalidError(
                "another pipeline of this name has taken the store over, in this process: make the functions of all "
                "streams from one Pipeline object",
                pipeline=self.pipeline.name,
            )
            _LOG.warning("%s", opened.failure)
            opened.run.abandon()

    def _close_at_exit(self) -> None:
        """Give the leases back at the end of the process, which is too late for any work."""
        with self._lock:
            self._is_too_late = True
            opened = self._ended()
        if opened is None:
            return
        if opened.run.has_work():
            _LOG.warning("work is due that the next run will do: call close() when the query has ended")
        opened.run.stop()

    def _tell_who_waits(self, opened: OpenRun, stream: str) -> None:
        """Say which streams keep event time where it was."""
        waiting = sorted(opened.run.topology.injectors.keys() - {stream, SIGNALS})
        if waiting:
            _LOG.info(
                "the run is open; other streams keep event time where it was until their first batch pipeline=`%s` "
                "first=`%s` others=`%s`",
                self.pipeline.name,
                stream,
                waiting,
            )

    def _tell_of_silent(self, opened: OpenRun) -> None:
        """Say which streams have brought nothing, and which of them no function takes."""
        streams = opened.run.topology.injectors.keys() - {SIGNALS}
        opened.run.note_unfed(sorted(streams))
        summary = opened.run.summary()
        for stream in sorted(summary.skipped.keys() & streams - self._streams - {*summary.ended}):
            _LOG.warning(
                "no function takes a stream of the pipeline, which keeps event time where it was unless it was declared "
                'idle or gone: pipeline.foreach_batch(store, into="%s") makes one pipeline=`%s`',
                stream,
                self.pipeline.name,
            )


def _is_same(before: object, given: object) -> bool:
    return before is given or bool(before == given)
