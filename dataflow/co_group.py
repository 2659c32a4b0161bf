"""
Co-grouping: several streams in one windowed step, by the same key: the ground of joins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from millpond.dataflow.combiners.combine_fn import CombineFn, ValueExtractor, check_extractor
from millpond.dataflow.step.element_wise import PaneKey
from millpond.dataflow.step.strategy import WindowingStrategy
from millpond.dataflow.step.windowed_computation import WindowedComputation, element_of
from millpond.dataflow.stream import DataflowStream
from millpond.dataflow.windows.element import Element
from millpond.executor.computation.record import Record
from millpond.executor.pipeline.key_extractor import KeyExtractor
from millpond.executor.pipeline.stream import ComputationOptions
from millpond.statestore.errors import InvalidError

__all__ = ["co_group"]


@dataclass(frozen=True)
class _ByTag(CombineFn):
    """
    Lists of values, one for each tag; elements are pairs of tag and value.
    """

    tags: tuple[str, ...]

    def create(self) -> dict[str, list[Any]]:
        """
        Nothing under any tag.
        """
        return {tag: [] for tag in self.tags}

    def add(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        """
        One more under its tag.
        """
        tag, inner = value
        accumulator[tag].append(inner)
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
        """
        All of them, tag by tag.
        """
        return {tag: [one for group in accumulators for one in group[tag]] for tag in self.tags}

    def uncombine(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        """
        One less under its tag.
        """
        tag, inner = value
        if inner not in accumulator[tag]:
            raise InvalidError("an element is taken back that had not come", value=inner)
        accumulator[tag].remove(inner)
        return accumulator


class _CoGrouping(WindowedComputation):
    """
    A windowed step whose elements remember the stream that they came on.
    """

    def __init__(
        self,
        strategy: WindowingStrategy,
        tags: Mapping[str, str],
        stream: str,
        wanted: Mapping[str, ValueExtractor],
    ) -> None:
        super().__init__(strategy, _ByTag(tuple(tags.values())), stream)
        self.tags = dict(tags)
        self.wanted = dict(wanted)

    def element(self, record: Record) -> Element:
        """
        The element, tagged.
        """
        tag = self.tags[record.stream]
        found = element_of(record, self.wanted.get(tag))
        return Element(
            value=(tag, found.value), at=found.at, key=found.key, is_retraction=found.is_retraction
        )


def co_group(
    streams: Mapping[str, DataflowStream],
    strategy: WindowingStrategy,
    *,
    name: str,
    keys: Mapping[str, KeyExtractor] | None = None,
    of: Mapping[str, ValueExtractor] | None = None,
    **options: Unpack[ComputationOptions],
) -> DataflowStream:
    """
    Group several streams of one pipeline by key and window.

    Args:
        streams: the streams, by the tags under which their values appear.
        strategy: where in event time they are grouped, and when and how the groups are shown.
        name: the step's name, its table in SQL, and the stream of its panes.
        keys: how a value's key is got, by tag; the record's own key unless given.
        of: what of a value is kept, by tag: a field, a function of the value; all of it unless given.
        options: `ComputationOptions`.

    Returns:
        The stream of panes, whose values are objects with a list for each tag; what a join is to
        make of them, its ``flat_map`` says.

    Raises:
        InvalidError: no streams, streams of several pipelines, a stream under two tags, a tag in ``keys`` or
            ``of`` that no stream has, or an ``of`` that is no extractor.
    """
    pipelines = {id(stream.pipeline) for stream in streams.values()}
    if len(pipelines) != 1 or len({stream.name for stream in streams.values()}) < len(streams):
        raise InvalidError("co_group takes different streams of one pipeline", step=name)
    first, *_ = streams.values()
    extractors, wanted = keys or {}, of or {}
    if unknown := sorted({*extractors, *wanted} - streams.keys()):
        raise InvalidError("keys and of go by the tags of the streams", step=name, unknown=unknown)
    for extractor in wanted.values():
        check_extractor(extractor)
    first.pipeline.add(
        _CoGrouping(strategy, {stream.name: tag for tag, stream in streams.items()}, name, wanted),
        name=name,
        subscribes={stream.name: PaneKey.of(extractors.get(tag)) for tag, stream in streams.items()},
        produces=(name,),
        **options,
    )
    return replace(first, name=name)
