"""
Millpond: a storage-centric transactional state engine for streams, on Delta Lake.

Everything public is here; nothing else is. Names are loaded when they are first used, so that
``import millpond`` costs little in a process (a Spark worker, say) that uses few of them.

Example::

    import millpond as mp

    class Counter(mp.Computation):
        def process_record(self, context, record):
            context.state.set((context.state.get() or 0) + 1)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millpond.executor.computation import Computation
    from millpond.executor.context import Context
    from millpond.executor.directory_injector import FILE_ROW, DirectoryInjector
    from millpond.executor.foreach_batch import ForeachBatch, foreach_batch
    from millpond.executor.injector import BoundedDisorder, ManualWatermark
    from millpond.executor.injector_policies import (
        MarkColumn,
        Monotone,
        ObservedPercentile,
        Perfect,
        UserWatermark,
    )
    from millpond.executor.local_run import LocalRun
    from millpond.executor.local_runner import LocalRunner
    from millpond.executor.pipeline import DEAD_LETTERS, Pipeline
    from millpond.executor.record import Record, Records
    from millpond.executor.sink import DeltaSink
    from millpond.executor.spark_run import SparkRun
    from millpond.executor.spark_runner import SparkRunner
    from millpond.executor.spark_session import spark_session
    from millpond.executor.stream import Stream
    from millpond.executor.summary import RunSummary
    from millpond.executor.timer import Timer
    from millpond.statestore.codec import BytesCodec, Codec, JsonCodec, MsgpackCodec
    from millpond.statestore.errors import (
        ConflictError,
        DataError,
        FencedError,
        InternalError,
        InvalidError,
        MillpondError,
        OutcomeUnknownError,
        UnavailableError,
    )
    from millpond.statestore.store import Store

_HOMES: Final[dict[str, str]] = {
    "BoundedDisorder": "executor.injector",
    "BytesCodec": "statestore.codec",
    "Codec": "statestore.codec",
    "Computation": "executor.computation",
    "ConflictError": "statestore.errors",
    "Context": "executor.context",
    "DEAD_LETTERS": "executor.pipeline",
    "DataError": "statestore.errors",
    "DeltaSink": "executor.sink",
    "DirectoryInjector": "executor.directory_injector",
    "FILE_ROW": "executor.directory_injector",
    "FencedError": "statestore.errors",
    "ForeachBatch": "executor.foreach_batch",
    "InternalError": "statestore.errors",
    "InvalidError": "statestore.errors",
    "JsonCodec": "statestore.codec",
    "LocalRun": "executor.local_run",
    "LocalRunner": "executor.local_runner",
    "ManualWatermark": "executor.injector",
    "MarkColumn": "executor.injector_policies",
    "MillpondError": "statestore.errors",
    "Monotone": "executor.injector_policies",
    "MsgpackCodec": "statestore.codec",
    "ObservedPercentile": "executor.injector_policies",
    "OutcomeUnknownError": "statestore.errors",
    "Perfect": "executor.injector_policies",
    "Pipeline": "executor.pipeline",
    "Record": "executor.record",
    "Records": "executor.record",
    "RunSummary": "executor.summary",
    "SparkRun": "executor.spark_run",
    "SparkRunner": "executor.spark_runner",
    "Store": "statestore.store",
    "Stream": "executor.stream",
    "Timer": "executor.timer",
    "UnavailableError": "statestore.errors",
    "UserWatermark": "executor.injector_policies",
    "foreach_batch": "executor.foreach_batch",
    "spark_session": "executor.spark_session",
}

__all__ = [
    "DEAD_LETTERS",
    "FILE_ROW",
    "BoundedDisorder",
    "BytesCodec",
    "Codec",
    "Computation",
    "ConflictError",
    "Context",
    "DataError",
    "DeltaSink",
    "DirectoryInjector",
    "FencedError",
    "ForeachBatch",
    "InternalError",
    "InvalidError",
    "JsonCodec",
    "LocalRun",
    "LocalRunner",
    "ManualWatermark",
    "MarkColumn",
    "MillpondError",
    "Monotone",
    "MsgpackCodec",
    "ObservedPercentile",
    "OutcomeUnknownError",
    "Perfect",
    "Pipeline",
    "Record",
    "Records",
    "RunSummary",
    "SparkRun",
    "SparkRunner",
    "Store",
    "Stream",
    "Timer",
    "UnavailableError",
    "UserWatermark",
    "foreach_batch",
    "spark_session",
]


def __getattr__(name: str) -> object:
    """
    Load a public name from its home.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    found = getattr(import_module(f"millpond.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """
    The public names.
    """
    return __all__
