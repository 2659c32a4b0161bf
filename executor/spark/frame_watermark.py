"""
A frame's own watermark: the delay of ``withWatermark`` is the policy of a stream that declares no other.

Spark's analyser notes the delay at the column that it holds for, in the analysed plan's output, from where it
goes on through ``select``, ``withColumn`` and renamings of that column; so the frame's schema tells it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from millpond.executor.event_time.duration import duration_text
from millpond.executor.injectors.policy import BoundedDisorder
from millpond.executor.pipeline.nodes import InjectorNode
from millpond.executor.pipeline.topology import Topology

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["watermark_column", "with_frame_watermarks"]

_LOG: Final = logging.getLogger("millpond")
_DELAY_KEY: Final = "spark.watermarkDelayMs"
_MILLISECOND_US: Final = 1_000


def with_frame_watermarks(topology: Topology, inputs: Mapping[str, DataFrame]) -> Topology:
    """
    The topology whose streams have the watermark policies of their frames, where the program declares none.

    Args:
        topology: the checked pipeline.
        inputs: a frame per injected stream.
    """
    injectors = {
        stream: _with_delay(node, inputs[stream].schema) if stream in inputs and node.is_assumed else node
        for stream, node in topology.injectors.items()
    }
    return replace(topology, injectors=injectors)


def watermark_column(schema: StructType) -> str | None:
    """
    The column of a frame's ``withWatermark``; ``None`` without one.
    """
    return next((field.name for field in schema.fields if _DELAY_KEY in field.metadata), None)


def _with_delay(node: InjectorNode, schema: StructType) -> InjectorNode:
    delays_us = {
        field.name: int(field.metadata[_DELAY_KEY]) * _MILLISECOND_US
        for field in schema.fields
        if _DELAY_KEY in field.metadata
    }
    delay_us = delays_us.get(node.at) if isinstance(node.at, str) else None
    if delay_us is None:
        if delays_us:
            _LOG.warning(
                "withWatermark is on another column than the event time, and is not taken: stream=`%s` at=`%s` "
                "withWatermark=`%s`",
                node.stream,
                node.at,
                sorted(delays_us),
            )
        return node
    _LOG.info("watermark from withWatermark stream=`%s` delay=`%s`", node.stream, duration_text(delay_us))
    return replace(node, watermark=BoundedDisorder(delay_us), is_assumed=False)
