"""Names of an owner's files."""

from __future__ import annotations

from millpond.executor.ownership.ownership import OwnedNames
from millpond.statestore.types import Sequencer
from millpond.testing.fixtures.determinism import SeededRng


def names(seed: int = 1, pipeline: str = "p", sequencer: int = 1) -> list[str]:
    drawn = OwnedNames(SeededRng(seed), pipeline, lambda: Sequencer(sequencer))
    return [drawn.token() for _ in range(5)]


def test_owners_with_equal_seeds_choose_different_names():
    """The lease and the pipeline are part of the name."""
    drawn = [*names(), *names(sequencer=2), *names(pipeline="q"), *names(pipeline="p\n1", sequencer=1)]
    assert len(set(drawn)) == len(drawn)
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in drawn)


def test_equal_seed_pipeline_and_lease_give_equal_names():
    """The simulator replays a run from its seed."""
    assert names() == names()
    assert OwnedNames(SeededRng(3), "p", lambda: Sequencer(1)).random() == SeededRng(3).random()
