"""Co-grouping: one windowed step over several streams that share a key, the basis of joins (Beam's CoGroupByKey)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from millpond.executor.computation.records import Record
from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.pipeline.nodes import ComputationOptions
from millpond.executor.windows.combine_fn import CombineFn, ValueExtractor, check_extractor
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.stream import DataflowStream
from millpond.executor.windows.window import Element
from millpond.executor.windows.windowed_computation import PaneKey, WindowedComputation, element_of
from millpond.statestore.errors import InvalidError


@dataclass(frozen=True)
class _ByTag(CombineFn):
    """One list of values per tag; an element is a pair of tag and value."""

    tags: tuple[str, ...]

    def create(self) -> dict[str, list[Any]]:
        """An empty list for each tag."""
        return {tag: [] for tag in self.tags}

    def add(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        """Append the value to the list of its tag."""
        tag, inner = value
        accumulator[tag].append(inner)
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
        """Concatenate the lists, tag by tag."""
        return {tag: [value for group in accumulators for value in group[tag]] for tag in self.tags}

    def uncombine(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        """Remove one occurrence of the value from the list of its tag.

        Raises:
            InvalidError: the list does not hold the value.
        """
        tag, inner = value
        if inner not in accumulator[tag]:
            raise InvalidError("a retraction matches no element", value=inner)
        accumulator[tag].remove(inner)
        return accumulator

    def uncombine_if_held(
        self, accumulator: dict[str, list[Any]], value: tuple[str, Any]
    ) -> tuple[dict[str, list[Any]], bool]:
        """Remove one occurrence of the value from the list of its tag, if there is one."""
        tag, inner = value
        is_held = inner in accumulator[tag]
        return (self.uncombine(accumulator, value) if is_held else accumulator), is_held


class _CoGrouping(WindowedComputation):
    """A windowed step whose elements carry the tag of the stream they arrived on."""

    def __init__(
        self,
        strategy: WindowingStrategy,
        tags: Mapping[str, str],
        stream: str,
        extractors: Mapping[str, ValueExtractor],
    ) -> None:
        super().__init__(strategy, _ByTag(tuple(tags.values())), stream)
        self.tags = dict(tags)
        self.extractors = dict(extractors)

    def element(self, record: Record) -> Element:
        """The record's element, its value paired with the tag of the record's stream."""
        tag = self.tags[record.stream]
        element = element_of(record, self.extractors.get(tag))
        return element._replace(value=(tag, element.value))


def co_group(
    streams: Mapping[str, DataflowStream],
    strategy: WindowingStrategy,
    *,
    name: str,
    keys: Mapping[str, KeyExtractor] | None = None,
    of: Mapping[str, ValueExtractor] | None = None,
    **options: Unpack[ComputationOptions],
) -> DataflowStream:
    """Group several streams of one pipeline by key and window.

    Args:
        streams: the input streams, by tag; a pane's value holds one list per tag.
        strategy: where in event time elements are grouped, when groups are emitted, and how panes
            of one window relate.
        name: the step's name, its table in SQL, and the name of its output stream.
        keys: how to extract the grouping key from a value, by tag; a tag that is left out uses the
            record's own key.
        of: which part of a value is kept, by tag: a field name or a function of the value; a tag
            that is left out keeps the whole value.
        options: see `ComputationOptions`.

    Returns:
        The stream of panes. A pane's value is an object with one list per tag; use ``flat_map`` to
        turn the lists into joined rows.

    Raises:
        InvalidError: no streams, streams of different pipelines, one stream under two tags, a tag in
            ``keys`` or ``of`` that no stream has, or an invalid extractor in ``of``.

    Example:
        >>> joined = co_group({"bid": bids, "auction": auctions}, strategy, name="joined", keys={"bid": "auction"})
    """
    pipelines = {id(stream.pipeline) for stream in streams.values()}
    if len(pipelines) != 1 or len({stream.name for stream in streams.values()}) < len(streams):
        raise InvalidError("co_group takes different streams of one pipeline", step=name)
    first, *_ = streams.values()
    key_extractors, extractors = keys or {}, of or {}
    if unknown := sorted({*key_extractors, *extractors} - streams.keys()):
        raise InvalidError("keys and of take the tags of the streams", step=name, unknown=unknown)
    for extractor in extractors.values():
        check_extractor(extractor)
    produced = first.pipeline.add(
        _CoGrouping(strategy, {stream.name: tag for tag, stream in streams.items()}, name, extractors),
        name=name,
        subscribes={stream.name: PaneKey.of(key_extractors.get(tag)) for tag, stream in streams.items()},
        produces=(name,),
        **options,
    )
    return replace(first, name=produced[name].name)
