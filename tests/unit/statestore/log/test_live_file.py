"""Live files, pickled with the plan of each superstep."""

from __future__ import annotations

import pickle
from dataclasses import replace

from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import TableVersion

FILE = LiveFile(
    path="computation=c/0000000007-" + "ab" * 16 + ".parquet",
    size_bytes=700,
    computation="c",
    partition_values={"computation": "c"},
    min_key="a",
    max_key=None,
    min_superstep=7,
    max_superstep=7,
    num_records=3,
    tags={"interval": "c/a"},
    added_version=TableVersion(9),
)


def test_live_file_survives_pickling() -> None:
    first, again = pickle.dumps(FILE), pickle.dumps(FILE)
    assert first == again
    assert pickle.loads(first) == FILE


def test_repeated_file_is_same_object() -> None:
    """A process builds it once, although each plan contains it."""
    assert pickle.loads(pickle.dumps(FILE)) is pickle.loads(pickle.dumps(replace(FILE)))


def test_changed_file_pickles_its_changes() -> None:
    """The pickled form of the original is not reused."""
    pickle.dumps(FILE)
    changed = replace(FILE, tags={"interval": "c/b"})
    assert pickle.loads(pickle.dumps(changed)).tags == {"interval": "c/b"}
