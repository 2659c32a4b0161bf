"""
The pipeline with windows: what `millpond.executor.pipeline.Pipeline` is, and streams that know windows.
"""

from __future__ import annotations

from typing import Any, cast

from millpond.dataflow.stream import DataflowStream
from millpond.executor.pipeline import Pipeline as EnginePipeline
from millpond.executor.stream import Stream

__all__ = ["Pipeline"]


class Pipeline(EnginePipeline):
    """
    A graph of injectors, computations, windowed steps and sinks, joined by named streams.

    Args:
        name: the pipeline's name; its positions in the store are kept under it.

    Example:
        >>> pipeline = Pipeline("zeitgeist")
        >>> queries = pipeline.inject("queries", key="query", at="time")
        >>> queries.window(FixedWindows("1s")).combine(Count(), name="counts")
        Stream('counts' of 'zeitgeist')
    """

    stream_class: type[Stream] = DataflowStream

    def inject(self, name: str, **arguments: Any) -> DataflowStream:
        """
        Let outside records in on a stream; see the engine's ``Pipeline.inject``.
        """
        return cast(DataflowStream, EnginePipeline.inject(self, name, **arguments))

    def stream(self, name: str) -> DataflowStream:
        """
        The stream called ``name``, also one that is declared later.
        """
        return cast(DataflowStream, EnginePipeline.stream(self, name))
