"""
A join without windows: facts wait for the one row that they are joined to, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import millpond as mp
from examples.nexmark.query import Row

__all__ = ["Join"]


class Join(mp.Computation):
    """
    Joins every fact to the row of its key. The row stays, as any fact may be about it; facts stay only until it is there.

    Args:
        row_stream: the stream on which each key's one row comes; whatever else comes is a fact.
        output: where joined rows go.
        row: what is kept of the row.
        fact: what is kept of a fact.
        joined: given a fact and the row, gives rows of the answer.
    """

    def __init__(
        self,
        row_stream: str,
        output: str,
        *,
        row: Callable[[Row], Any],
        fact: Callable[[Row], Any],
        joined: Callable[[Any, Any], Iterable[Row]],
    ) -> None:
        self.row_stream = row_stream
        self.output = output
        self.row = row
        self.fact = fact
        self.joined = joined

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """
        One look at the state for all records of the key.
        """
        state: Row = context.state.get({})
        row, waiting = state.get("row"), state.get("waiting", [])
        for record in records:
            if record.stream == self.row_stream:
                row, facts, waiting = self.row(record.value), waiting, []
            else:
                facts = [self.fact(record.value)]
            if row is None:
                waiting += facts
                continue
            for fact in facts:
                for answer in self.joined(fact, row):
                    context.produce(self.output, answer)
        context.state.set({"waiting": waiting} if row is None else {"row": row})
