"""What a replay notes in its store's folder: which run it repeats, and where its sinks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

import orjson

from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.types import Objects

NOTE: Final = "replay.json"
"""The note's path in the store's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayNote:
    """What is replayed.

    Attributes:
        store: where the original lies.
        pipeline: the pipeline's name.
        version: the version that the replay begins with.
        until: the version that it goes up to.
        recorded: whether it repeats the supersteps of the original.
        superstep: the last superstep of the original.
        sinks: by its name, the table that each `DeltaSink` of the code names.
    """

    store: str
    pipeline: str
    version: int
    until: int
    recorded: bool
    superstep: int
    sinks: Mapping[str, str] = field(default_factory=dict)


def note_text(note: ReplayNote) -> bytes:
    """What stands in the folder."""
    return orjson.dumps(asdict(note), option=orjson.OPT_INDENT_2)


def read_note(folder: Objects) -> ReplayNote | None:
    """The note in a store's folder; ``None`` in that of a store which is no replay.

    Raises:
        DataError: the note cannot be read.
        UnavailableError: the store is unavailable.
    """
    try:
        return ReplayNote(**orjson.loads(folder.get(NOTE)))
    except ObjectMissingError:
        return None
    except (TypeError, ValueError) as error:
        raise DataError("the note of the replay cannot be read", path=NOTE, store=folder.url) from error
