"""Signs of life: the workload for records that wait until they can be given in the order of time.

Sensors send signs, out of order by as much as their publishers are slow, and a sensor that is silent for a while is
an alarm. Each sensor's state is a journal of its signs and alarms. In every table version each sign that a row has
consumed is either in its journal or waits in the row, once (I2, I3); a journal is in the order of time (I6), has
nothing that the watermark has not passed, and only grows. At the end it equals a sort and a scan of all signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import orjson

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.executor.windows.pipeline import Pipeline
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.workload import End, RowVersion, Sent, Workload

_SENSORS: Final = ("boiler", "lock", "pump")
_PATIENCE_US: Final = 3_000_000
_RECORD: Final = "record"

_Entry = tuple[int, int | None]
"""When, and the number of a sign; ``None`` is an alarm."""


class _Alarm(Computation):
    """Keeps signs and alarms in the order in which they come."""

    time_sorted = True

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), [record.at, record.value["number"]]])
        context.set_timer(record.at + _PATIENCE_US, tag="silent")

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), [timer.at, None]])
        context.produce("alarms", {"sensor": context.key})


class _Log(Computation):
    """Counts the alarms of a sensor."""

    def process_record(self, context: Context, record: Record) -> None:
        count, late = context.state.get([0, 0])
        context.state.set([count + 1, late + record.late])


class Silence(Workload):
    """Three sensors, their alarms, and a log of these."""

    name = "silence"
    records_max = 60

    def pipeline(self) -> Pipeline:
        """Signs, alarms, and their log."""
        pipeline = Pipeline("silence")
        signs = pipeline.inject("signs", key="sensor", at="at", id="id", watermark=ManualWatermark())
        signs.apply(_Alarm(), name="silences", produces="alarms").apply(_Log(), name="log")
        return pipeline

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        """A sign of one of the sensors; there are no poisonous signs."""
        return "signs", {"sensor": draw.choice(_SENSORS), "number": number}

    # -- at each commit --------------------------------------------------------------------

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """Signs are in the journal or wait, once; the journal grows in the order of time."""
        if computation != "silences":
            return
        old, new = _journal(before), _journal(after)
        must(new[: len(old)] == old, "I5", "a journal only grows", key=key, before=old, after=new)
        times = [at for at, _ in new]
        must(
            all(one <= other for one, other in pairwise(times)),
            "I6",
            "a journal is in order",
            key=key,
            at=times,
        )
        here, waited = (
            _signs(new) + _waiting(after),
            _signs(old) + ([] if before is None else _waiting(before)),
        )
        must(len(set(here)) == len(here), "I2", "each sign counts once", key=key, signs=here)
        come = sorted(set(here) - set(waited))
        ids = sorted(int(record_id.decode().removeprefix("#")) for record_id in after.record_ids)
        must(
            come == ids and set(waited) <= set(here), "I3", "a row has the ids of its signs", key=key, ids=ids
        )
        pending = [at for _, domain, at in after.timers if domain == "event"]
        last = new[-1] if new else (0, None)
        due = [last[0] + _PATIENCE_US] if last[1] is not None else []
        must(pending == due, "I6", "a sensor has the alarm of its last sign", key=key, timers=after.timers)

    # -- at the end ------------------------------------------------------------------------

    def check_end(self, end: End) -> None:
        """Journals equal a sort and a scan of all signs, and each alarm is in the log, on time."""
        for sensor in _SENSORS:
            expected = _scan([sent for sent in end.sent if sent.row["sensor"] == sensor])
            journal = [(at, number) for at, number in end.states.get("silences", {}).get(sensor, [])]
            must(
                _by_time(journal) == expected,
                "I8",
                "a journal is a sort and a scan",
                key=sensor,
                journal=journal,
            )
            alarms = sum(number is None for _, number in expected)
            logged = end.states.get("log", {}).get(sensor, [0, 0])
            must(logged == [alarms, 0], "I1", "each alarm is logged, and on time", key=sensor, log=logged)
        must(not end.letters, "I1", "no sign is a dead letter", letters=end.letters[:5])


def _journal(row: RowVersion | None) -> list[_Entry]:
    return [] if row is None or row.state is None else [(at, number) for at, number in row.state]


def _signs(journal: Sequence[_Entry]) -> list[int]:
    return [number for _, number in journal if number is not None]


def _waiting(row: RowVersion) -> list[int]:
    return [orjson.loads(tag)["value"]["number"] for tag, domain, _ in row.timers if domain == _RECORD]


def _scan(signs: Sequence[Sent]) -> list[_Entry]:
    """What a sensor's journal must be, by a look at each pause between its signs."""
    times = sorted((sent.row["at"], sent.number) for sent in signs)
    entries: list[_Entry] = []
    for place, (at, number) in enumerate(times):
        entries.append((at, number))
        if place + 1 == len(times) or times[place + 1][0] - at >= _PATIENCE_US:
            entries.append((at + _PATIENCE_US, None))
    return entries


def _by_time(journal: Sequence[_Entry]) -> list[_Entry]:
    """A journal with signs of one time in the order of their numbers; an alarm is before a sign of its time."""
    return sorted(journal, key=lambda entry: (entry[0], -1 if entry[1] is None else entry[1]))
