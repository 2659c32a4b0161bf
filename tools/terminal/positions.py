"""How far the inputs of pipelines are consumed: what the log says, as fields and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from millpond.executor.pipeline.positions import BOUNDED_SOURCE, LOCAL_SOURCE
from millpond.statestore.app_ids import INPUT_PREFIX, app_id_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedInput:
    """How far one source of an input is consumed.

    Attributes:
        pipeline: the pipeline.
        input: the injected stream.
        source: the id of a Spark query, or what a run without one is called.
        batch: the last batch of a query; of rows handed to the local runner, how many.
        offsets: where that is in the source, as the source says it: of a query its offset log, of files the file and row;
            ``None`` if it says nothing.
    """

    pipeline: str
    input: str
    source: str
    batch: int
    offsets: str | None

    @property
    def position(self) -> str:
        """The position in words."""
        if self.batch < 0:
            return "nothing"
        if self.source == LOCAL_SOURCE:
            return f"{self.batch:,} rows"
        return "all of it" if self.source == BOUNDED_SOURCE else f"batch {self.batch:,}"

    @property
    def place(self) -> str | None:
        """Where that is, in short: a file and a row, or the offsets of a query's sources."""
        if self.offsets is None:
            return None
        try:
            told = json.loads(self.offsets)
            # Rows in memory, and a repair, move the position and say nothing of a place.
            return f"row {told['row']:,} of {told['file']}" if told["rows"] == self.batch else None
        except (ValueError, TypeError, KeyError):
            # Spark's entry has a line about the format, one about the batch, and then one for each source.
            return " ".join(self.offsets.splitlines()[2:]) or None


def consumed_inputs(txns: Mapping[str, int], offsets: Mapping[str, str]) -> list[ConsumedInput]:
    """The inputs among the positions of a table, or of one commit.

    Args:
        txns: positions by application id.
        offsets: where they are in their sources, by the same ids.
    """
    found = []
    for app_id, batch in sorted(txns.items()):
        if app_id.startswith(INPUT_PREFIX):
            pipeline, stream, source = app_id_parts(app_id, INPUT_PREFIX)
            found.append(
                ConsumedInput(
                    pipeline=pipeline, input=stream, source=source, batch=batch, offsets=offsets.get(app_id)
                )
            )
    return found
