"""What has changed between two topologies of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond.statestore.catalog.entries import PipelineDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChange:
    """The computations and sinks by which a pipeline differs from the one before it; all names in order.

    Attributes:
        added: computations that the former one did not have.
        removed: computations that it no longer has.
        changed: computations with other code, options, inputs or productions.
        sinks_added: sinks that the former one did not have.
        sinks_removed: sinks that it no longer has.
        sinks_changed: sinks with another stream or destination.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    sinks_added: tuple[str, ...] = ()
    sinks_removed: tuple[str, ...] = ()
    sinks_changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.added
            or self.removed
            or self.changed
            or self.sinks_added
            or self.sinks_removed
            or self.sinks_changed
        )


def change_between(former: PipelineDefinition | None, present: PipelineDefinition) -> TopologyChange:
    """What has changed from one topology to the next.

    Args:
        former: the earlier topology; ``None`` if there was none.
        present: the later one.

    Example:
        >>> from millpond.statestore.catalog.entries import ComputationDefinition
        >>> change_between(None, PipelineDefinition(name="p", computations=(
        ...     ComputationDefinition(name="count", code_hash="1"),))).added
        ('count',)
    """
    code_before, code = ({} if one is None else _computations(one) for one in (former, present))
    sinks_before, sinks = (
        {} if one is None else {sink.name: (sink.stream, sink.destination) for sink in one.sinks}
        for one in (former, present)
    )
    return TopologyChange(
        added=tuple(sorted(code.keys() - code_before.keys())),
        removed=tuple(sorted(code_before.keys() - code.keys())),
        changed=_changed(code_before, code),
        sinks_added=tuple(sorted(sinks.keys() - sinks_before.keys())),
        sinks_removed=tuple(sorted(sinks_before.keys() - sinks.keys())),
        sinks_changed=_changed(sinks_before, sinks),
    )


def _changed(former: Mapping[str, object], present: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(name for name in former.keys() & present.keys() if former[name] != present[name]))


def _computations(definition: PipelineDefinition) -> dict[str, object]:
    """By computation, all that it is: code, codec, options, what it consumes and what it produces."""
    return {
        one.name: (
            one.code_hash,
            one.codec,
            sorted(one.options.items()),
            sorted((s.stream, s.key_extractor) for s in definition.subscriptions if s.consumer == one.name),
            sorted(stream.name for stream in definition.streams if one.name in stream.producers),
        )
        for one in definition.computations
    }
