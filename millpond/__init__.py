"""
Millpond: a storage-centric transactional state engine for streams, on Delta Lake.

This module holds all public names and only those. Each is loaded on first use, so that
``import millpond`` is cheap in a process that uses few of them, such as a Spark worker.

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
    from millpond.dataflow.windows.calendar_windows import CalendarWindows
    from millpond.dataflow.co_group import co_group
    from millpond.dataflow.combiners.combine_fn import CombineFn
    from millpond.dataflow.combiners.combiners import Count, CountDistinct, Max, Mean, Min, Quantiles, Sum, ToList, TopN
    from millpond.dataflow.triggers.composite_triggers import AfterAll, AfterAny, AfterEach, OrFinally
    from millpond.dataflow.triggers.count_triggers import AfterBytes, AfterCount, ShouldEmit
    from millpond.dataflow.windows.element import Element
    from millpond.dataflow.windows.fixed_windows import FixedWindows, GlobalWindows, UnalignedFixedWindows
    from millpond.dataflow.step.pane import Pane, Timing, WindowedValue
    from millpond.dataflow.pipeline import Pipeline
    from millpond.dataflow.triggers.repeat_triggers import Never, RepeatCount, RepeatUntil, Repeatedly
    from millpond.dataflow.windows.sessions import Sessions
    from millpond.dataflow.combiners.sketches import ApproximateCountDistinct, ApproximateQuantiles
    from millpond.dataflow.windows.sliding_windows import SlidingWindows
    from millpond.dataflow.step.strategy import Accumulation, Closing, WindowingStrategy
    from millpond.dataflow.stream import DataflowStream, WindowedStream
    from millpond.dataflow.triggers.time_triggers import AfterDelay, AfterProcessingTime, AtPeriod, Domain
    from millpond.dataflow.windows.timestamp_combiner import TimestampCombiner
    from millpond.dataflow.triggers.trigger import Trigger
    from millpond.dataflow.triggers.trigger_context import Contents, TriggerContext
    from millpond.dataflow.triggers.watermark_triggers import AfterWatermark, Default, WatermarkPercentile
    from millpond.dataflow.windows.window import Window
    from millpond.dataflow.windows.window_fn import Merge, WindowFn
    from millpond.executor.computation.computation import Computation
    from millpond.executor.computation.context import Context
    from millpond.executor.pipeline.names import (DEAD_LETTERS)
    from millpond.executor.local.directory_injector import DirectoryInjector, FILE_ROW
    from millpond.executor.spark.foreach_batch import ForeachBatch, foreach_batch
    from millpond.executor.injectors.ingress_time import IngressTime
    from millpond.executor.injectors.policy import BoundedDisorder, ManualWatermark
    from millpond.executor.injectors.policies import (
        MarkColumn,
        Monotone,
        ObservedPercentile,
        Perfect,
        UserWatermark,
    )
    from millpond.executor.local.run import LocalRun
    from millpond.executor.local.runner import LocalRunner
    from millpond.executor.computation.record import Record, Records
    from millpond.executor.sinks.sink import DeltaSink
    from millpond.executor.spark.run import SparkRun
    from millpond.executor.spark.runner import SparkRunner
    from millpond.executor.spark.session import spark_session
    from millpond.executor.pipeline.stream import Stream
    from millpond.executor.reporting.summary import RunSummary
    from millpond.executor.computation.timer import Timer
    from millpond.statestore.rows.codec import BytesCodec, Codec, JsonCodec, MsgpackCodec
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
    "Accumulation": "dataflow.step.strategy",
    "AfterAll": "dataflow.triggers.composite_triggers",
    "AfterAny": "dataflow.triggers.composite_triggers",
    "AfterBytes": "dataflow.triggers.count_triggers",
    "AfterCount": "dataflow.triggers.count_triggers",
    "AfterDelay": "dataflow.triggers.time_triggers",
    "AfterEach": "dataflow.triggers.composite_triggers",
    "AfterProcessingTime": "dataflow.triggers.time_triggers",
    "AfterWatermark": "dataflow.triggers.watermark_triggers",
    "ApproximateCountDistinct": "dataflow.combiners.sketches",
    "ApproximateQuantiles": "dataflow.combiners.sketches",
    "AtPeriod": "dataflow.triggers.time_triggers",
    "BoundedDisorder": "executor.injectors.policy",
    "BytesCodec": "statestore.rows.codec",
    "CalendarWindows": "dataflow.windows.calendar_windows",
    "Closing": "dataflow.step.strategy",
    "Codec": "statestore.rows.codec",
    "CombineFn": "dataflow.combiners.combine_fn",
    "Computation": "executor.computation.computation",
    "ConflictError": "statestore.errors",
    "Contents": "dataflow.triggers.trigger_context",
    "Context": "executor.computation.context",
    "Count": "dataflow.combiners.combiners",
    "CountDistinct": "dataflow.combiners.combiners",
    "DEAD_LETTERS": "executor.pipeline.names",
    "DataError": "statestore.errors",
    "DataflowStream": "dataflow.stream",
    "Default": "dataflow.triggers.watermark_triggers",
    "DeltaSink": "executor.sinks.sink",
    "DirectoryInjector": "executor.local.directory_injector",
    "Domain": "dataflow.triggers.time_triggers",
    "Element": "dataflow.windows.element",
    "FILE_ROW": "executor.local.directory_injector",
    "FencedError": "statestore.errors",
    "FixedWindows": "dataflow.windows.fixed_windows",
    "ForeachBatch": "executor.spark.foreach_batch",
    "GlobalWindows": "dataflow.windows.fixed_windows",
    "IngressTime": "executor.injectors.ingress_time",
    "InternalError": "statestore.errors",
    "InvalidError": "statestore.errors",
    "JsonCodec": "statestore.rows.codec",
    "LocalRun": "executor.local.run",
    "LocalRunner": "executor.local.runner",
    "ManualWatermark": "executor.injectors.policy",
    "MarkColumn": "executor.injectors.policies",
    "Max": "dataflow.combiners.combiners",
    "Mean": "dataflow.combiners.combiners",
    "Merge": "dataflow.windows.window_fn",
    "MillpondError": "statestore.errors",
    "Min": "dataflow.combiners.combiners",
    "Monotone": "executor.injectors.policies",
    "MsgpackCodec": "statestore.rows.codec",
    "Never": "dataflow.triggers.repeat_triggers",
    "ObservedPercentile": "executor.injectors.policies",
    "OrFinally": "dataflow.triggers.composite_triggers",
    "OutcomeUnknownError": "statestore.errors",
    "Pane": "dataflow.step.pane",
    "Perfect": "executor.injectors.policies",
    "Pipeline": "dataflow.pipeline",
    "Quantiles": "dataflow.combiners.combiners",
    "Record": "executor.computation.record",
    "Records": "executor.computation.record",
    "RepeatCount": "dataflow.triggers.repeat_triggers",
    "RepeatUntil": "dataflow.triggers.repeat_triggers",
    "Repeatedly": "dataflow.triggers.repeat_triggers",
    "RunSummary": "executor.reporting.summary",
    "Sessions": "dataflow.windows.sessions",
    "ShouldEmit": "dataflow.triggers.count_triggers",
    "SlidingWindows": "dataflow.windows.sliding_windows",
    "SparkRun": "executor.spark.run",
    "SparkRunner": "executor.spark.runner",
    "Store": "statestore.store",
    "Stream": "executor.pipeline.stream",
    "Sum": "dataflow.combiners.combiners",
    "Timer": "executor.computation.timer",
    "TimestampCombiner": "dataflow.windows.timestamp_combiner",
    "Timing": "dataflow.step.pane",
    "ToList": "dataflow.combiners.combiners",
    "TopN": "dataflow.combiners.combiners",
    "Trigger": "dataflow.triggers.trigger",
    "TriggerContext": "dataflow.triggers.trigger_context",
    "UnalignedFixedWindows": "dataflow.windows.fixed_windows",
    "UnavailableError": "statestore.errors",
    "UserWatermark": "executor.injectors.policies",
    "WatermarkPercentile": "dataflow.triggers.watermark_triggers",
    "Window": "dataflow.windows.window",
    "WindowFn": "dataflow.windows.window_fn",
    "WindowedStream": "dataflow.stream",
    "WindowedValue": "dataflow.step.pane",
    "WindowingStrategy": "dataflow.step.strategy",
    "co_group": "dataflow.co_group",
    "foreach_batch": "executor.spark.foreach_batch",
    "spark_session": "executor.spark.session",
}

__all__ = [
    "Accumulation",
    "AfterAll",
    "AfterAny",
    "AfterBytes",
    "AfterCount",
    "AfterDelay",
    "AfterEach",
    "AfterProcessingTime",
    "AfterWatermark",
    "ApproximateCountDistinct",
    "ApproximateQuantiles",
    "AtPeriod",
    "BoundedDisorder",
    "BytesCodec",
    "CalendarWindows",
    "Closing",
    "Codec",
    "CombineFn",
    "Computation",
    "ConflictError",
    "Contents",
    "Context",
    "Count",
    "CountDistinct",
    "DEAD_LETTERS",
    "DataError",
    "DataflowStream",
    "Default",
    "DeltaSink",
    "DirectoryInjector",
    "Domain",
    "Element",
    "FILE_ROW",
    "FencedError",
    "FixedWindows",
    "ForeachBatch",
    "GlobalWindows",
    "IngressTime",
    "InternalError",
    "InvalidError",
    "JsonCodec",
    "LocalRun",
    "LocalRunner",
    "ManualWatermark",
    "MarkColumn",
    "Max",
    "Mean",
    "Merge",
    "MillpondError",
    "Min",
    "Monotone",
    "MsgpackCodec",
    "Never",
    "ObservedPercentile",
    "OrFinally",
    "OutcomeUnknownError",
    "Pane",
    "Perfect",
    "Pipeline",
    "Quantiles",
    "Record",
    "Records",
    "RepeatCount",
    "RepeatUntil",
    "Repeatedly",
    "RunSummary",
    "Sessions",
    "ShouldEmit",
    "SlidingWindows",
    "SparkRun",
    "SparkRunner",
    "Store",
    "Stream",
    "Sum",
    "Timer",
    "TimestampCombiner",
    "Timing",
    "ToList",
    "TopN",
    "Trigger",
    "TriggerContext",
    "UnalignedFixedWindows",
    "UnavailableError",
    "UserWatermark",
    "WatermarkPercentile",
    "Window",
    "WindowFn",
    "WindowedStream",
    "WindowedValue",
    "WindowingStrategy",
    "co_group",
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
