"""The user's code and input files, as named on the command line, and how far inputs are consumed.

Code is named ``module:name``; modules of the current folder can be imported.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from millpond.cli.terminal.options import option, options, several
from millpond.cli.terminal.row_files import RowFiles, TextForm, stream_of_files
from millpond.executor.inputs.extraction import RowsLike
from millpond.executor.inputs.positions import BOUNDED_SOURCE, LOCAL_SOURCE
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.objects.obstore import local_path
from millpond.statestore.visible import visible_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAMES_SHOWN: Final = 8


def load_app(text: str) -> object:
    """Return the object that ``module:name`` names; an error names the nearest names.

    Example:
        >>> load_app("math:pi")
        3.141592653589793
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise InvalidError("code is named module:name, as in daily:pipeline", given=text)
    found: object = _module(module)
    where = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in vars(found) if not known.startswith("_")]
            raise InvalidError(
                f"{where} has no such name{did_you_mean(part, names)}", name=part, known=_some(names)
            )
        found, where = getattr(found, part), f"{where}.{part}"
    return found


def load_pipeline(text: str) -> EnginePipeline:
    """Return the pipeline that ``module:name`` names, or that the function of this name returns."""
    found = load_app(text)
    if not isinstance(found, EnginePipeline) and callable(found):
        found = _call(text, found)
    if not isinstance(found, EnginePipeline):
        raise InvalidError(
            "that is neither a pipeline nor a function that returns one", name=text, type=type(found).__name__
        )
    return found


def load_function(text: str) -> Callable[..., Any]:
    found = load_app(text)
    if not callable(found):
        raise InvalidError("that is no function", name=text, type=type(found).__name__)
    return found


def _call(text: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:
        raise _failed(f"calling {text} failed", error) from error


def workers_import_from_here() -> None:
    """Have Spark's workers on this machine find the modules of the current folder, too; before the session begins."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *([known] if known else [])])


@contextmanager
def wrong_usage() -> Iterator[None]:
    """End the command with exit code 2, as a wrong option does, where the user's arguments are invalid."""
    try:
        yield
    except InvalidError as error:
        raise click.UsageError(
            visible_lines("\n".join((str(error), *getattr(error, "__notes__", ()))))
        ) from error


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    invalidate_caches()
    try:
        return import_module(name)  # named by the user
    except Exception as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise _failed(f"importing {name} failed", error) from error
        parent, _, last = missing.rpartition(".")
        folders = list(getattr(sys.modules.get(parent), "__path__", ())) if parent else [here]
        names = [module.name for module in pkgutil.iter_modules(folders)]
        where = f"the package {parent}" if parent else "this folder"
        raise InvalidError(
            f"there is no such module in {where} or in what is installed{did_you_mean(last, names)}",
            module=name,
            known=_some(names),
        ) from error


def _failed(what: str, error: Exception) -> InvalidError:
    failed = InvalidError(f"{what}: {type(error).__name__}: {error}")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    if frames:
        failed.add_note("".join(traceback.format_list(frames)).rstrip())
    return failed


def _some(names: Iterable[str]) -> str:
    known = sorted(names)
    more = ", …" if len(known) > _NAMES_SHOWN else ""
    return ", ".join(known[:_NAMES_SHOWN]) + more or "none"


@dataclass(frozen=True, slots=True)
class Given:
    """The values of the options of `input_options`; files that change after ``settled_until_us`` wait for a later run."""

    inputs: tuple[str, ...]
    inputs_of: str | None
    form: TextForm
    settled_until_us: int | None = None


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --input, --inputs, --delimiter and --encoding to a command, together as ``given``."""

    @wraps(command)
    def gathered(
        *arguments: Any,
        inputs: tuple[str, ...],
        inputs_of: str | None,
        delimiter: str,
        encoding: str,
        **others: Any,
    ) -> Any:
        with wrong_usage():
            form = TextForm(delimiter, encoding)
        return command(*arguments, given=Given(inputs, inputs_of, form), **others)

    return _INPUT_OPTIONS(gathered)


_INPUT_OPTIONS: Final = options(
    several(
        "--input=STREAM=PATH inputs",
        "A file or a folder of Parquet, JSON (an object per line) or CSV files for an injected stream; once for each "
        "stream.",
    ),
    option(
        "--inputs=MODULE:FUNCTION inputs_of",
        "A function that returns the inputs as a dict: rows by stream, as `LocalRunner.run` takes them.",
    ),
    option(
        "--delimiter=CHARACTER",
        "What stands between the fields of CSV files; a tab is written tab.",
        default=",",
    ),
    option("--encoding=NAME", "Encoding of CSV and JSON files, such as latin-1.", default="utf-8"),
)


def read_inputs(pipeline: EnginePipeline, given: Given) -> dict[str, RowsLike]:
    """Return the inputs for `LocalRunner.run` that the options --input and --inputs name."""

    def read(path: str, text_columns: frozenset[str], record_bytes_max: int | None) -> RowFiles:
        place = local_path(path)
        if place is None:
            raise InvalidError("the local runner reads files of this machine: give --spark", input=path)
        return RowFiles(place, text_columns, given.form, record_bytes_max, given.settled_until_us)

    return _read(pipeline, given, read)


def read_frames(pipeline: EnginePipeline, given: Given, spark: SparkSession) -> dict[str, DataFrame]:
    """Return the same inputs for `SparkRunner.run`: streaming DataFrames, whose checkpoints remember the files read."""

    def read(path: str, text_columns: frozenset[str], _: int | None) -> DataFrame:
        return stream_of_files(spark, path, text_columns, given.form)

    return _read(pipeline, given, read)


def _read(
    pipeline: EnginePipeline, given: Given, read: Callable[[str, frozenset[str], int | None], Any]
) -> dict[str, Any]:
    texts, function = given.inputs, given.inputs_of
    returned = {} if function is None else _call(function, load_function(function))
    if not isinstance(returned, Mapping):
        raise InvalidError(
            "the function of --inputs returns a dict of rows by stream",
            name=function,
            type=type(returned).__name__,
        )
    inputs, topology = dict(returned), pipeline.check()
    for stream, path in _paths(texts, returned, topology).items():
        node = topology.injectors[stream]
        keys = [consumer.subscription.key for consumer in topology.consumers_of(stream)]
        # Keys and ids would lose leading zeros as numbers.
        names = (name for name in (node.key, node.id, node.member, *keys) if isinstance(name, str))
        inputs[stream] = read(path, frozenset(names), node.max_record_bytes)
    if not inputs:
        raise InvalidError("what is the input? Give --input STREAM=PATH, or --inputs MODULE:FUNCTION")
    return inputs


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


@dataclass(frozen=True, slots=True)
class ConsumedInput:
    """The position in one source of an input."""

    pipeline: str
    input: str
    source: str  # the id of a Spark query, or the fixed name of a run without one
    batch: int  # the last of a query; for rows handed to the local runner, their number
    offsets: str | None  # as the source records it: the offset log of a query, or the file and row of files

    @property
    def position(self) -> str:
        if self.batch < 0:
            return "nothing"
        if self.source == LOCAL_SOURCE:
            return f"{self.batch:,} rows"
        if self.source != BOUNDED_SOURCE:
            return f"batch {self.batch:,}"
        return (
            f"piece {self.batch:,}" if self.offsets is not None and '"until"' in self.offsets else "all of it"
        )

    @property
    def place(self) -> str | None:
        """The position in short: a file and a row, or the offsets of a query's sources."""
        if self.offsets is None:
            return None
        try:
            recorded = orjson.loads(self.offsets)
            # Rows in memory, and a repair, move the position without a new record of the place.
            is_current = recorded["rows"] == self.batch
            return f"row {recorded['row']:,} of {recorded['file']}" if is_current else None
        except (ValueError, TypeError, KeyError):
            # Spark's entry has a line about the format, one about the batch, and then one for each source.
            return " ".join(self.offsets.splitlines()[2:]) or None


def consumed_inputs(txns: Mapping[str, int], offsets: Mapping[str, str]) -> list[ConsumedInput]:
    """Return the inputs among the positions of a table or commit; both mappings are by application id."""
    return [
        ConsumedInput(pipeline, stream, source, batch, offsets.get(app_id))
        for app_id, batch in sorted(txns.items())
        if app_id.startswith(AppId.INPUT)
        for pipeline, stream, source in [AppId.INPUT.parts(app_id)]
    ]
