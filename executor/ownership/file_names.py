"""File names that an owner draws: never those of an earlier owner, even from the same seed.

A process that restarts with the same seed draws the same tokens, and would overwrite files that
it left uncommitted, or fail on them. So each token is hashed with the pipeline and the sequencer
of its lease: no two owners share both, and a repeated run draws the same names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from millpond.statestore.types import Rng, Sequencer


class OwnedNames:
    """An `Rng` whose tokens belong to one owner of a pipeline.

    Args:
        rng: the source of tokens.
        pipeline: the pipeline whose files are named.
        sequencer: returns the sequencer of the owner's lease on the pipeline; called at every draw.

    Example:
        >>> from millpond.testing.fixtures.determinism import SeededRng
        >>> first, second = (OwnedNames(SeededRng(1), "p", lambda n=n: n) for n in (1, 2))
        >>> first.token() == second.token()
        False
    """

    def __init__(self, rng: Rng, pipeline: str, sequencer: Callable[[], Sequencer]) -> None:
        self._rng = rng
        self._pipeline = pipeline
        self._sequencer = sequencer

    def random(self) -> float:
        """A number in [0, 1)."""
        return self._rng.random()

    def token(self) -> str:
        """32 hexadecimal digits that no other owner draws."""
        drawn = f"{self._pipeline}\n{self._sequencer()}\n{self._rng.token()}"
        return hashlib.sha256(drawn.encode("utf-8", "surrogatepass")).hexdigest()[:32]
