"""Files that may contain a key."""

from __future__ import annotations

import pyarrow as pa

from millpond.executor.interval.known_files import KeysOfFiles
from millpond.executor.interval.row_reader import FileKeys

FILES = [
    FileKeys("a", "k0", "k9"),
    FileKeys("b", "k0", "k9"),
    FileKeys("c", None, None),
    FileKeys("d", "m", "p"),
]


def paths(known: KeysOfFiles, *keys: str) -> list[str]:
    return [file.path for file in known.files_with(FILES, keys)]


def test_file_without_any_of_the_keys_is_skipped() -> None:
    """A file with unknown keys may contain any key in its range."""
    known = KeysOfFiles(lambda: 1_000)
    assert paths(known, "k1", "k5") == ["a", "b", "c"]
    known.add("a", pa.array(["k7", "k1"]))
    known.add("d", pa.array(["n"]))

    assert paths(known, "k1", "k5") == ["a", "b", "c"]
    assert paths(known, "k2", "k5") == ["b", "c"]
    assert paths(known, "k2", "n") == ["b", "c", "d"]
    assert paths(known, "o") == ["c"]


def test_dropped_or_forgotten_file_may_contain_any_key() -> None:
    """The oldest entries are forgotten when memory runs out."""
    known = KeysOfFiles(lambda: 24)
    known.add("a", pa.array(["k1"]))
    known.add("b", pa.chunked_array([["k1"], ["k2"]]))
    assert (paths(known, "k5"), known.size_bytes) == (["c"], 24)

    known.add("d", pa.array(["n"]))
    assert (paths(known, "k5"), known.size_bytes) == (["a", "c"], 24)
    known.add("d", pa.array(["n", "o"]))
    assert known.size_bytes == 16

    known.keep_only({"a", "b"})
    known.drop("b")
    assert (paths(known, "k5", "o"), known.size_bytes) == (["a", "b", "c", "d"], 0)


def test_file_without_keys_of_the_interval_is_skipped() -> None:
    """After a split a file may contain rows of the other part only."""
    known = KeysOfFiles(lambda: 1_000)
    known.add("a", pa.array([], pa.string()))

    assert paths(known, "k1") == ["b", "c"]
