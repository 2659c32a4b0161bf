"""Three questions to the store, in SQL: every row of every computation can be asked for, at every version."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

import duckdb
from rich.console import Console

import millpond as mp
from examples.zeitgeist.report import print_answer, print_question

_BLIZZARD_DAY: Final = 39
"""8 February is the 39th day of the year."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about one computation's rows."""

    text: str
    computation: str
    sql: str


_DELAYS: Final = Question(
    text="Where and when is it normal to wait? The model's rows with the longest delays:",
    computation="hour_model",
    sql="""
select key as airport_and_hour,
       (state ->> '$.days')::int as days,
       (state ->> '$.departed.mean')::double as flights,
       (state ->> '$.delay.mean')::double as delay_minutes
from hour_model
order by delay_minutes desc
limit 5
""",
)

_LATE: Final = Question(
    text="How many flights were reported too late to be counted in their hour?",
    computation="window_counter",
    sql="""
select key as airport, (state ->> '$.late')::int as late_flights
from window_counter
order by key
""",
)

_FIVE_O_CLOCK: Final = Question(
    text="What was normal at JFK at five in the afternoon, before the blizzard and at the end?",
    computation="hour_model",
    sql="""
select key,
       (state ->> '$.days')::int as days,
       (state ->> '$.cancelled.mean')::double as cancelled,
       (state ->> '$.delay.mean')::double as delay_minutes
from hour_model
where key = 'JFK 17'
""",
)


def ask_all(console: Console, store: mp.Store) -> None:
    """Ask the questions and print the answers; the last one is asked of two versions of the store."""
    newest = store.snapshot().version
    for question in (_DELAYS, _LATE, _FIVE_O_CLOCK):
        print_question(console, question.text, question.sql)
        if question is _FIVE_O_CLOCK:
            _answer(console, store, question, _last_version_before(store, newest, _BLIZZARD_DAY))
        _answer(console, store, question, newest)


def late_flights(store: mp.Store) -> int:
    """Flights that were too late, over all airports."""
    relation = _relation(store, "window_counter", "select sum((state ->> '$.late')::int) from window_counter")
    [(late,)] = relation.fetchall()
    return int(late or 0)


def _answer(console: Console, store: mp.Store, question: Question, version: int) -> None:
    answer = _relation(store, question.computation, question.sql, version)
    print_answer(console, answer.columns, answer.fetchall(), f"version {version} of the store")


def _relation(
    store: mp.Store, computation: str, sql: str, version: int | None = None
) -> duckdb.DuckDBPyRelation:
    connection = duckdb.connect()
    store.rows_view(computation, version).to_duckdb(connection, computation)
    return connection.sql(sql)


def _last_version_before(store: mp.Store, newest: int, day: int) -> int:
    """The last version at which the model had not learned from this day of the year."""
    sql = "select coalesce(max((state ->> '$.days')::int), 0) from hour_model where key = 'JFK 17'"

    def days_learned(version: int) -> int:
        [(days,)] = _relation(store, "hour_model", sql, version).fetchall()
        return int(days)

    return bisect_right(range(newest + 1), day - 1, key=days_learned) - 1
