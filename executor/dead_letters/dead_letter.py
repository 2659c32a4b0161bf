"""Dead letters: records and timers that user code could not process, kept as rows.

Each is a row of the computation ``dead_letters``, committed with its superstep, so that SQL can list it. It is
also a production to the stream ``dead_letters``, to which computations and sinks can subscribe.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import orjson
import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter, ProductionSummary
from millpond.executor.computation.utf8 import printable
from millpond.executor.pipeline.names import DEAD_LETTERS, control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.types import EventTimeMicros, Superstep, WallTimeMicros

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RARE: Final = frozenset({"id_base64", "retried"})


def dead_letter_updates(
    pipeline: str,
    letters: Sequence[DeadLetter],
    *,
    superstep: Superstep,
    fence: Fence,
    at: EventTimeMicros,
    produce: bool,
    settled: Collection[str] = (),
) -> pa.Table:
    """The row updates of dead letters, one per letter, with the key ``pipeline/superstep/number``.

    Those that were retried or dropped are deleted. What they have produced to the stream ``dead_letters`` stays.

    Args:
        pipeline: the pipeline's name.
        letters: the dead letters.
        superstep: the superstep in which they failed.
        fence: the fence of the control interval.
        at: when they failed, in wall time; also the event time of a production whose letter has no readable time.
        produce: whether the letters also go to the stream ``dead_letters``.
        settled: the keys of letters of earlier supersteps that are deleted.
    """
    stamps = {"sequencer": fence.sequencer, "commit_number": fence.commit_number, "superstep": superstep}
    rows = [{"key": key, **stamps, "deleted": True} for key in sorted(settled)]
    for number, letter in enumerate(letters):
        key = f"{pipeline}/{superstep:010d}/{number:06d}"
        text = orjson.dumps(_readable(letter, at)).decode()
        letter_at = at if letter.at is None else letter.at
        production = {"stream": DEAD_LETTERS, "key": key, "value": text, "value_bytes": None, "at": letter_at}
        rows.append(
            {
                "key": key,
                **stamps,
                "state": text,
                "productions": [production] if produce else None,
                "deleted": False,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


@dataclass(frozen=True, slots=True)
class WrittenLetters:
    """The file of a superstep's dead letters, and the summary of its productions."""

    file: RowFile | None = None
    productions: tuple[ProductionSummary, ...] = ()


def write_dead_letters(
    store: Store,
    topology: Topology,
    letters: Sequence[DeadLetter],
    *,
    superstep: Superstep,
    fence: Fence,
    at: WallTimeMicros,
    token: str,
    settled: Collection[str] = (),
) -> WrittenLetters:
    """Write a superstep's dead letters to an uncommitted row file; writes nothing without a letter.

    Args:
        store: the open store.
        topology: the pipeline, which knows whether its dead letters have a consumer.
        letters: the dead letters.
        superstep: its number.
        fence: the fence of the commit that will add the file.
        at: the superstep's wall time: that of letters without a time of their own.
        token: makes the file's name unique.
        settled: the keys of letters that it deletes, because they were retried or dropped.
    """
    if not letters and not settled:
        return WrittenLetters()
    failed_at = EventTimeMicros(int(at))
    produce = bool(letters) and DEAD_LETTERS in topology.wanted_streams
    updates = dead_letter_updates(
        topology.name,
        letters,
        superstep=superstep,
        fence=fence,
        at=failed_at,
        produce=produce,
        settled=settled,
    )
    file = write_row_file(
        store.objects,
        control_interval(topology.name),
        updates,
        superstep=superstep,
        fence=fence,
        token=token,
        row_format=store.row_format,
    )
    times = [failed_at if letter.at is None else EventTimeMicros(letter.at) for letter in letters]
    if not produce:
        return WrittenLetters(file)
    summary = ProductionSummary(stream=DEAD_LETTERS, count=len(letters), oldest_at=min(times))
    return WrittenLetters(file, (summary,))


def _readable(letter: DeadLetter, failed_at: int) -> dict[str, object]:
    fields: dict[str, object] = {
        # The text of an error may hold any string; JSON needs one with a UTF-8 form.
        name: printable(value) if isinstance(value, str) else value
        for name, value in asdict(letter).items()
    }
    fields["failed_at"] = _date(failed_at)
    if letter.at is not None:
        fields["at"] = _date(letter.at)
    if letter.value_types:
        fields["value_types"] = dict(letter.value_types)
    else:
        del fields["value_types"]
    # Most letters have neither.
    return {name: value for name, value in fields.items() if value or name not in _RARE}


def _date(at: int) -> str | int:
    try:
        return (_EPOCH + timedelta(microseconds=at)).isoformat()
    except OverflowError:
        # The time of a timer may lie outside the calendar.
        return at
