"""Boundaries: the keys at which a computation's keys are cut into intervals.

They come from a sample of the keys, so each part gets about the same share of the work (MillWheel §7.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.interval import CUT_CHARACTERS_MAX, Interval


def boundaries_of(sample: pa.Array, count: int) -> tuple[str, ...]:
    """Cuts that give each of ``count`` intervals about the same share of the sampled keys.

    A sample with fewer distinct keys gives fewer cuts. A long key is cut at its prefix, which
    divides the keys nearly as well.

    Example:
        >>> boundaries_of(pa.array(["a", "b", "c", "d"]), 2)
        ('c',)
    """
    if count < 2 or not len(sample):
        return ()
    ordered = sample.take(pc.sort_indices(sample))
    positions = [len(ordered) * part // count for part in range(1, count)]
    lowest = ordered[0].as_py()
    cuts = {ordered[position].as_py()[:CUT_CHARACTERS_MAX] for position in positions}
    return tuple(sorted(cut for cut in cuts if cut > lowest))


def middle_of(interval: Interval, sample: Sequence[str]) -> str | None:
    """The key that divides an interval into two with about the same share of the sampled keys each.

    Args:
        interval: the interval to split.
        sample: keys, as often as they are worked on; those outside the interval do not count.

    Returns:
        ``None`` if no cut parts the sample: all of it is one key, which cannot be split.

    Example:
        >>> middle_of(Interval("c"), ["a", "b", "c", "d"])
        'c'
        >>> middle_of(Interval("c"), ["a", "a"]) is None
        True
    """
    keys = sorted(key for key in sample if interval.contains(key))
    # A cut lies in front of a key, and has some of the sample on either side of it.
    cuts = [at for at in range(1, len(keys)) if keys[at - 1] < keys[at][:CUT_CHARACTERS_MAX]]
    if not cuts:
        return None
    return keys[min(cuts, key=lambda at: abs(2 * at - len(keys)))][:CUT_CHARACTERS_MAX]
