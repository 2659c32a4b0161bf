"""
Streams as users hold them: a name in a pipeline, and what may be done with it (MillWheel §4.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.key_extractor import KeyExtractor
from millpond.executor.pipeline.nodes import OnError, OnLate
from millpond.executor.pipeline.weak import ProductionMode
from millpond.executor.sinks.sink import Sink
from millpond.statestore.errors import InvalidError

__all__ = ["ComputationOptions", "Stream", "StreamGraph"]


class ComputationOptions(TypedDict, total=False):
    """
    What may be said of a computation beyond its edges; `ComputationNode` explains each.
    """

    exactly_once: bool
    on_error: OnError
    retries: int
    intervals: int | None
    on_late: OnLate | Mapping[str, OnLate]
    productions: ProductionMode
    user_code_timeout_ms: float | None


class StreamGraph(Protocol):
    """
    What a stream needs of its pipeline: where its verbs declare computations and sinks.
    """

    name: str

    def add(
        self,
        computation: Computation,
        *,
        name: str,
        subscribes: Mapping[str, KeyExtractor],
        produces: Sequence[str] = (),
        **options: Unpack[ComputationOptions],
    ) -> dict[str, Stream]:
        """
        Add a computation with any number of streams on both sides.
        """
        ...

    def add_sink(self, name: str, stream: str, sink: Sink) -> None:
        """
        Let a stream flow into a sink.
        """
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """
    A named edge of one pipeline; made by `Pipeline.inject`, `apply` and `Pipeline.stream`.

    A layer above adds its own verbs (windows, say) in a subclass, and a pipeline subclass
    that names it as ``stream_class``.
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
    ) -> Stream:
        """
        Let a computation consume this stream.

        Args:
            computation: the user's code.
            name: its name, and its table in SQL.
            key: how it gets its key: a field of the value, a function of the value, or ``None``
                for the key that the record was produced with.
            produces: the stream or streams that it produces to; ``None`` means one named as itself.
            options: `ComputationOptions`.

        Returns:
            The (first) stream that it produces to.

        Raises:
            InvalidError: the declaration cannot be right; the error names the culprit.
        """
        streams = _stream_names(name, produces)
        made = self.pipeline.add(
            computation, name=name, subscribes={self.name: key}, produces=streams, **options
        )
        return made[streams[0]]

    def sink(self, name: str, sink: Sink) -> Stream:
        """
        Let this stream flow out of Millpond, exactly once.

        Args:
            name: the sink's name.
            sink: where to, for example a `DeltaSink`.

        Returns:
            This stream, so that calls can be chained.

        Raises:
            InvalidError: the name is bad or taken, or ``sink`` is no sink.
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
            "apply returns a stream, so it needs one: use Pipeline.add for a computation that produces nothing",
            computation=name,
        )
    return tuple(produces)
