"""Ripples: a workload whose windows stand in a cycle, with a feedback that holds nothing back.

A stone makes a wave where it falls. Waves are gathered in windows of two seconds; each wave that a window shows makes
the next one in the next window, twice. So the watermark must advance around the cycle, though each window
holds it for its followers: every stone's first wave is shown, once, and no later one without the one before it. A wave
that returns after the end of the input may be too late for its window; a feedback gives that up.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.executor.windows.combiners import ToList
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.workload import End, RowVersion, Workload

_PLACES: Final = ("inlet", "middle", "outlet")
_SIZE_US: Final = 2_000_000
_WAVES_MAX: Final = 3


class _Fall(Computation):
    """Makes the first wave of a stone."""

    def process_record(self, context: Context, record: Record) -> None:
        context.produce("waves", [record.value["number"], 0])


class _Spread(Computation):
    """Keeps the waves that a window shows, and makes the next ones."""

    def process_record(self, context: Context, record: Record) -> None:
        waves = record.value["value"]
        context.state.set([*context.state.get([]), *waves])
        for number, count in waves:
            if count + 1 < _WAVES_MAX:
                context.produce("waves", [number, count + 1], at=record.at + _SIZE_US)


class Ripples(Workload):
    """Stones that fall at three places, and their waves."""

    name = "ripples"
    records_max = 40
    takes_late_records = True

    def __init__(self) -> None:
        self._weak = False

    def begin(self, draw: Draw) -> None:
        """Draw whether the way back is weak."""
        self._weak = draw.choice((True, False))

    def pipeline(self) -> Pipeline:
        """Stones, windows of waves, and the way back into these."""
        pipeline = Pipeline("ripples")
        stones = pipeline.inject("stones", key="place", at="at", id="id", watermark=ManualWatermark())
        waves = stones.apply(_Fall(), name="fall", produces="waves")
        shown = waves.window(FixedWindows(f"{_SIZE_US}us"), allowed_lateness="3650d")
        gathered = shown.combine(ToList(), name="gathered", feedback=["waves"])
        gathered.apply(
            _Spread(), name="spread", produces="waves", productions="weak" if self._weak else "strong"
        )
        return pipeline

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        """A stone; there are no poisonous ones."""
        return "stones", {"place": draw.choice(_PLACES), "number": number}

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """What has been shown stays, and is shown once."""
        if computation != "spread":
            return
        old, new = _shown(before), _shown(after)
        must(new[: len(old)] == old, "I5", "a memory only grows", key=key, before=old, after=new)
        twice = [wave for wave, count in Counter(new).items() if count > 1]
        must(not twice, "I2", "each wave is shown once", key=key, twice=twice)

    def check_end(self, end: End) -> None:
        """The first wave of every stone was shown, and each later one after the one before it."""
        shown = Counter(tuple(wave) for state in end.states.get("spread", {}).values() for wave in state)
        missing = [sent.number for sent in end.sent if not shown[(sent.number, 0)]]
        must(not missing, "I12", "the first wave of every stone is shown", missing=missing[:5])
        twice = [wave for wave, count in shown.items() if count > 1]
        must(not twice, "I2", "each wave is shown once", twice=twice[:5])
        known = {sent.number for sent in end.sent}
        strange = [w for w in shown if w[0] not in known or (w[1] and not shown[(w[0], w[1] - 1)])]
        must(not strange, "I2", "a wave comes of the one before it", strange=strange[:5])
        must(not end.letters, "I1", "no wave is a dead letter", letters=end.letters[:5])


def _shown(row: RowVersion | None) -> list[tuple[int, int]]:
    return [] if row is None or row.state is None else [(number, count) for number, count in row.state]
