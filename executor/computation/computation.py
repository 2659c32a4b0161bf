"""
Computations: the user's code, run in the context of one key (MillWheel §5.1).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from millpond.executor.event_time.late_data_horizon import LateDataHorizon
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec, JsonCodec

if TYPE_CHECKING:
    from millpond.executor.computation.context import Context
    from millpond.executor.computation.record import Record, Records
    from millpond.executor.computation.timer import Timer

__all__ = ["Computation"]


class Computation:
    """
    Base class of user code: override the hooks that the computation needs.

    An instance is pickled, and one copy serves many keys on many machines, so what must
    be remembered belongs in ``context.state``, not in ``self``. A hook may run again for
    the same record (after a failure of machine or code); only its effects on state,
    timers and productions happen once.

    Attributes:
        codec: how the state becomes the row's ``state`` column; JSON unless overridden.
        percentiles: the percentile watermarks that the code asks for, besides 100.
        late_data_horizon: how far below a record's time the code may produce; the output
            watermark is held back by as much, always. ``"unbounded"`` holds nothing back, so
            what is produced below the record's time may be late.
        counters: names of what the code counts with ``context.count``, over all keys.
    """

    codec: Codec = JsonCodec()
    percentiles: Collection[float] = ()
    late_data_horizon: LateDataHorizon = 0
    counters: Collection[str] = ()

    def process_record(self, context: Context, record: Record) -> None:  # noqa: ARG002 - a hook
        """
        Handle one record.
        """
        raise InvalidError(
            "the computation got a record but has no process_record", computation=type(self).__name__
        )

    def process_records(self, context: Context, records: Records) -> None:
        """
        Handle all of one key's records of a bundle, by (time, arrival); by default one by one.

        Overriding it saves a call per record, and reading and setting the state more than
        once. It gives up control over how many records come together: how records fall into
        bundles is not repeatable, and after an exception each comes in a call of its own.
        """
        process_record = self.process_record
        for record in records.one_by_one():
            process_record(context, record)

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """
        Handle a timer that has fired; it is no longer pending.
        """
        raise InvalidError(
            "the computation set a timer but has no process_timer", computation=type(self).__name__
        )
