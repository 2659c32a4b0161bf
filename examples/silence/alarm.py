"""The pipeline: a timer that each mention moves on, and an alarm where it fires."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import millpond as mp
from examples.silence.mentions import HOUR

_MICROSECOND: Final = timedelta(microseconds=1)


class Silence(mp.Computation):
    """Alarms where nothing comes for an hour, with the time of the last mention."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Wait an hour from here."""
        context.state.set({"last": record.at})
        context.set_timer(record.at + HOUR // _MICROSECOND, tag="silent")

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """Nothing has come: tell, and keep when."""
        state = context.state.get()
        context.produce("alarms", {"company": context.key, "last": state["last"]})


def silence_pipeline(sink: mp.Sink, *, time_sorted: bool = True, disorder: mp.Duration = 0) -> mp.Pipeline:
    """The alarms of all companies, into a sink.

    Args:
        sink: where they go.
        time_sorted: whether mentions and timers come in the order of time.
        disorder: how far a mention may come behind a later one.
    """
    pipeline = mp.Pipeline("silence")
    mentions = pipeline.inject("mentions", key="company", at="at", watermark=mp.BoundedDisorder(disorder))
    alarms = mentions.apply(Silence(), name="silences", produces="alarms", time_sorted=time_sorted)
    alarms.sink("out", sink)
    return pipeline
