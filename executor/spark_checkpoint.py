"""
Spark's streaming checkpoints, taken back to an earlier batch: for repair.

A checkpoint has a folder ``offsets`` with what each batch covers and a folder ``commits`` with the batches
that are done, a file a batch, and a file ``metadata`` with the query's id. Without the files after a batch,
the query begins with the next one and reads its offsets from the source again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import orjson

__all__ = ["rewind_checkpoints"]

_PARTS: Final = ("commits", "offsets")


def rewind_checkpoints(folder: Path, batches: Mapping[str, int], *, dry_run: bool = False) -> tuple[str, ...]:
    """
    Take the checkpoints of some queries back.

    Args:
        folder: where checkpoints are, at any depth.
        batches: by query id, the last batch that stays; -1 for none.
        dry_run: change nothing.

    Returns:
        The ids of the queries whose checkpoint was found there and goes, or went, back.
    """
    found = []
    for metadata in sorted(folder.rglob("metadata")):
        query = _id_of(metadata)
        if query is None or query not in batches:
            continue
        later = list(_later(metadata.parent, batches[query]))
        # Commits first: killed in between, Spark runs a batch again, which the store recognises.
        for path in () if dry_run else later:
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        if later:
            found.append(query)
    return tuple(found)


def _later(checkpoint: Path, batch: int) -> Iterator[Path]:
    for part in _PARTS:
        numbered = [path for path in (checkpoint / part).glob("*") if path.name.isdecimal()]
        yield from sorted((path for path in numbered if int(path.name) > batch), reverse=True)


def _id_of(metadata: Path) -> str | None:
    if not metadata.is_file():
        return None
    try:
        said = orjson.loads(metadata.read_bytes())
    except ValueError:
        return None
    return said.get("id") if isinstance(said, dict) else None
