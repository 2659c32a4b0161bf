"""
A pipeline that a user's module declares, named on the command line as ``module:pipeline``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import InvalidError

__all__ = ["load_pipeline"]


def load_pipeline(named: str) -> EnginePipeline:
    """
    The pipeline that is, or that a function without arguments returns, under this name.

    The module is looked for as Python does, and in the current folder.

    Raises:
        InvalidError: there is no such module or name, its import fails, or it is no pipeline.
    """
    module_name, colon, attribute = named.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidError("a pipeline is named module:pipeline", app=named)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise InvalidError(
            "the pipeline cannot be imported", app=named, reason=f"{type(error).__name__}: {error}"
        ) from error
    pipeline: object = found
    if not isinstance(pipeline, EnginePipeline) and callable(pipeline):
        pipeline = pipeline()
    if not isinstance(pipeline, EnginePipeline):
        raise InvalidError(
            "this is no pipeline, nor a function that returns one", app=named, type=type(pipeline).__name__
        )
    return pipeline
