"""Computations: user code, run in the context of one key (MillWheel §5.1), and upgrades of its states.

A row keeps the state of earlier code until the row is written next, so a change of code rewrites nothing at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from millpond.executor.computation.context import Context
from millpond.executor.computation.key_groups import KeyGroups, TableContext
from millpond.executor.computation.records import InputTime, Record, Records
from millpond.executor.computation.state import (
    FormerState,
    KeyState,
    OpenStateT,
    StoredState,
    checked_encoding,
)
from millpond.executor.computation.timers import KeyTimers, Timer
from millpond.executor.time.clocks import LateDataHorizon
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec, JsonCodec
from millpond.statestore.rows.state_schema import SchemaCodec
from millpond.statestore.view_columns import StateColumn

Drain: TypeAlias = Literal["last_event", "all"]
"""The timers that still fire when all input has ended: those set up to the last event, or also those that these set."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a step runs, and why no faster.

    On columns of all keys, by code that gets a bundle as a table, by a short turn for each key, or by its hooks. A step
    ``makes`` panes of its input's values, or ``keeps`` those that it gets.
    """

    name: Literal["columns", "table", "short turns", "hooks"]
    because: str = ""
    panes: Literal["makes", "keeps"] | None = None


class Computation:
    """The base class of user code: subclass it and override the hooks you need (MillWheel §4.1, §5.1).

    An instance is pickled, and one copy serves many keys on many machines, so keep state in
    ``context.state``, not in ``self``. After a failure of the machine or the code, a hook may run again for
    the same record; its effects on state, timers, productions and counters happen exactly once.

    Attributes:
        codec: encodes the state for the row's ``state`` column; JSON by default.
        state_version: the version of the stored state's form. Raise it when states of earlier code must be
            changed; `upgrade_state` then changes each key's state when a hook first reads it.
        codecs: the codecs of earlier versions, where they differ from ``codec``.
        state_columns: the parts of the state that views show as typed columns. Adapters of code with a
            declared state fill it; states are then JSON objects with a member for each part.
        fingerprint: the declarations on which the states of a library step depend, by part; windowed steps fill it.
            Rows with a state refuse another one, except that parts with a dot may come and go while others are there.
        percentiles: the percentile watermarks that the code uses besides 100, each above 0 and below 100.
        late_data_horizon: how far before a record's event time the code may produce, as a duration. The
            output watermark always lags by this much. ``"unbounded"`` does not hold it back, so a production
            before the record's time may be late.
        counters: the names of the counters that the code uses with ``context.count``.
        in_order_of_arrival: pass a bundle's records in order of arrival instead of event time.
        in_micro_batches: pass a key's records of a bundle in one call of ``process_records``, even after a
            failure, and fire its due timers afterwards, as Spark's stateful operators do. A timer set by a
            timer waits for the next bundle even if it is due; a timer is pending until its hook has returned.
        time_sorted: keep a key's records in its row until the low watermark has passed them, then pass them
            in order of event time with the key's event timers between them (docs/how-to/order.md).
        drain: what timers do when all input has ended; see ``drain`` of `ComputationOptions`.
        waiting_max: the greatest number of records of one key that may wait; one more ends the run.
        holds_watermark: the code always owes productions at earlier times than those it waits for, as windows
            do. The pipeline refuses a cycle of such computations without a ``feedback``.

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
    fingerprint: Mapping[str, str] = {}
    percentiles: Collection[float] = ()
    late_data_horizon: LateDataHorizon = 0
    counters: Collection[str] = ()
    in_order_of_arrival: bool = False
    in_micro_batches: bool = False
    time_sorted: bool = False
    drain: Drain = "last_event"
    waiting_max: int = 100_000
    holds_watermark: bool = False

    def begin_bundle(self) -> None:
        """Begin a bundle of one interval: called before its first hook, without a key."""

    def end_bundle(self) -> None:
        """End the bundle that `begin_bundle` began, whether its hooks succeeded or not."""

    def process_record(self, context: Context, record: Record) -> None:  # noqa: ARG002 - a hook
        """Process one record; required unless the class overrides `process_records` or `process_table`.

        The context is valid until the hook returns. An exception is handled according to ``on_error`` and ``retries``
        of `ComputationOptions`.
        """
        raise InvalidError(
            "the computation got a record but has no process_record", computation=type(self).__name__
        )

    def process_records(self, context: Context, records: Records) -> None:
        """Process all records of one key in a bundle; by default calls `process_record` for each.

        An override saves a call per record, and reads and sets the state once per bundle. It cannot rely on
        which records arrive together: bundles are not repeatable, after an exception each record is retried
        in its own call, and with ``time_sorted`` each record has its own call. Records are in order of event time, then
        arrival (see ``in_order_of_arrival``), and valid until the hook returns.
        """
        process_record = self.process_record
        for record in records.one_by_one():
            process_record(context, record)

    def process_table(self, context: TableContext, table: pa.Table, groups: KeyGroups) -> None:  # noqa: ARG002 - a hook
        """Process all records of a bundle at once, in place of `process_record` and `process_records`.

        States are read and set, and values produced, as columns of all keys in ``groups``; the states need a ``state=``
        schema, and the streams a schema in ``produces``. The result for a key must depend on its state and its own records
        alone, because it cannot be known which keys and records come together. If it raises, nothing that it gave is
        kept, and it is called with fewer keys, and at last with single records: those that fail alone become dead letters.
        A limit of ``user_code_timeout`` is one for each call.

        Args:
            context: the times and counters of the computation.
            table: the records in the order of ``groups``, with a column for each field of the values. Values that are not
                all dicts are the one column ``value``.
            groups: the keys, their rows in the table, and their states.
        """
        raise InvalidError(
            "the computation got a table but has no process_table", computation=type(self).__name__
        )

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """Process a timer that has fired and is no longer pending; required if the class sets timers."""
        raise InvalidError(
            "the computation set a timer but has no process_timer: write one", computation=type(self).__name__
        )

    def way(self) -> Way:
        """Return how the step runs, apart from its options; the engine's."""
        if type(self).process_table is not Computation.process_table:
            return Way("table", "code of your own, once a bundle")
        by_key = type(self).process_records is not Computation.process_records
        return Way("hooks", "code of your own, once a key" if by_key else "code of your own, once a record")

    def upgrade_state(self, state: Any, version: int) -> Any:  # noqa: ARG002 - a hook
        """Return a key's state in today's form, from the state that an earlier ``state_version`` wrote.

        It is called before a hook gets such a state, and by ``millpond upgrade`` for the remaining keys. A
        key without state is not upgraded. The row keeps the old state until it is written, so the method may
        run again for the same state: the result must depend on the arguments alone. An exception is handled as
        one of the record or timer whose hook asked for the state.

        Args:
            state: the state, decoded with the codec of that version; it may be changed in place.
            version: the version that wrote it: any number below ``state_version``, not only the previous one.

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
    codec = computation.codec
    if version == computation.state_version:
        return codec
    # The former states of a schema have fields that this one may lack.
    return computation.codecs.get(version, JsonCodec() if isinstance(codec, SchemaCodec) else codec)


def upgrade(computation: Computation, name: str, key: str, former: FormerState) -> FormerState:
    try:
        # The old bytes need the old codec, the result today's; cells are of today's schema.
        is_cells = isinstance(former.encoded, tuple)
        codec = computation.codec if is_cells else codec_of(computation, former.version)
        state = codec.decode(former.encoded)  # type: ignore[arg-type]  # only a `SchemaCodec` is given cells
        was_none = state is None
        upgraded = computation.upgrade_state(state, former.version)
        if upgraded is None and not was_none:
            raise InvalidError("it returned None: return the new state, even if it was changed in place")  # noqa: TRY301
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
    """`KeyState` of a computation whose rows may have states of earlier versions."""

    __slots__ = ("_former", "_upgrade")

    def __init__(
        self,
        codec: Codec,
        timers: KeyTimers,
        input_time: InputTime,
        upgrade: Callable[[FormerState], FormerState],
    ) -> None:
        super().__init__(codec, timers, input_time)
        self._upgrade = upgrade
        self._former: FormerState | None = None

    def bind(self, stored: StoredState | None) -> None:
        if isinstance(stored, FormerState):
            self._former = stored
            super().bind(stored.upgraded)
        else:
            self._former = None
            super().bind(stored)

    def get(self, default: Any = None) -> Any:
        former = self._former
        if former is not None and former.upgraded is None:
            self._former = former = self._upgrade(former)
            self._encoded = former.upgraded
        return super().get(default)

    def set(self, value: Any) -> None:
        super().set(value)
        # The former state is replaced as a whole, so it needs no upgrade.
        self._former = None

    def delete(self) -> None:
        super().delete()
        self._former = None

    def open(self, make: Callable[[Any], OpenStateT]) -> OpenStateT:
        opened = super().open(make)
        self._former = None
        return opened

    def settle(self) -> StoredState | None:
        # A former state that code has only read stays in the row, because reading writes no row.
        return super().settle() if self._former is None else self._former
