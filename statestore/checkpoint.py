"""
Delta checkpoints: the sum of a log up to a version, for opens whose older commits were cleaned up.

Reads the classic format, in one or several parts, by whomever it was written
(delta-rs, delta-spark). A checkpoint carries no digest, so the log itself is
preferred as long as it is whole; pages are verified where their writer left checksums.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.commit_file import action_from_fields
from millpond.statestore.errors import DataError
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millpond.statestore.action import Action

__all__ = ["Checkpoint", "checkpoints_among", "read_part"]

_CLASSIC: Final = re.compile(r"^_delta_log/(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
_KINDS: Final = ("protocol", "metaData", "txn", "add")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    A complete checkpoint: the version it sums up, and the paths of its parts.
    """

    version: TableVersion
    paths: tuple[str, ...]


def checkpoints_among(paths: Iterable[str]) -> tuple[Checkpoint, ...]:
    """
    The complete checkpoints among the files of a log, oldest first; half written ones are left out.
    """
    parts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = _CLASSIC.search(path)
        if match:
            parts[int(match[1]), int(match[3] or 1)].append(path)
    return tuple(
        Checkpoint(TableVersion(version), tuple(found))
        for (version, expected), found in sorted(parts.items())
        if len(found) >= expected
    )


def read_part(data: bytes, path: str) -> Iterator[Action]:
    """
    The actions of one part that make up a table: protocol, metadata, transactions, live files.

    Raises:
        DataError: the part cannot be read.
    """
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        for kind in _KINDS:
            if kind in table.column_names:
                for fields in table.column(kind).drop_null().to_pylist():
                    yield action_from_fields(kind, _with_mappings(fields))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the checkpoint cannot be read", path=path) from error


def _with_mappings(fields: dict[str, Any]) -> dict[str, Any]:
    # Parquet maps arrive as lists of pairs.
    return {
        name: dict(value) if name in {"partitionValues", "tags", "configuration"} and value else value
        for name, value in fields.items()
    }
