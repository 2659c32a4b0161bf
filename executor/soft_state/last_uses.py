"""When rows were used last, at the cost of one entry for a bundle.

A cache keeps its rows in order of their last use. So it is enough to know when the first row of each bundle was used:
those behind it were used then, up to the first row of the next bundle.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class LastUses:
    """The times at which runs of rows were used last, on two clocks.

    Example:
        >>> uses = LastUses()
        >>> uses.note("a", (10, 0))
        >>> uses.note("c", (30, 1))
        >>> uses.ages(["a", "b", "c"], (50, 1)).tolist()
        [40.0, 40.0, 20.0]
    """

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, int]] = {}

    def note(self, first: str, clocks: tuple[int, int]) -> None:
        """Note a bundle by the first of its rows, which are now the last ones of the cache.

        Args:
            first: its key.
            clocks: low watermark and wall time.
        """
        self._at[first] = clocks

    def ages(self, keys: Iterable[str], clocks: tuple[int, int]) -> npt.NDArray[np.float64]:
        """How long ago each row was used, in microseconds of the clock on which that is longer.

        A bundle whose first row has been used again counts to the one before.

        Args:
            keys: all rows in order of their last use.
            clocks: low watermark and wall time.
        """
        now_event, now_wall = clocks
        age = float("inf")
        ages: list[float] = []
        for key in keys:
            at = self._at.get(key)
            if at is not None:
                # Of a row that was put back, an older bundle's entry is left.
                age = min(age, float(max(now_event - at[0], now_wall - at[1])))
            ages.append(age)
        return np.array(ages, np.float64)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget the bundles that begin with any other row."""
        self._at = {key: self._at[key] for key in self._at.keys() & set(keys)}
