"""Which interval owns a key, in Spark SQL: found by the intervals' low bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millpond.executor.spark.key_sql import literal

_CUTS_IN_TREE_MAX: Final = 128


def position_sql(key: str, lows: Sequence[str], positions: Sequence[int]) -> str:
    """An expression for the position in the plan of the interval that owns a key.

    Args:
        key: the key, as SQL.
        lows: low bounds of the consumer's intervals in key order; the first is ``""``.
        positions: their positions.
    """
    passed = _passed(key, lows[1:])
    if list(positions) == list(range(positions[0], positions[0] + len(positions))):
        return f"{positions[0]} + {passed}"
    return f"{_integers(positions)}[{passed}]"


def _passed(key: str, cuts: Sequence[str]) -> str:
    """How many of the rising cuts a key has reached: found by halves, since a record may meet thousands of them."""
    if len(cuts) <= _CUTS_IN_TREE_MAX:
        return _tree(key, cuts, 0)
    steps = [1 << bit for bit in reversed(range(len(cuts).bit_length()))]
    reached = f"passed + step <= {len(cuts)} AND {_texts(cuts)}[passed + step - 1] <= {key}"
    return f"aggregate({_integers(steps)}, 0, (passed, step) -> if({reached}, passed + step, passed))"


def _tree(key: str, cuts: Sequence[str], passed: int) -> str:
    if not cuts:
        return str(passed)
    half = len(cuts) // 2
    above = _tree(key, cuts[half + 1 :], passed + half + 1)
    return f"if({key} >= {literal(cuts[half])}, {above}, {_tree(key, cuts[:half], passed)})"


def _texts(texts: Sequence[str]) -> str:
    """An array of texts, from one literal where a character is in none of them: thousands of literals take long to plan."""
    used = set().union(*texts)
    free = next((character for character in map(chr, range(1, 32)) if character not in used), None)
    if free is None:
        return f"array({', '.join(map(literal, texts))})"
    return f"split({literal(free.join(texts))}, {literal(free)}, -1)"


def _integers(numbers: Sequence[int]) -> str:
    return f"CAST(split('{','.join(map(str, numbers))}', ',') AS ARRAY<INT>)"
