"""Pipelines and other objects of the user's code, by ``module:name``; the current folder can be imported from.

Topologies by version, as a table for people or as JSON.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click

from millpond.cli.terminal.output import print_json, print_table, time_text
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.catalog.topology import LoggedTopology, PipelineDefinition, TopologyChange
from millpond.statestore.errors import InvalidError, did_you_mean

_NAMES_SHOWN: Final = 8


def load_app(text: str) -> object:
    """What the user's code calls ``name`` in ``module``.

    Args:
        text: ``module:name``; both may have dots.

    Raises:
        InvalidError: the text has no colon, the module is not there or cannot be imported, or it has no such name; the
            nearest names are told.

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
    """The pipeline that the user's code has under this name, or that its function of this name returns.

    Args:
        text: ``module:name``.

    Raises:
        InvalidError: there is no such name (see `load_app`), it is no pipeline, or the function raised.
    """
    found = load_app(text)
    if not isinstance(found, EnginePipeline) and callable(found):
        found = call(text, found)
    if not isinstance(found, EnginePipeline):
        raise InvalidError(
            "that is neither a pipeline nor a function that returns one", name=text, type=type(found).__name__
        )
    return found


def load_function(text: str) -> Callable[..., Any]:
    """The function that the user's code has under this name.

    Args:
        text: ``module:name``.

    Raises:
        InvalidError: there is no such name (see `load_app`), or it is no function.
    """
    found = load_app(text)
    if not callable(found):
        raise InvalidError("that is no function", name=text, type=type(found).__name__)
    return found


def call(text: str, function: object) -> object:
    """What a function of the user's code returns, called without arguments.

    Args:
        text: its name, for messages.
        function: the function.

    Raises:
        InvalidError: it is no function, needs arguments, or raised.
    """
    if not callable(function):
        raise InvalidError("that is no function", name=text, type=type(function).__name__)
    try:
        result: object = function()
    except Exception as error:
        raise _failed(f"calling {text} failed", error) from error
    return result


def workers_import_from_here() -> None:
    """Have Spark's workers on this machine find the modules of the current folder, too; before the session begins."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *([known] if known else [])])


@contextmanager
def wrong_usage() -> Iterator[None]:
    """What the user's words got wrong ends the command with exit code 2, as a wrong option does."""
    try:
        yield
    except InvalidError as error:
        raise click.UsageError("\n".join((str(error), *getattr(error, "__notes__", ())))) from error


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    invalidate_caches()
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(f"{missing}."):
            raise _no_module(name, missing) from error
        raise _failed(f"importing {name} failed", error) from error
    except Exception as error:
        raise _failed(f"importing {name} failed", error) from error


def _no_module(name: str, missing: str) -> InvalidError:
    parent, _, last = missing.rpartition(".")
    folders = [str(Path.cwd())] if not parent else list(getattr(sys.modules.get(parent), "__path__", ()))
    names = [module.name for module in pkgutil.iter_modules(folders)]
    where = f"the package {parent}" if parent else "this folder"
    return InvalidError(
        f"there is no such module in {where} or in what is installed{did_you_mean(last, names)}",
        module=name,
        known=_some(names),
    )


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


_CODE_DIGITS: Final = 8
_COLUMNS: Final = ("version", "at", "pipeline", "by", "computations", "sinks", "changes")
_UNKNOWN: Final = "the log does not reach back"


def print_topologies(topologies: Iterable[LoggedTopology], *, as_json: bool) -> None:
    """Print topologies, oldest first.

    Args:
        topologies: what the log tells.
        as_json: one JSON object per line, with whole fingerprints, options and connections.
    """
    if as_json:
        print_json(_json(one) for one in topologies)
    else:
        print_table("", _COLUMNS, (_row(one) for one in topologies))


def _row(one: LoggedTopology) -> tuple[object, ...]:
    definition = one.definition
    return (
        one.version,
        time_text(one.wall_us),
        definition.name,
        _by(one),
        "\n".join(f"{node.name} {node.code_hash[:_CODE_DIGITS]}" for node in definition.computations),
        "\n".join(f"{sink.name} -> {sink.destination}" for sink in definition.sinks),
        _UNKNOWN if one.change is None else "\n".join(_changes(one.change)),
    )


def _json(one: LoggedTopology) -> dict[str, object]:
    return {
        "version": one.version,
        "at": time_text(one.wall_us),
        "pipeline": one.definition.name,
        "by": _by(one),
        "computations": _computations(one.definition),
        "sinks": [asdict(sink) for sink in one.definition.sinks],
        "change": None if one.change is None else asdict(one.change),
    }


def _computations(definition: PipelineDefinition) -> list[dict[str, object]]:
    return [
        {
            "name": node.name,
            "code": node.code_hash,
            "codec": node.codec,
            "options": dict(node.options),
            "subscribes": {
                s.stream: s.key_extractor for s in definition.subscriptions if s.consumer == node.name
            },
            "produces": [stream.name for stream in definition.streams if node.name in stream.producers],
        }
        for node in definition.computations
    ]


def _changes(change: TopologyChange) -> Iterator[str]:
    for mark, names, sinks in (
        ("+", change.added, change.sinks_added),
        ("-", change.removed, change.sinks_removed),
        ("~", change.changed, change.sinks_changed),
    ):
        yield from (f"{mark}{name}" for name in names)
        yield from (f"{mark}{name} (sink)" for name in sinks)
    if not change:
        yield "streams only"


def _by(one: LoggedTopology) -> str:
    return "update" if one.is_update else "start"
