"""Streams: the named edges of a pipeline, their operations, and composites (MillWheel §4.3).

A composite is a function from streams to streams whose steps share a name prefix (Beam's composite
transforms): its step ``clean`` is the computation ``visits.clean``. A dot joins the names because a
computation's name is also a table in SQL, a folder and a ZooKeeper node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.pipeline.backfill import Backfill
from millpond.executor.pipeline.checks import check_name
from millpond.executor.pipeline.nodes import DEAD_LETTERS, OnError, OnLate, ProductionMode
from millpond.executor.sinks.sink import Sink
from millpond.statestore.errors import InvalidError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ComputationOptions(TypedDict, total=False):
    """The optional settings of a computation, for `Pipeline.add`, `Stream.apply` and every windowed step.

    Example:
        ``stream.apply(Counter(), name="counts", retries=0, on_error="stop")``
    """

    exactly_once: bool
    """Deduplicate records that carry an id; ``True`` by default (MillWheel §6.1.1)."""

    on_error: OnError
    """The fate of a record whose code still raises after all ``retries``. ``"dead_letter"``, the default,
    writes it to the stream of dead letters and continues, unless the runner's ``dead_letter_limit`` is
    exceeded; ``"stop"`` ends the run.
    """

    retries: int
    """The number of times that a failing record is retried before ``on_error`` applies; 2 by default."""

    intervals: int | None
    """The number of key intervals into which the keys are cut at the first input; by default the runner
    chooses. A later change of the number is refused when the pipeline opens.
    """

    on_late: OnLate | Mapping[str, OnLate]
    """The fate of a record behind the input low watermark: ``"process"``, the default, passes it to the code;
    ``"drop"`` only counts it. A mapping sets it by stream; streams outside the mapping are processed.
    """

    productions: ProductionMode
    """``"strong"``, the default, delivers a production once it is durable; ``"weak"`` delivers it within the
    superstep that made it (MillWheel §6.1.3).
    """

    user_code_timeout_ms: float | None
    """The time limit, in milliseconds, for the code's work on one key of a bundle. Code that exceeds the
    limit is interrupted, which counts as an exception. ``None``, the default, sets no limit.
    """

    time_sorted: bool
    """Keep a key's records in its row until the low watermark has passed them, then pass them in order of
    event time with the key's event timers between them, so that the result does not depend on how the input
    is cut. ``False`` unless given here or by the computation's class (docs/how-to/order.md).
    """

    feedback: Collection[str]
    """The consumed streams on which the computation's own output returns, through any number of others,
    without holding its watermark back. Without a feedback, a windowed step in a cycle, or a timer that holds
    an earlier time than its own, would wait for itself. A returning record is late if the watermark passed
    its time before it was produced.
    """

    backfill: Backfill | None
    """The past records that the computation gets before anything else, if it has never run in this store:
    rows, as the stream's injector reads them, or ``"input"``, the rows of the runner's bounded input that
    were consumed before it joined. For a computation with several streams, a mapping from streams to these
    (docs/how-to/backfill.md).
    """

    renamed_from: str | None
    """The computation's former name. Its rows, timers, record ids and watermarks in the store move to the new
    name when the pipeline opens. The option may stay in the code afterwards.
    """


class StreamGraph(Protocol):
    """The part of a pipeline in which a stream declares its consumers."""

    name: str

    def add(
        self,
        computation: Computation,
        *,
        name: str,
        subscribes: Mapping[str, KeyExtractor],
        produces: Sequence[str] = (),
        **options: Unpack[ComputationOptions],
    ) -> Mapping[str, Stream]: ...

    def add_sink(self, name: str, stream: str, sink: Sink) -> None: ...

    def stream(self, name: str) -> Stream: ...

    def transform(
        self,
        name: str,
        function: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result: ...


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """A named stream of one pipeline, as returned by `Pipeline.inject`, `Pipeline.stream` and `apply`.

    A higher layer adds operations (windows, for example) in a subclass; a pipeline subclass returns that
    class by setting ``stream_class``.

    Attributes:
        pipeline: the pipeline that the stream belongs to.
        name: the stream's name, unique within the pipeline.
    """

    pipeline: StreamGraph
    name: str

    def __repr__(self) -> str:
        return f"Stream({self.name!r} of {self.pipeline.name!r})"

    def apply(
        self,
        computation: Computation,
        *,
        name: str,
        key: KeyExtractor = None,
        produces: str | Sequence[str] | None = None,
        **options: Unpack[ComputationOptions],
    ) -> Self:
        """Process this stream with a computation.

        Args:
            computation: an instance of the user's `Computation`.
            name: the computation's name, which is also its table in SQL.
            key: how to extract a record's key: a field of the value, a list of fields, a function of the
                value that returns text or a tuple, or ``None`` for the record's own key.
            produces: the stream or streams that the computation produces to; by default one stream with the
                computation's name.
            options: further settings; see `ComputationOptions`.

        Returns:
            The stream that the computation produces to; the first one if there are several.

        Raises:
            InvalidError: the declaration is invalid; the error names the wrong argument.

        Example:
            ``counts = words.apply(Counter(), name="counts", key="word")``
        """
        streams = _stream_names(name, produces)
        produced = self.pipeline.add(
            computation, name=name, subscribes={self.name: key}, produces=streams, **options
        )
        return replace(self, name=produced[streams[0]].name)

    def transform(
        self,
        name: str,
        function: Callable[Concatenate[Self, _Arguments], _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function to this stream as a composite, whose steps share a name prefix; see
        `Pipeline.transform`.

        Args:
            name: the composite's name, with which the names of its steps begin.
            function: takes this stream and any further arguments, and returns a stream, several, or nothing.
            args: further arguments of the function.
            kwargs: its keyword arguments.

        Returns:
            The function's result.

        Raises:
            InvalidError: as for `Pipeline.transform`.

        Example:
            ``visits = views.transform("visits", sessionize, gap="30m")``
        """
        return self.pipeline.transform(name, function, self, *args, **kwargs)

    def sink(self, name: str, sink: Sink) -> Self:
        """Write this stream's records outside Millpond, each exactly once.

        Args:
            name: the sink's name, unique within the pipeline.
            sink: the destination, for example a `DeltaSink`.

        Returns:
            This stream, so that calls can be chained.

        Raises:
            InvalidError: the name is malformed or taken, or ``sink`` is not a `Sink`.

        Example:
            ``counts.sink("counts", DeltaSink("out/counts"))``
        """
        self.pipeline.add_sink(name, self.name, sink)
        return self


def _stream_names(name: str, produces: str | Sequence[str] | None) -> tuple[str, ...]:
    if produces is None:
        return (name,)
    if isinstance(produces, str):
        return (produces,)
    if not produces:
        raise InvalidError(
            "apply needs a stream to return: use Pipeline.add for a computation that produces nothing",
            computation=name,
        )
    return tuple(produces)


_JOINT = "."


class Composites:
    """The composites of a pipeline, and the one that is being declared."""

    def __init__(self) -> None:
        self._within: tuple[str, ...] = ()
        self._steps: dict[str, list[str]] = {}
        self._computations: set[str] = set()

    @property
    def prefix(self) -> str:
        """The name prefix of the composite that is being declared; empty outside of composites."""
        return f"{self._within[-1]}{_JOINT}" if self._within else ""

    @property
    def steps(self) -> Mapping[str, tuple[str, ...]]:
        """The computations of each composite, including nested composites, in order of declaration."""
        return {name: tuple(steps) for name, steps in self._steps.items()}

    def note(self, computation: str) -> None:
        """Add a computation to each composite that is being declared."""
        if computation in self._steps:
            raise InvalidError("a computation and a composite have one name", computation=computation)
        self._computations.add(computation)
        for name in self._within:
            self._steps[name].append(computation)

    @contextmanager
    def declare(self, name: str) -> Iterator[None]:
        """Open a composite: declarations within the block belong to it; ``name`` is its whole name."""
        if name in self._steps:
            raise InvalidError("two composites have one name", composite=name)
        if name in self._computations:
            raise InvalidError("a computation and a composite have one name", composite=name)
        self._steps[name] = []
        self._within = (*self._within, name)
        try:
            yield
        finally:
            self._within = self._within[:-1]


class CompositeGraph:
    """The part of a pipeline that names declarations and opens composites."""

    def __init__(self) -> None:
        self._composites = Composites()

    def transform(
        self,
        name: str,
        function: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function from streams to streams as a composite, whose steps share a name prefix.

        Everything the function declares (steps, streams, sinks, inputs) is named after the composite: its
        step ``clean`` is the computation ``visits.clean``, in SQL, in `millpond status` and everywhere else.
        So a function may be applied several times under different names, and composites may be nested. Code
        within the composite produces to its streams by their short names. Pass streams from outside as
        arguments.

        Args:
            name: the composite's name; it is stored with every step, so keep it.
            function: takes streams and any further arguments, and returns a stream, several, or nothing.
            args: the arguments of the function.
            kwargs: its keyword arguments.

        Returns:
            The function's result.

        Raises:
            InvalidError: the name is malformed, or a composite or computation has it; ``function`` is not
                callable; or a declaration within is invalid.

        Example:
            ``matched = pipeline.transform("matching", match, clicks, orders, within="1h")``
        """
        name = self._named("composite", name)
        if not callable(function):
            raise InvalidError(
                "a composite is a function of streams", composite=name, type=type(function).__qualname__
            )
        with self._composites.declare(name):
            return function(*args, **kwargs)

    def _named(self, kind: str, name: object, *, reserved: frozenset[str] = frozenset({DEAD_LETTERS})) -> str:
        """Return the whole name of a declaration within its composite."""
        own = check_name(kind, name, reserved=reserved)
        return own if own == DEAD_LETTERS else check_name(kind, f"{self._composites.prefix}{own}")
