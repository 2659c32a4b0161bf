"""File names that an owner draws."""

from __future__ import annotations

from millpond.executor.ownership.ownership import OwnedNames
from millpond.statestore.types import Sequencer
from millpond.testing.fixtures.determinism import SeededRng


def names(seed: int = 1, pipeline: str = "p", sequencer: int = 1) -> list[str]:
    drawn = OwnedNames(SeededRng(seed), pipeline, lambda: Sequencer(sequencer))
    return [drawn.token() for _ in range(5)]


def test_two_owners_never_draw_the_same_name():
    """The same seed gives other names under another lease, and to another pipeline."""
    drawn = [*names(), *names(sequencer=2), *names(pipeline="q"), *names(pipeline="p\n1", sequencer=1)]
    assert len(set(drawn)) == len(drawn)
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in drawn)


def test_the_same_run_draws_the_same_names():
    """Replay of a seed: names are a function of randomness, pipeline and lease."""
    assert names() == names()
    assert OwnedNames(SeededRng(3), "p", lambda: Sequencer(1)).random() == SeededRng(3).random()
