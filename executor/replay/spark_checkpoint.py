"""Takes Spark's streaming checkpoints back to an earlier batch, for a repair or a rewind.

A checkpoint has a folder ``offsets`` with what each batch covers, a folder ``commits`` with the batches
that are done, one file per batch, and a file ``metadata`` with the query's id. Once the files after a batch
are removed, the query continues with the next batch and reads its offsets from the source again. Spark keeps the files
of the last hundred batches; those of an older batch are written again from what the store knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import orjson

from millpond.statestore.app_ids import AppId

_Told = TypeVar("_Told")

_PARTS: Final = ("commits", "offsets")
_DONE: Final = 'v1\n{"nextBatchWatermarkMs":0}'
"""What Spark writes of a batch that is done."""

_NONE_KNOWN: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A query's progress, by its checkpoint.

    Attributes:
        done: the last batch that is done; -1 before the first.
        planned: the last batch that has started; -1 before the first.
    """

    done: int
    planned: int

    def is_ahead_of(self, consumed: int) -> bool:
        """Whether Spark would continue with a batch that is not the next one for a store.

        Args:
            consumed: the last batch that the store has; -1 for none.

        Example:
            >>> [Reached(done=4, planned=5).is_ahead_of(consumed) for consumed in (3, 4, 5)]
            [True, False, False]
        """
        return self.done > consumed or self.planned > consumed + 1


def reached_batches(folder: Path) -> dict[str, Reached]:
    """The progress of the checkpoints in a folder, by query id.

    Args:
        folder: contains the checkpoints, at any depth; if it does not exist, there are none.
    """
    reached = {}
    for query, checkpoint in checkpoints_in(folder).items():
        done, planned = (
            max((int(path.name) for path in _batches(checkpoint, part)), default=-1) for part in _PARTS
        )
        reached[query] = Reached(done=done, planned=planned)
    return reached


def checkpoints_in(folder: Path) -> dict[str, Path]:
    """The checkpoints in a folder, at any depth, by query id."""
    found = ((_id_of(metadata), metadata.parent) for metadata in sorted(folder.rglob("metadata")))
    return {query: checkpoint for query, checkpoint in found if query is not None}


def rewind_checkpoints(
    folder: Path,
    batches: Mapping[str, int],
    *,
    offsets: Mapping[str, str] = _NONE_KNOWN,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Take the checkpoints of some queries back.

    Args:
        folder: contains the checkpoints, at any depth.
        batches: by query id, the last batch that stays; -1 for none.
        offsets: by query id, Spark's entry for that batch, which is written where Spark has removed it.
        dry_run: change nothing.

    Returns:
        The ids of the queries whose checkpoints went back, or would in a run that is not dry.
    """
    rewound = []
    for query, checkpoint in checkpoints_in(folder).items():
        if query not in batches:
            continue
        last = batches[query]
        later = list(_later(checkpoint, last))
        if not dry_run and query in offsets and last >= 0:
            _write_missing(checkpoint, last, offsets[query])
        # Commits first: after a kill in between, Spark repeats a batch, which the store recognises.
        for path in () if dry_run else later:
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        if later:
            rewound.append(query)
    return tuple(rewound)


def by_query(told: Mapping[str, _Told]) -> dict[str, _Told]:
    """What is told of inputs, by the ids of the queries that deliver them.

    Args:
        told: by application id; other ids than those of inputs are left out.

    Example:
        >>> by_query({"millpond/input/p/clicks/51d0": 7, "millpond/superstep/p": 9})
        {'51d0': 7}
    """
    return {
        AppId.INPUT.parts(app_id)[-1]: one for app_id, one in told.items() if app_id.startswith(AppId.INPUT)
    }


def _write_missing(checkpoint: Path, batch: int, entry: str) -> None:
    # Before anything is removed: a kill in between leaves a checkpoint that is ahead, and is taken back again.
    for part, text in (("offsets", entry), ("commits", _DONE)):
        target = checkpoint / part / str(batch)
        if not target.exists():
            target.write_text(text)
            target.with_name(f".{target.name}.crc").unlink(missing_ok=True)


def _later(checkpoint: Path, batch: int) -> Iterator[Path]:
    # Newest first: a kill in between leaves no gap.
    for part in _PARTS:
        later = [path for path in _batches(checkpoint, part) if int(path.name) > batch]
        yield from sorted(later, key=lambda path: int(path.name), reverse=True)


def _batches(checkpoint: Path, part: str) -> Iterator[Path]:
    return (path for path in (checkpoint / part).glob("*") if path.name.isdecimal())


def _id_of(metadata: Path) -> str | None:
    if not metadata.is_file():
        return None
    try:
        fields = orjson.loads(metadata.read_bytes())
    except ValueError:
        return None
    return fields.get("id") if isinstance(fields, dict) else None
