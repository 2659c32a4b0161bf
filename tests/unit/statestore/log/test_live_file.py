"""Live files travel in the plan of each superstep."""

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


def test_a_file_survives_pickling() -> None:
    """Whether it was pickled before or not."""
    first, again = pickle.dumps(FILE), pickle.dumps(FILE)
    assert first == again
    assert pickle.loads(first) == FILE


def test_a_file_that_comes_again_is_the_same_object() -> None:
    """A process that gets it with each plan makes it once."""
    assert pickle.loads(pickle.dumps(FILE)) is pickle.loads(pickle.dumps(replace(FILE)))


def test_a_changed_file_is_pickled_as_it_is() -> None:
    """What was made of the file that it was changed from is not taken for it."""
    pickle.dumps(FILE)
    changed = replace(FILE, tags={"interval": "c/b"})
    assert pickle.loads(pickle.dumps(changed)).tags == {"interval": "c/b"}
