"""Streams: the named edges of a pipeline, and the operations that users call on them (MillWheel §4.3).

Composites: functions from streams to streams whose steps have one name in the graph (Beam's composite transforms).

What a composite declares is named after it: its step ``clean`` is the computation ``visits.clean``. A dot
joins the names because a computation's name is a table in SQL, a folder and a ZooKeeper node as well.
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
    """Whether records that carry an id are deduplicated; ``True`` unless given (MillWheel §6.1.1)."""

    on_error: OnError
    """
    What happens to a record whose code still raises after all ``retries``: ``"dead_letter"``, the default,
    writes it to the stream of dead letters and continues, unless the runner's ``dead_letter_limit`` is exceeded;
    ``"stop"`` ends the run.
    """

    retries: int
    """How many times a failing record is tried again before ``on_error`` applies; 2 unless given."""

    intervals: int | None
    """
    Into how many key intervals the computation's keys are cut at its first input; the runner chooses unless given.
    It is the number at the first input: another one is refused when the pipeline opens.
    """

    on_late: OnLate | Mapping[str, OnLate]
    """
    What happens to a record behind the input low watermark: ``"process"``, the default, passes it to the code;
    ``"drop"`` only counts it. A mapping sets it by stream; a stream that is not in it is processed.
    """

    productions: ProductionMode
    """
    ``"strong"``, the default, delivers a production once it is durable; ``"weak"`` delivers it within the
    superstep that made it (MillWheel §6.1.3).
    """

    user_code_timeout_ms: float | None
    """
    The time limit, in milliseconds, for the code's work on one key of a bundle. Code that exceeds it is
    interrupted, which counts as an exception. ``None``, the default, sets no limit.
    """

    time_sorted: bool
    """
    Whether a key's records wait in its row until the low watermark has passed them, and are given in the order of
    their event times with the key's event timers between them, so that the answer is the same however the input
    is cut. ``False`` unless given here or by the computation's class (docs/how-to/order.md).
    """

    feedback: Collection[str]
    """
    The consumed streams on which the computation's own output comes back to it, through any number of others, without
    holding its watermark back. A windowed step, or a timer that holds an earlier time than its own, would wait for
    itself in a cycle without one. What comes back is late where the watermark has passed it before it was produced.
    """

    backfill: Backfill | None
    """
    What the computation is given of its stream before anything else, if it has never run in this store: rows, as the
    stream's injector reads them, or ``"input"``, the rows of the runner's bounded input that were consumed before it
    joined. For a computation with several streams, a mapping from streams to these (docs/how-to/backfill.md).
    """

    renamed_from: str | None
    """
    The computation's former name: rows, timers, record ids and watermarks that the store has under it are kept, and
    move to the new name when the pipeline opens. It may stay in the code afterwards.
    """


class StreamGraph(Protocol):
    """The part of a pipeline that a stream needs: it declares the stream's consumers there."""

    name: str

    def add(
        self,
        computation: Computation,
        *,
        name: str,
        subscribes: Mapping[str, KeyExtractor],
        produces: Sequence[str] = (),
        **options: Unpack[ComputationOptions],
    ) -> Mapping[str, Stream]:
        """Add a computation with any number of input and output streams."""
        ...

    def add_sink(self, name: str, stream: str, sink: Sink) -> None:
        """Write a stream to a sink."""
        ...

    def stream(self, name: str) -> Stream:
        """The stream called ``name``, which may be declared later."""
        ...

    def transform(
        self,
        name: str,
        function: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function whose steps belong together under one name."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """A named stream of one pipeline, as returned by `Pipeline.inject`, `Pipeline.stream` and `apply`.

    A layer above adds operations (windows, for example) in a subclass, and a pipeline subclass
    returns it by setting ``stream_class``.

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
            key: how a record's key is extracted: a field of the value, a list of fields, a function of the value
                that returns text or a tuple, or ``None`` for the key that the record was produced with.
            produces: the stream or streams that the computation produces to; ``None`` for a single
                stream with the computation's name.
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
        """Apply a function of this stream, whose steps belong together under one name; see `Pipeline.transform`.

        Args:
            name: the composite's name, which the names of its steps begin with.
            function: takes this stream and any further arguments, and returns a stream, several, or nothing.
            args: further arguments of the function.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            InvalidError: as `Pipeline.transform`.

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
        """What the names of the composite that is being declared begin with; empty outside of composites."""
        return f"{self._within[-1]}{_JOINT}" if self._within else ""

    @property
    def steps(self) -> Mapping[str, tuple[str, ...]]:
        """The computations of each composite, those of composites within it too, in order of declaration."""
        return {name: tuple(steps) for name, steps in self._steps.items()}

    def note(self, computation: str) -> None:
        """Take a computation for a step of each composite that is being declared.

        Raises:
            InvalidError: a composite has its name.
        """
        if computation in self._steps:
            raise InvalidError("a computation and a composite have one name", computation=computation)
        self._computations.add(computation)
        for name in self._within:
            self._steps[name].append(computation)

    @contextmanager
    def declare(self, name: str) -> Iterator[None]:
        """What is declared within the block belongs to the composite.

        Args:
            name: its whole name.

        Raises:
            InvalidError: a composite or a computation has this name.
        """
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
    """The part of a pipeline that names what is declared, and declares composites."""

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
        """Apply a function from streams to streams, whose steps belong together under one name: a composite.

        What the function declares (steps, streams, sinks, inputs) is named after the composite: its step
        ``clean`` is the computation ``visits.clean``, in SQL, in `millpond status` and everywhere. So a
        function may be applied several times, under different names, and composites may be nested. Code
        within produces to its streams by their own names. Streams from outside are arguments.

        Args:
            name: the composite's name; it is stored with every step, so keep it.
            function: takes streams and any further arguments, and returns a stream, several, or nothing.
            args: the arguments of the function.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            InvalidError: the name is malformed, or a composite or computation has it; ``function`` is none;
                or a declaration within is invalid.

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
        """The whole name of what is being declared, within its composite."""
        own = check_name(kind, name, reserved=reserved)
        return own if own == DEAD_LETTERS else check_name(kind, f"{self._composites.prefix}{own}")
