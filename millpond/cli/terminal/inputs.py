"""The inputs of a run on the command line: files and folders by stream, or a function that returns them.

How far the inputs of pipelines are consumed: what the log says, as fields and as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millpond.cli.terminal.apps import call, load_app
from millpond.cli.terminal.row_files import RowFiles
from millpond.executor.inputs.positions import BOUNDED_SOURCE, LOCAL_SOURCE
from millpond.executor.local.rows import RowsLike
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError, did_you_mean

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_Command = TypeVar("_Command", bound=Callable[..., Any])


def input_option(command: _Command) -> _Command:
    """Add the options --input and --inputs to a command, as ``inputs`` and ``inputs_of``."""
    add_files = click.option(
        "--input",
        "inputs",
        metavar="STREAM=PATH",
        multiple=True,
        help="A file or a folder of Parquet, JSON (an object per line) or CSV files for an injected stream; once for "
        "each stream.",
    )
    add_function = click.option(
        "--inputs",
        "inputs_of",
        metavar="MODULE:FUNCTION",
        help="A function that returns the inputs as a dict: rows by stream, as `LocalRunner.run` takes them.",
    )
    return add_files(add_function(command))


def read_inputs(
    pipeline: EnginePipeline, given: Iterable[str], function: str | None = None
) -> dict[str, RowsLike]:
    """The inputs for `LocalRunner.run`. Of files only a piece is in memory at a time.

    Args:
        pipeline: the pipeline, which says which columns of CSV files are text: keys and ids.
        given: ``STREAM=PATH`` texts, as on the command line.
        function: ``module:function`` of a function that returns rows by stream, for the streams that are not given.

    Raises:
        InvalidError: a text has no ``=``, there is no such stream, or nothing to read at the path; or the function is
            not there or raised.
    """
    inputs = _returned(function)
    topology = pipeline.check()
    for stream, path in _paths(given, inputs, topology).items():
        if "://" in str(path):
            raise InvalidError("the local runner reads files of this machine: give --spark", input=path)
        inputs[stream] = RowFiles(Path(path).expanduser(), _text_columns(topology, stream))
    return _all_given(inputs)


def read_frames(
    pipeline: EnginePipeline, given: Iterable[str], function: str | None, spark: SparkSession
) -> dict[str, DataFrame]:
    """The same inputs for `SparkRunner.run`, as streaming DataFrames: their checkpoints remember which files were read.

    Args:
        pipeline: the pipeline.
        given: ``STREAM=PATH`` texts, as on the command line.
        function: ``module:function`` of a function that returns DataFrames by stream.
        spark: the session.

    Raises:
        InvalidError: as of `read_inputs`.
    """
    from millpond.cli.terminal.row_files import stream_of_files

    inputs = _returned(function)
    topology = pipeline.check()
    for stream, path in _paths(given, inputs, topology).items():
        inputs[stream] = stream_of_files(spark, path, _text_columns(topology, stream))
    return _all_given(inputs)


def _returned(function: str | None) -> dict[str, Any]:
    if function is None:
        return {}
    returned = call(function, load_app(function))
    if not isinstance(returned, Mapping):
        raise InvalidError(
            "the function of --inputs returns a dict of rows by stream",
            name=function,
            type=type(returned).__name__,
        )
    return dict(returned)


def _paths(given: Iterable[str], others: Mapping[str, Any], topology: Topology) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in given:
        stream, equals, path = text.partition("=")
        if not (stream and equals and path):
            raise InvalidError("an input is written STREAM=PATH, as in queries=queries.parquet", input=text)
        if stream in paths or stream in others:
            raise InvalidError("an input is given twice: put its files into one folder", input=stream)
        if stream not in topology.injectors:
            hint = did_you_mean(stream, topology.injectors)
            raise InvalidError(
                f"the pipeline injects no stream of that name{hint}",
                input=stream,
                injected=", ".join(topology.injectors) or "none",
            )
        paths[stream] = path
    return paths


def _all_given(inputs: dict[str, Any]) -> dict[str, Any]:
    if not inputs:
        raise InvalidError("what is the input? Give --input STREAM=PATH, or --inputs MODULE:FUNCTION")
    return inputs


def _text_columns(topology: Topology, stream: str) -> frozenset[str]:
    """The columns that hold keys and ids, and would lose zeros in front of them as numbers."""
    node = topology.injectors[stream]
    keys = [consumer.subscription.key for consumer in topology.consumers_of(stream)]
    return frozenset(name for name in (node.key, node.id, node.member, *keys) if isinstance(name, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedInput:
    """How far one source of an input is consumed.

    Attributes:
        pipeline: the pipeline.
        input: the injected stream.
        source: the id of a Spark query, or what a run without one is called.
        batch: the last batch of a query; of rows handed to the local runner, how many.
        offsets: where that is in the source, as the source says it: of a query its offset log, of files the file and row;
            ``None`` if it says nothing.
    """

    pipeline: str
    input: str
    source: str
    batch: int
    offsets: str | None

    @property
    def position(self) -> str:
        """The position in words."""
        if self.batch < 0:
            return "nothing"
        if self.source == LOCAL_SOURCE:
            return f"{self.batch:,} rows"
        return "all of it" if self.source == BOUNDED_SOURCE else f"batch {self.batch:,}"

    @property
    def place(self) -> str | None:
        """Where that is, in short: a file and a row, or the offsets of a query's sources."""
        if self.offsets is None:
            return None
        try:
            told = json.loads(self.offsets)
            # Rows in memory, and a repair, move the position and say nothing of a place.
            return f"row {told['row']:,} of {told['file']}" if told["rows"] == self.batch else None
        except (ValueError, TypeError, KeyError):
            # Spark's entry has a line about the format, one about the batch, and then one for each source.
            return " ".join(self.offsets.splitlines()[2:]) or None


def consumed_inputs(txns: Mapping[str, int], offsets: Mapping[str, str]) -> list[ConsumedInput]:
    """The inputs among the positions of a table, or of one commit.

    Args:
        txns: positions by application id.
        offsets: where they are in their sources, by the same ids.
    """
    found = []
    for app_id, batch in sorted(txns.items()):
        if app_id.startswith(AppId.INPUT):
            pipeline, stream, source = AppId.INPUT.parts(app_id)
            found.append(
                ConsumedInput(
                    pipeline=pipeline, input=stream, source=source, batch=batch, offsets=offsets.get(app_id)
                )
            )
    return found
