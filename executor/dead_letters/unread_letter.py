"""Letters of records that never reached the code, because no key, time or id could be read from them: read once more.

The letter has the row, or the production, that was to be read, so a mended extractor may find in it what the former one
did not. The id was never consumed: it is checked as that of any record, and the record is a duplicate if it was injected
again meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millpond.executor.bundle.letter_value import describe_value, is_whole, letter_value
from millpond.executor.bundle.retried_letter import RetriedLetter, check_types_kept, letter_time_us
from millpond.executor.payloads.decoded_rows import rows_to_extract, value_of_row
from millpond.executor.pipeline.extract_rows import read_injected
from millpond.executor.pipeline.injector_node import InjectorNode
from millpond.executor.pipeline.key_extractor import extract_key
from millpond.executor.pipeline.nodes import ComputationNode, Subscription
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros


def read_again(
    name: str,
    letter: Mapping[str, Any],
    node: ComputationNode,
    subscription: Subscription,
    injector: InjectorNode | None,
    id_scope: Callable[[str, str], bytes],
) -> RetriedLetter:
    """The record of a letter, read by the extractors of now.

    Args:
        name: the key of the letter's row.
        letter: its fields.
        node: the computation that the record is for.
        subscription: its subscription to the record's stream.
        injector: of the stream; ``None`` for a stream of productions.
        id_scope: returns the prefix of record ids, by computation and stream.

    Raises:
        InvalidError: the record still cannot be read.
    """
    check_types_kept(letter)
    value = letter_value(letter)
    if injector is None:
        key = extract_key(subscription.key, None, value)
        return RetriedLetter.read(name, {**letter, "key": key})
    if injector.change is not None:
        raise InvalidError("a change of a table that could not be read is not read again: inject it")
    told_at = letter.get("at")
    stamp_at = None if told_at is None else EventTimeMicros(letter_time_us(told_at))
    rows = rows_to_extract(injector, [value])
    read = read_injected(injector, subscription.key, rows, stamp_at)
    if read.errors:
        raise InvalidError(f"the record still cannot be read: {next(iter(read.errors.values()))}")
    text, types = str(letter["value"]), dict(letter.get("value_types") or {})
    if injector.payload is not None:
        text, types = _decoded(rows[0])
    own_id = None if read.ids is None else read.ids[0].as_py()
    return RetriedLetter(
        name=name,
        stream=subscription.stream,
        key=read.keys[0].as_py(),
        at=int(read.at[0]),
        value=text,
        value_types=types,
        id=own_id,
        unseen_id=None if own_id is None else id_scope(node.name, subscription.stream) + own_id,
        retried=int(letter.get("retried") or 0) + 1,
    )


def _decoded(row: Any) -> tuple[str, dict[str, str]]:
    """The value of a row whose payload could be decoded now, as letters keep values."""
    described = describe_value(lambda: value_of_row(row))
    if not is_whole(described.types):
        raise InvalidError("the decoded value cannot be kept as a letter: inject the row")
    return described.text, dict(described.types)
