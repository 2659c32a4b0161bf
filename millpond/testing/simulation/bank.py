"""The bank: the workload that exercises the whole engine.

Transfers are debited in one computation and credited in another, so in every table version debits,
credits and the transfers in flight between them add up to zero (I9). Each account's state is a
journal of everything that happened to it, in order, each record by its own number: one read shows
loss, duplicates, order and forks (Elle's method), and one replay shows every timer that fired twice,
too early or after it was cancelled. Windows count alongside, and two sinks receive everything
again outside the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.executor.windows.combiners import Sum
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.time_triggers import AfterWatermark
from millpond.executor.windows.window_fns import FixedWindows
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import End, RowVersion, Sent, Workload

_ACCOUNTS: Final = ("ann", "bob", "cyd", "dan", "eve", "fay")
_SECOND_US: Final = 1_000_000
_STREAM: Final = "transfers"
_ENTRIES: Final = ("entries", "entries@")
_CREDITS: Final = ("credits", "credits@accounts")
"""Strong ones, and weak ones whose consumer was too slow; weak ones that were in time are not written."""

_ORDERS: Final = "standing_orders"


class _Ledger(Computation):
    """Debits accounts, and journals records and the timers that they set and cancel."""

    def process_record(self, context: Context, record: Record) -> None:
        value = record.value
        state = context.state.get({"debits": 0, "journal": []})
        self._note(context, state, ["record", value["number"], record.late, int(context.watermark)])
        for tag in value["cancels"]:
            domain = tag.partition("-")[0]
            context.delete_timer(tag, domain)
            self._note(context, state, ["cancel", tag])
        for tag, delay_us in value["timers"]:
            domain = tag.partition("-")[0]
            at = (record.at if domain == "event" else context.wall_time) + delay_us
            context.set_timer(at, tag, domain)
            self._note(context, state, ["set", tag, int(at)])
        state["debits"] += value["amount"]
        context.state.set(state)
        credit = {name: value[name] for name in ("to", "number", "amount")}
        context.produce("credits", credit | {"late": record.late})
        if value["poison"]:
            raise ValueError("poison")

    def process_timer(self, context: Context, timer: Timer) -> None:
        state = context.state.get()
        clock = context.watermark if timer.domain.value == "event" else context.wall_time
        self._note(context, state, ["fired", timer.tag, int(timer.at), int(clock)])
        context.state.set(state)

    def _note(self, context: Context, state: dict[str, Any], entry: list[Any]) -> None:
        context.produce("entries", {"place": len(state["journal"]), "entry": entry})
        state["journal"].append(entry)


class _Accounts(Computation):
    """Credits accounts, and remembers the senders."""

    def process_record(self, context: Context, record: Record) -> None:
        state = context.state.get({"credits": 0, "numbers": []})
        if record.late and not record.value["late"]:
            raise ValueError("a record of the pipeline itself is late")
        state["credits"] += record.value["amount"]
        state["numbers"].append(record.value["number"])
        context.state.set(state)


class Bank(Workload):
    """Transfers between six accounts."""

    name = "bank"
    takes_late_records = True

    def __init__(self) -> None:
        self._has_windows = True
        self._has_journal_sink = True
        self._is_weak = False
        self._debits = 0
        self._credits = 0
        self._totals: dict[int, tuple[int, int]] = {}
        self._consumed: set[int] = set()

    def begin(self, draw: Draw) -> None:
        """Draw whether there are windows and sinks, and whether credits are weak productions."""
        self._has_windows = draw.chance(1 / 3)
        self._has_journal_sink = draw.chance(1 / 2)
        self._is_weak = draw.chance(1 / 3)

    def pipeline(self) -> Pipeline:
        """Debits and credits; optionally windows with their sink, and a sink of the journal."""
        pipeline = Pipeline("bank")
        transfers = pipeline.inject(_STREAM, key="from", at="at", id="id", watermark=ManualWatermark())
        pipeline.inject(_ORDERS, key="from", at="at", id="id", watermark=ManualWatermark())
        pipeline.add(
            _Ledger(),
            name="ledger",
            subscribes={_STREAM: None, _ORDERS: None},
            produces=("credits", "entries"),
            retries=1,
            productions="weak" if self._is_weak else "strong",
        )
        pipeline.add(_Accounts(), name="accounts", subscribes={"credits": "to"})
        if self._has_journal_sink:
            pipeline.add_sink("journal", "entries", DeltaSink("simulated/journal"))
        if self._has_windows:
            trigger = AfterWatermark(early=AfterCount(2))
            windowed = transfers.window(FixedWindows("8s"), trigger=trigger, of="amount")
            windowed.combine(Sum(), name="sums").sink("panes", DeltaSink("simulated/panes"))
        return pipeline

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:
        """A transfer, sometimes with a timer, or the cancellation of an earlier timer."""
        timers = []
        if draw.chance(0.5):
            domain = draw.choice(("event", "wall"))
            timers.append([f"{domain}-{draw.number(0, 3)}", draw.number(0, 20) * _SECOND_US])
        cancels = [f"{draw.choice(('event', 'wall'))}-{draw.number(0, 3)}"] if draw.chance(0.25) else []
        giver = draw.choice(_ACCOUNTS)
        return _ORDERS if draw.chance(1 / 4) else _STREAM, {
            "from": giver,
            "to": draw.choice([name for name in _ACCOUNTS if name != giver]),
            "amount": draw.number(1, 100),
            "number": number,
            "timers": timers,
            "cancels": cancels,
            "poison": poison,
        }

    # -- at each commit --------------------------------------------------------------------

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """The journal only grows; the row's ids, timers and productions are the journal's."""
        if computation == "ledger":
            self._check_ledger(key, before, after)
        elif computation == "accounts":
            old, new = _of(before, "numbers"), _of(after, "numbers")
            must(new[: len(old)] == old, "I5", "credits only grow", key=key)
            must(len(set(new)) == len(new), "I2", "each credit counts once", key=key, numbers=new)
            self._credits += _amount(after, "credits") - _amount(before, "credits")

    def _check_ledger(self, key: str, before: RowVersion | None, after: RowVersion) -> None:
        old, new = _of(before, "journal"), _of(after, "journal")
        must(new[: len(old)] == old, "I5", "a journal only grows", key=key, before=old, after=new)
        added = new[len(old) :]
        numbers = [entry[1] for entry in added if entry[0] == "record"]
        ids = sorted(record_id for record_id in after.record_ids)
        poisoned = len(ids) - len(numbers)
        told = sum(any(_is_id(record_id, number) for record_id in ids) for number in numbers)
        must(told == len(numbers) and poisoned >= 0, "I3", "a row has the ids of its records", key=key)
        for number in numbers:
            must(number not in self._consumed, "I2", "a record counts once", key=key, number=number)
            self._consumed.add(number)
        late = any(entry[2] for entry in added if entry[0] == "record")
        must(self.has_late_records or not late, "I7", "no promised record is late", key=key)
        if self._has_journal_sink or not self._is_weak:
            # A weak production that reached its consumer is not written.
            entries = [value for stream, _, value, _ in after.productions if stream in _ENTRIES]
            said = [{"place": len(old) + index, "entry": entry} for index, entry in enumerate(added)]
            must(entries == said, "I3", "a row produces what its journal says", key=key)
        pending = _replay(key, new)
        must(
            sorted(pending.items()) == [(tag, at) for tag, _, at in after.timers],
            "I3",
            "a row's timers are those of its journal",
            key=key,
            row=after.timers,
            journal=pending,
        )
        self._debits += _amount(after, "debits") - _amount(before, "debits")

    def check_version(self, version: int, productions: Sequence[tuple[str, str, Any, int]]) -> None:
        """The bank's total is zero in every table version."""
        under_way = sum(value["amount"] for stream, _, value, _ in productions if stream in _CREDITS)
        total = self._debits - self._credits - under_way
        must(total == 0, "I9", "the bank's total is constant", version=version, total=total)
        self._totals[version] = (self._debits, self._credits)

    def check_cut(self, version: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """A reader sees exactly one version."""
        known = [audited for audited in self._totals if audited <= version]
        expected = self._totals[known[-1]] if known else (0, 0)
        debits = sum(state["debits"] for state in states.get("ledger", {}).values())
        credited = sum(state["credits"] for state in states.get("accounts", {}).values())
        must((debits, credited) == expected, "I9", "a reader sees one version", version=version)

    # -- at the end ------------------------------------------------------------------------

    def check_end(self, end: End) -> None:
        """Everything counts once, in order, and the sinks agree."""
        ledger = {key: state["journal"] for key, state in end.states.get("ledger", {}).items()}
        sound = [sent for sent in end.sent if not sent.row["poison"]]
        self._check_once(sound, ledger, end)
        self._check_order(sound, ledger)
        for key, journal in ledger.items():
            pending = _replay(key, journal)
            must(not pending, "I6", "every timer fires once time is over", key=key, pending=pending)
        _check_letters(end)
        if self._has_journal_sink:
            _check_journal_sink(ledger, end.sinks["journal"])
        if self._has_windows:
            _check_panes(end.sent, end.sinks["panes"], may_drop=self.has_late_records)

    def _check_once(self, sound: Sequence[Sent], ledger: Mapping[str, list[Any]], end: End) -> None:
        expected = Counter((sent.row["from"], sent.number) for sent in sound)
        debited = Counter((key, e[1]) for key, journal in ledger.items() for e in journal if e[0] == "record")
        _must_be_equal(debited, expected, "debited")
        credited = Counter(
            (key, number)
            for key, state in end.states.get("accounts", {}).items()
            for number in state["numbers"]
        )
        _must_be_equal(credited, Counter((sent.row["to"], sent.number) for sent in sound), "credited")

    def _check_order(self, sound: Sequence[Sent], ledger: Mapping[str, list[Any]]) -> None:
        """A record acknowledged before another was created precedes it in the journal."""
        sent_by = {sent.number: sent for sent in sound}
        for key, journal in ledger.items():
            newest_created = 0
            for entry in (entry for entry in journal if entry[0] == "record"):
                sent = sent_by[entry[1]]
                done_us = sent.acknowledged_us or 0
                must(done_us >= newest_created, "I5", "history agrees with real time", key=key, entry=entry)
                newest_created = max(newest_created, sent.created_us)


def _of(row: RowVersion | None, name: str) -> list[Any]:
    return [] if row is None or row.state is None else list(row.state[name])


def _amount(row: RowVersion | None, name: str) -> int:
    return 0 if row is None or row.state is None else int(row.state[name])


def _is_id(record_id: bytes, number: int) -> bool:
    return record_id.endswith(f"#{number}".encode())


def _replay(key: str, journal: Sequence[Sequence[Any]]) -> dict[str, int]:
    """The timers that a journal leaves pending; each that fired must equal the one set."""
    pending: dict[str, int] = {}
    for entry in journal:
        kind, tag = entry[0], entry[1]
        if kind == "set":
            pending[tag] = entry[2]
        elif kind == "cancel":
            pending.pop(tag, None)
        elif kind == "fired":
            _, _, at, clock = entry
            must(pending.get(tag) == at, "I6", "a timer fires once, as it was set", key=key, entry=entry)
            must(clock >= at, "I6", "a timer never fires before its time", key=key, entry=entry)
            del pending[tag]
    return pending


def _must_be_equal(actual: Counter[Any], expected: Counter[Any], verb: str) -> None:
    missing, surplus = expected - actual, actual - expected
    must(not missing, "I1", f"every record is {verb}", missing=sorted(missing)[:5])
    must(not surplus, "I2", f"no record is {verb} twice", surplus=sorted(surplus)[:5])


def _check_letters(end: End) -> None:
    poisoned = Counter(sent.number for sent in end.sent if sent.row["poison"])
    numbers = Counter(_number_of(letter) for letter in end.letters)
    must(numbers == poisoned, "I2", "a poisonous record is a dead letter once", letters=numbers)


def _number_of(letter: Mapping[str, Any]) -> int:
    if letter.get("computation") != "ledger":
        raise Violation("I1", f"a record became a dead letter: {letter}")
    value = letter["value"]
    return int((orjson.loads(value) if isinstance(value, str) else value)["number"])


def _check_journal_sink(ledger: Mapping[str, list[Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    said: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        entry = row["value"]
        must(entry["place"] == len(said[row["key"]]), "I2", "the sink has each entry once, in order", row=row)
        said[row["key"]].append(entry["entry"])
    for key, journal in ledger.items():
        must(said[key] == journal, "I1", "the sink has every entry", key=key, missing=len(journal))


def _check_panes(
    records: Sequence[Sent], rows: Sequence[Mapping[str, Any]], *, may_drop: bool = False
) -> None:
    expected: Counter[tuple[str, int]] = Counter()
    for sent in (sent for sent in records if sent.stream == _STREAM):
        start = sent.row["at"] // (8 * _SECOND_US) * (8 * _SECOND_US)
        expected[sent.row["from"], start] += sent.row["amount"]
    sums: Counter[tuple[str, int]] = Counter()
    panes: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        value = row["value"]
        window = (row["key"], value["window"][0])
        sums[window] += value["value"]
        panes[window].append(value["pane"])
    for window, shown in panes.items():
        places = [pane["index"] for pane in shown]
        must(places == list(range(len(places))), "I8", "panes are numbered", window=window, places=places)
        lasts = [pane["is_last"] for pane in shown]
        must(lasts.index(True) == len(lasts) - 1, "I8", "the last pane is the last", window=window)
    # A window drops elements after it has closed, so late records need not be in its sum.
    wrong = (sums - expected) | (Counter() if may_drop else expected - sums)
    must(not wrong, "I8", "windows sum up their records", wrong=sorted(wrong)[:5])
