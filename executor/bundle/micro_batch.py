"""Turns as Spark's stateful operators have them: all records of the key, then the timers that are due."""

from __future__ import annotations

from functools import partial
from typing import Any

from millpond.executor.bundle.key_executor import KeyExecutor
from millpond.executor.computation.stored_state import StoredState


class MicroBatchExecutor(KeyExecutor):
    """Runs a key's records as one call, and after it the timers that are due then; what these set waits for the next turn.

    As in Spark the timers that are due are looked up first: one that another deletes fires anyway. Each is
    pending until its hook has returned, so one that is set again as it was is gone afterwards.
    """

    def _run_at_once(self, key: str, start: int, stop: int) -> StoredState | None:
        if stop > start:
            self._bind_records(key, start, stop)
            self._node.computation.process_records(self._context, self._records)
        for timer in self.timers.take_due():
            self._count_firing()
            self._process_timer(timer)
            self.timers.take(timer)
        return self.state.settle()

    def _run_carefully(self, key: str, start: int, stop: int) -> StoredState | None:
        if stop > start:
            self._bind_records(key, start, stop)
            process_records = self._node.computation.process_records
            failure = self._attempt(
                lambda: process_records(self._context, self._records), partial(self._values, start, stop)
            )
            if failure is not None:
                # Which of the records it was, only the code could tell: none of them has had an effect.
                for index in range(start, stop):
                    self._fail_record(self._columns, index, failure)
        for timer in self.timers.take_due():
            self._count_firing()
            self._try_timer(timer)
            self.timers.take(timer)
        return self.state.settle()

    def _bind_records(self, key: str, start: int, stop: int) -> None:
        self._input.slack_us = self._records_slack_us
        self._records.bind(key, start, stop)

    def _values(self, start: int, stop: int) -> list[Any]:
        return [self._columns.value(index) for index in range(start, stop)]
