"""Computations: the user's code, run in the context of one key (MillWheel §5.1).

The state of a computation that declares a ``state_version``: what earlier code wrote is upgraded when code asks for it.

A row keeps the state that it has until it is written, so a change of code rewrites nothing at once. A turn that only
reads sees the upgraded state and writes no row for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millpond.executor.computation.state import (
    FormerState,
    Holds,
    KeyState,
    OpenStateT,
    StoredState,
    checked_encoding,
)
from millpond.executor.time.clocks import LateDataHorizon
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec, JsonCodec

if TYPE_CHECKING:
    from millpond.executor.computation.context import Context
    from millpond.executor.computation.records import Record, Records
    from millpond.executor.computation.timers import Timer
    from millpond.statestore.view_columns import StateColumn


class Computation:
    """Base class of user code: override the hooks that the computation needs (MillWheel §4.1, §5.1).

    An instance is pickled and one copy serves many keys on many machines, so state belongs in
    ``context.state``, not in ``self``. After a failure of the machine or the code, a hook may run
    again for the same record; its effects on state, timers, productions and counters happen once.

    Attributes:
        codec: encodes the state for the row's ``state`` column; JSON by default.
        state_version: the version of what the code keeps as state. Raise it when states of earlier code have to
            be changed; `upgrade_state` does that, key by key, when the code first asks for a key's state.
        codecs: the codecs of earlier versions, where they were other than ``codec``.
        percentiles: the percentile watermarks that the code uses in addition to 100, each above 0
            and below 100.
        late_data_horizon: how far before a record's event time the code may produce, as a duration.
            The output watermark always lags by this much. ``"unbounded"`` does not hold it back, so a
            production before the record's time may be late.
        counters: the names of the counters that the code uses with ``context.count``, over all keys.
        holds_watermark: whether the code always owes productions at earlier times than those it waits for, as
            windows do. In a cycle it would wait for itself, so that is refused unless an edge is a ``feedback``.
        in_order_of_arrival: whether a bundle's records are given in the order in which they arrived,
            instead of that of their event times.
        time_sorted: whether a key's records wait in its row until the low watermark has passed them, and are
            given in the order of their event times with the key's event timers between them (docs/how-to/order.md).
        in_micro_batches: whether a key's records of a bundle are one call of ``process_records``, also when the
            code fails, and its due timers come after it, as with Spark's stateful operators. A timer that is set
            by a timer waits for the next bundle even if it is due, and one is pending until its hook has returned.
        state_columns: the parts of its states that views show as typed columns; adapters of code that declares its
            state fill it. The states are JSON objects with a member for each part.
        waiting_max: how many records of a key may wait; one more ends the run.

    Example::

        class Counter(mp.Computation):
            def process_record(self, context, record):
                count = context.state.get(0) + 1
                context.state.set(count)
                context.produce("counts", count)
    """

    codec: Codec = JsonCodec()
    state_version: int = 0
    codecs: Mapping[int, Codec] = {}
    state_columns: tuple[StateColumn, ...] = ()
    percentiles: Collection[float] = ()
    late_data_horizon: LateDataHorizon = 0
    counters: Collection[str] = ()
    in_order_of_arrival: bool = False
    in_micro_batches: bool = False
    time_sorted: bool = False
    waiting_max: int = 100_000
    holds_watermark: bool = False

    def begin_bundle(self) -> None:
        """Begin a bundle of one interval: called before its first hook, without a key."""

    def end_bundle(self) -> None:
        """End the bundle that `begin_bundle` began, whether its hooks succeeded or not."""

    def process_record(self, context: Context, record: Record) -> None:  # noqa: ARG002 - a hook
        """Process one record. Required of a computation that does not override `process_records`.

        Args:
            context: state, timers and productions of the record's key; valid until the hook returns.
            record: the record.

        Raises:
            InvalidError: the class does not override this hook. Any exception that an override raises
                is handled as ``on_error`` and ``retries`` of `ComputationOptions` say.
        """
        raise InvalidError(
            "the computation got a record but has no process_record", computation=type(self).__name__
        )

    def process_records(self, context: Context, records: Records) -> None:
        """Process all records of one key in a bundle; by default calls `process_record` for each.

        An override saves a call per record and reads and sets the state once per bundle. It cannot
        rely on which records arrive together: bundles are not repeatable, after an exception each
        record is retried in its own call, and with ``time_sorted`` each record has a call of its own.

        Args:
            context: state, timers and productions of the key; valid until the hook returns.
            records: the records in order of event time, then arrival (see ``in_order_of_arrival``); valid
                until the hook returns.
        """
        process_record = self.process_record
        for record in records.one_by_one():
            process_record(context, record)

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """Process a timer that has fired and is no longer pending. Required of a computation that sets timers.

        Args:
            context: state, timers and productions of the timer's key; valid until the hook returns.
            timer: the timer, as it was set.

        Raises:
            InvalidError: the class does not override this hook.
        """
        raise InvalidError(
            "the computation set a timer but has no process_timer: write one", computation=type(self).__name__
        )

    def upgrade_state(self, state: Any, version: int) -> Any:  # noqa: ARG002 - a hook
        """The state of a key as today's code keeps it, from one that code of an earlier ``state_version`` wrote.

        It is called when a hook first asks for such a state, before the hook gets it, and by ``millpond upgrade`` for
        those that are left. The row keeps the old state until it is written, so it may be called again for the
        same state: what it returns follows from its arguments alone. A key without state is not upgraded.

        Args:
            state: the state as the codec of that version decodes it; it may be changed in place.
            version: the version that it was written with, less than ``state_version``; it need not be the one before.

        Returns:
            The new state.

        Raises:
            InvalidError: the class does not override this hook. Any exception that an override raises is handled
                as one of the record or timer whose hook asked for the state.

        Example::

            class Visits(mp.Computation):
                state_version = 1

                def upgrade_state(self, state, version):
                    return {"count": state}  # was a bare number
        """
        raise InvalidError(
            "the computation has a state_version but no upgrade_state", computation=type(self).__name__
        )


def codec_of(computation: Computation, version: int) -> Codec:
    """The codec that a computation's states of a version are encoded with."""
    if version == computation.state_version:
        return computation.codec
    return computation.codecs.get(version, computation.codec)


def upgrade(computation: Computation, name: str, key: str, former: FormerState) -> FormerState:
    """A former state together with what the computation's code makes of it.

    Args:
        computation: today's code.
        name: the computation's name, for errors.
        key: the state's key, for errors.
        former: the state as it is stored.

    Raises:
        InvalidError: the state cannot be decoded, the code fails or returns nothing, or the codec refuses the result;
            the error names computation, key and version.
    """
    try:
        state = codec_of(computation, former.version).decode(former.encoded)
        was_none = state is None
        upgraded = computation.upgrade_state(state, former.version)
        if upgraded is None and not was_none:
            raise InvalidError("it returned None: return the new state, also where it was changed in place")  # noqa: TRY301
        encoded = checked_encoding(computation.codec, computation.codec.encode(upgraded))
    except Exception as error:
        raise InvalidError(
            "the state of an earlier version cannot be upgraded",
            computation=name,
            key=key,
            version=former.version,
            state_version=computation.state_version,
            reason=f"{type(error).__name__}: {error}",
        ) from error
    return replace(former, upgraded=encoded)


class UpgradingState(KeyState):
    """`KeyState` of a computation whose rows may have states of earlier versions.

    Args:
        computation: the user's code.
        holds: the key's holds.
        upgrade: returns a former state of the current key together with its upgraded form.
    """

    __slots__ = ("_former", "_upgrade")

    def __init__(self, codec: Codec, holds: Holds, upgrade: Callable[[FormerState], FormerState]) -> None:
        super().__init__(codec, holds)
        self._upgrade = upgrade
        self._former: FormerState | None = None

    def bind(self, stored: StoredState | None) -> None:
        """Switch to the state of another key, or back to an earlier state of the same key."""
        if isinstance(stored, FormerState):
            self._former = stored
            super().bind(stored.upgraded)
        else:
            self._former = None
            super().bind(stored)

    def get(self, default: Any = None) -> Any:
        """The state, upgraded if earlier code wrote it, or ``default`` if the key has none."""
        former = self._former
        if former is not None and former.upgraded is None:
            self._former = former = self._upgrade(former)
            self._encoded = former.upgraded
        return super().get(default)

    def set(self, value: Any) -> None:
        """Replace the state; a former one need not be upgraded for that."""
        super().set(value)
        self._former = None

    def delete(self) -> None:
        """Delete the state and all its holds."""
        super().delete()
        self._former = None

    def open(self, make: Callable[[Any], OpenStateT]) -> OpenStateT:
        """The upgraded state as an object that is changed in place."""
        opened = super().open(make)
        self._former = None
        return opened

    def settle(self) -> StoredState | None:
        """The current value, encoded; a former state that code has at most read stays one."""
        return super().settle() if self._former is None else self._former
