"""Names that the engine keeps for itself, and the interval that a pipeline's driver owns."""

from __future__ import annotations

from millpond.statestore.interval import Interval

DEAD_LETTERS = "dead_letters"
"""Reserved name of the computation, and of the stream, that hold dead letters."""


SIGNALS = "window_signals"
"""Reserved name of the injected stream on which signals from outside reach the windowed steps that wait for them."""


def control_interval(pipeline: str) -> Interval:
    """The interval that the driver of a pipeline itself owns.

    Every superstep's commit touches it, so a commit without any other row is fenced too.
    """
    return Interval(DEAD_LETTERS, f"{pipeline}/", f"{pipeline}0")
