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
    from millpond.dataflow.calendar_windows import CalendarWindows
    from millpond.dataflow.co_group import co_group
    from millpond.dataflow.combine_fn import CombineFn
    from millpond.dataflow.combiners import Count, CountDistinct, Max, Mean, Min, Quantiles, Sum, ToList, TopN
    from millpond.dataflow.composite_triggers import AfterAll, AfterAny, AfterEach, OrFinally
    from millpond.dataflow.count_triggers import AfterBytes, AfterCount, ShouldEmit
    from millpond.dataflow.element import Element
    from millpond.dataflow.fixed_windows import FixedWindows, GlobalWindows, UnalignedFixedWindows
    from millpond.dataflow.pane import Pane, Timing, WindowedValue
    from millpond.dataflow.pipeline import Pipeline
    from millpond.dataflow.repeat_triggers import Never, RepeatCount, RepeatUntil, Repeatedly
    from millpond.dataflow.sessions import Sessions
    from millpond.dataflow.sketches import ApproximateCountDistinct, ApproximateQuantiles
    from millpond.dataflow.sliding_windows import SlidingWindows
    from millpond.dataflow.strategy import Accumulation, Closing, WindowingStrategy
    from millpond.dataflow.stream import DataflowStream, WindowedStream
    from millpond.dataflow.time_triggers import AfterDelay, AfterProcessingTime, AtPeriod, Domain
    from millpond.dataflow.timestamp_combiner import TimestampCombiner
    from millpond.dataflow.trigger import Trigger
    from millpond.dataflow.trigger_context import Contents, TriggerContext
    from millpond.dataflow.watermark_triggers import AfterWatermark, Default, WatermarkPercentile
    from millpond.dataflow.window import Window
    from millpond.dataflow.window_fn import Merge, WindowFn
    from millpond.executor.computation import Computation
    from millpond.executor.context import Context
    from millpond.executor.dead_letter import DEAD_LETTERS
    from millpond.executor.directory_injector import DirectoryInjector, FILE_ROW
    from millpond.executor.foreach_batch import ForeachBatch, foreach_batch
    from millpond.executor.ingress_time import IngressTime
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
    "Accumulation": "dataflow.strategy",
    "AfterAll": "dataflow.composite_triggers",
    "AfterAny": "dataflow.composite_triggers",
    "AfterBytes": "dataflow.count_triggers",
    "AfterCount": "dataflow.count_triggers",
    "AfterDelay": "dataflow.time_triggers",
    "AfterEach": "dataflow.composite_triggers",
    "AfterProcessingTime": "dataflow.time_triggers",
    "AfterWatermark": "dataflow.watermark_triggers",
    "ApproximateCountDistinct": "dataflow.sketches",
    "ApproximateQuantiles": "dataflow.sketches",
    "AtPeriod": "dataflow.time_triggers",
    "BoundedDisorder": "executor.injector",
    "BytesCodec": "statestore.codec",
    "CalendarWindows": "dataflow.calendar_windows",
    "Closing": "dataflow.strategy",
    "Codec": "statestore.codec",
    "CombineFn": "dataflow.combine_fn",
    "Computation": "executor.computation",
    "ConflictError": "statestore.errors",
    "Contents": "dataflow.trigger_context",
    "Context": "executor.context",
    "Count": "dataflow.combiners",
    "CountDistinct": "dataflow.combiners",
    "DEAD_LETTERS": "executor.dead_letter",
    "DataError": "statestore.errors",
    "DataflowStream": "dataflow.stream",
    "Default": "dataflow.watermark_triggers",
    "DeltaSink": "executor.sink",
    "DirectoryInjector": "executor.directory_injector",
    "Domain": "dataflow.time_triggers",
    "Element": "dataflow.element",
    "FILE_ROW": "executor.directory_injector",
    "FencedError": "statestore.errors",
    "FixedWindows": "dataflow.fixed_windows",
    "ForeachBatch": "executor.foreach_batch",
    "GlobalWindows": "dataflow.fixed_windows",
    "IngressTime": "executor.ingress_time",
    "InternalError": "statestore.errors",
    "InvalidError": "statestore.errors",
    "JsonCodec": "statestore.codec",
    "LocalRun": "executor.local_run",
    "LocalRunner": "executor.local_runner",
    "ManualWatermark": "executor.injector",
    "MarkColumn": "executor.injector_policies",
    "Max": "dataflow.combiners",
    "Mean": "dataflow.combiners",
    "Merge": "dataflow.window_fn",
    "MillpondError": "statestore.errors",
    "Min": "dataflow.combiners",
    "Monotone": "executor.injector_policies",
    "MsgpackCodec": "statestore.codec",
    "Never": "dataflow.repeat_triggers",
    "ObservedPercentile": "executor.injector_policies",
    "OrFinally": "dataflow.composite_triggers",
    "OutcomeUnknownError": "statestore.errors",
    "Pane": "dataflow.pane",
    "Perfect": "executor.injector_policies",
    "Pipeline": "dataflow.pipeline",
    "Quantiles": "dataflow.combiners",
    "Record": "executor.record",
    "Records": "executor.record",
    "RepeatCount": "dataflow.repeat_triggers",
    "RepeatUntil": "dataflow.repeat_triggers",
    "Repeatedly": "dataflow.repeat_triggers",
    "RunSummary": "executor.summary",
    "Sessions": "dataflow.sessions",
    "ShouldEmit": "dataflow.count_triggers",
    "SlidingWindows": "dataflow.sliding_windows",
    "SparkRun": "executor.spark_run",
    "SparkRunner": "executor.spark_runner",
    "Store": "statestore.store",
    "Stream": "executor.stream",
    "Sum": "dataflow.combiners",
    "Timer": "executor.timer",
    "TimestampCombiner": "dataflow.timestamp_combiner",
    "Timing": "dataflow.pane",
    "ToList": "dataflow.combiners",
    "TopN": "dataflow.combiners",
    "Trigger": "dataflow.trigger",
    "TriggerContext": "dataflow.trigger_context",
    "UnalignedFixedWindows": "dataflow.fixed_windows",
    "UnavailableError": "statestore.errors",
    "UserWatermark": "executor.injector_policies",
    "WatermarkPercentile": "dataflow.watermark_triggers",
    "Window": "dataflow.window",
    "WindowFn": "dataflow.window_fn",
    "WindowedStream": "dataflow.stream",
    "WindowedValue": "dataflow.pane",
    "WindowingStrategy": "dataflow.strategy",
    "co_group": "dataflow.co_group",
    "foreach_batch": "executor.foreach_batch",
    "spark_session": "executor.spark_session",
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
