"""Which files may have a key."""

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


def test_a_file_that_has_none_of_the_keys_is_left_out() -> None:
    """A file whose keys are not known may have any in its range."""
    known = KeysOfFiles(lambda: 1_000)
    assert paths(known, "k1", "k5") == ["a", "b", "c"]
    known.add("a", pa.array(["k7", "k1"]))
    known.add("d", pa.array(["n"]))

    assert paths(known, "k1", "k5") == ["a", "b", "c"]
    assert paths(known, "k2", "k5") == ["b", "c"]
    assert paths(known, "k2", "n") == ["b", "c", "d"]
    assert paths(known, "o") == ["c"]


def test_a_file_that_is_dropped_may_have_any_key() -> None:
    """So may one that was noted too long ago for the memory that there is."""
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


def test_a_file_without_a_key_of_the_interval_is_left_out() -> None:
    """After a split a file may have rows of the other part only."""
    known = KeysOfFiles(lambda: 1_000)
    known.add("a", pa.array([], pa.string()))

    assert paths(known, "k1") == ["b", "c"]
