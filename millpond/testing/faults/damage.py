"""Damage to files (a flipped bit, a cut, another file's contents) and the outcome of reading them.

The promise under test is "right bytes or an error": a reader gets the content from before the damage,
or a `DataError` that names a damaged file. Anything else is `Outcome.WRONG`, `OLDER` (an earlier
state of the store, which is worse, since it looks right), `UNNAMED` or `CRASHED`.

Use it on your own store: `file_kinds` sorts its files by kind, a `Damage` holds their new contents,
and `outcome_of` applies it, reads with your function, and restores the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Add, CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.types import Rng

Read = TypeVar("Read")


class DamageOutcome(Enum):
    """The outcome of reading a damaged store."""

    NAMED = "a DataError that names the file"
    UNHARMED = "the right answer"
    UNNAMED = "a DataError that names another file"
    CRASHED = "another error"
    WRONG = "a wrong answer in silence"
    OLDER = "an older answer in silence"

    @property
    def is_kept(self) -> bool:
        """Return True if the promise was kept."""
        return self in {DamageOutcome.NAMED, DamageOutcome.UNHARMED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """New contents of files.

    Attributes:
        what: the damage in words, for the report.
        files: contents by path relative to the root; ``None`` removes the file.
    """

    what: str
    files: Mapping[str, bytes | None]


def file_kinds(root: Path) -> dict[str, list[str]]:
    """The files of a store's table (its folder ``rows``) by kind, oldest first.

    Commits are grouped by kind, row files by computation and by whether a compaction wrote them.
    """
    kinds: dict[str, list[str]] = {}
    objects = open_objects(str(root))
    files: dict[str, str] = {}
    for version in Log(objects).inventory().versions:
        path = f"_delta_log/{version:020d}.json"
        actions = decode(objects.get(path), path)
        infos = [action.millpond for action in actions if isinstance(action, CommitInfo) and action.millpond]
        kind = str(infos[0].get("kind", "other")) if infos else "other"
        kinds.setdefault(f"{kind} commit", []).append(path)
        for action in actions:
            if isinstance(action, Add):
                owner = "dead letters" if "dead_letters" in action.path else "row file"
                files[action.path] = owner if action.data_change else f"compacted {owner}"
    for path in objects.list(""):
        if path.endswith(".checkpoint.parquet"):
            kinds.setdefault("checkpoint", []).append(path)
        elif path.endswith("_last_checkpoint"):
            kinds.setdefault("checkpoint pointer", []).append(path)
        elif path.endswith(".parquet"):
            kinds.setdefault(files.get(path, "row file"), []).append(path)
        elif not path.startswith("_delta_log/"):
            kinds.setdefault("other file", []).append(path)
    return kinds


def flip(root: Path, path: str, rng: Rng) -> Damage:
    """Flip one random bit of the file."""
    data = bytearray((root / path).read_bytes())
    index, bit = int(rng.random() * len(data)), int(rng.random() * 8)
    data[index] ^= 1 << bit
    return Damage(what=f"bit {bit} of byte {index} of {path} flipped", files={path: bytes(data)})


def _truncated(data: bytes, rng: Rng) -> bytes:
    return data[: int(rng.random() * len(data))]


def _cut_at_a_line(data: bytes, _: Rng) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


def _zeroed(data: bytes, _: Rng) -> bytes:
    return bytes(len(data))


def _zeroed_in_part(data: bytes, rng: Rng) -> bytes:
    start = int(rng.random() * len(data))
    length = min(512, len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def _emptied(_data: bytes, _: Rng) -> bytes:
    return b""


def _extended(data: bytes, rng: Rng) -> bytes:
    return data + data[: 1 + int(rng.random() * len(data))]


_CHANGES: Final[Mapping[str, Callable[[bytes, Rng], bytes]]] = {
    "truncated": _truncated,
    "cut at a line": _cut_at_a_line,
    "zeroed": _zeroed,
    "zeroed in part": _zeroed_in_part,
    "emptied": _emptied,
    "extended": _extended,
}

CUTS: Final = (*_CHANGES, "deleted", "rolled back", "swapped")
"""Names of what `cut` can do."""


def cut(root: Path, path: str, others: Sequence[str], how: str, rng: Rng) -> Damage | None:
    """Cut, empty or remove a file, or exchange it with another of its kind.

    Args:
        root: the table's root.
        path: the file.
        others: files of its kind, oldest first; ``rolled back`` uses an earlier one.
        how: one of `CUTS`.
        rng: chooses where to cut and what to exchange.

    Returns:
        The damage; ``None`` if there is no other file to use, or nothing would change.
    """
    data = (root / path).read_bytes()
    what = f"{path} {how}"
    if how == "deleted":
        return Damage(what=what, files={path: None})
    if how in _CHANGES:
        changed = _CHANGES[how](data, rng)
        return None if changed == data else Damage(what=what, files={path: changed})
    earlier = (
        others[: others.index(path)]
        if how == "rolled back"
        else [other_path for other_path in others if other_path != path]
    )
    if not earlier:
        return None
    other = earlier[int(rng.random() * len(earlier))]
    theirs = (root / other).read_bytes()
    back = {} if how == "rolled back" else {other: data}
    return Damage(what=f"{what} with {other}", files={path: theirs, **back})


def outcome_of(
    root: Path, damage: Damage, read: Callable[[], Read], right: Read, older: Sequence[Read] = ()
) -> tuple[DamageOutcome, str]:
    """Damage the files, read, and restore the files.

    Args:
        root: the table's root.
        damage: the damage to apply.
        read: reads the store; its answers are compared with ``==``.
        right: the answer of the undamaged store.
        older: answers that the store gave earlier.

    Returns:
        The outcome, and the damage and the error in words.
    """
    whole = {path: (root / path).read_bytes() for path in damage.files}
    try:
        for path, data in damage.files.items():
            _set(root / path, data)
        outcome, text = _judge(damage, read, right, older)
    finally:
        for path, data in whole.items():
            _set(root / path, data)
    return outcome, f"{damage.what}: {outcome.value}{text}"


def _judge(
    damage: Damage, read: Callable[[], Read], right: Read, older: Sequence[Read]
) -> tuple[DamageOutcome, str]:
    try:
        answer = read()
    except DataError as error:
        is_named = any(path.rpartition("/")[2] in str(error) for path in damage.files)
        return DamageOutcome.NAMED if is_named else DamageOutcome.UNNAMED, f": {error}"
    except Exception as error:  # noqa: BLE001 - that it is no DataError is the finding
        return DamageOutcome.CRASHED, f": {type(error).__name__} {error}"
    if answer == right:
        return DamageOutcome.UNHARMED, ""
    return (DamageOutcome.OLDER if answer in older else DamageOutcome.WRONG), ""


def _set(file: Path, data: bytes | None) -> None:
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
