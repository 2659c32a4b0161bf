"""The word count: a workload for delivery alone, without timers, windows and sinks.

Lines are split into words, words are counted by word, and counts are summed by initial, so many
keys converge on few, and one line fans out to many keys. One of the two streams between them is
strong and the other weak, as the seed decides, and in half of the seeds the sums are a combining state. In every table version each stream's producer has
sent as much as its consumer has counted plus the records in flight (I9). Each word's row lists where
its occurrences came from, so loss, duplicates and forks are visible by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.state import CombiningState
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.executor.windows.pipeline import Pipeline
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.workload import End, RowVersion, Workload

_VOCABULARY: Final = ("mill", "moss", "pond", "path", "reed", "rain")
_BOOKS: Final = ("brook", "delta", "weir")
_WORDS_MAX: Final = 4
_SUMS: Final = pa.schema([(word, pa.int64()) for word in _VOCABULARY])
_WAYS: Final = {"words": ("splitter", "counter"), "counts": ("counter", "initials")}
"""Streams, with who sends and who receives."""
_COMPUTATIONS: Final = frozenset(name for way in _WAYS.values() for name in way)


class _Splitter(Computation):
    """Produces a line's words under their own keys, and records the line."""

    def process_record(self, context: Context, record: Record) -> None:
        state = context.state.get({"sent": 0, "lines": []})
        number, words = record.value["number"], record.value["words"]
        for index, word in enumerate(words):
            context.produce("words", {"word": word, "origin": [number, index]})
        context.state.set({"sent": state["sent"] + len(words), "lines": [*state["lines"], number]})


class _WordCounter(Computation):
    """Counts a word, and records where it occurred."""

    def process_record(self, context: Context, record: Record) -> None:
        origins = context.state.get({"origins": []})["origins"]
        context.produce("counts", {"initial": context.key[0], "word": context.key})
        context.state.set({"origins": [*origins, record.value["origin"]]})


class _Initials(Computation):
    """Sums the words of an initial."""

    def process_record(self, context: Context, record: Record) -> None:
        counts = context.state.get({})
        context.state.set({**counts, record.value["word"]: counts.get(record.value["word"], 0) + 1})


class _AddedInitials(Computation):
    """Sums the words of an initial without a look at the sums."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.add({record.value["word"]: 1})


class Words(Workload):
    """Lines of three books, counted by word and by initial."""

    name = "words"
    records_max = 40
    takes_late_records = True

    def __init__(self) -> None:
        self._weak = ""
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._totals: dict[int, tuple[int, ...]] = {}

    def begin(self, draw: Draw) -> None:
        """Draw which of the two streams is weak, that is, delivered before it is durable."""
        self._weak = draw.choice(("splitter", "counter"))

    def pipeline(self) -> Pipeline:
        """Three stages: lines, words, initials."""
        pipeline = Pipeline("words")
        pipeline.inject("lines", key="book", at="at", id="id", watermark=ManualWatermark())
        pipeline.add(
            _Splitter(),
            name="splitter",
            subscribes={"lines": None},
            produces=("words",),
            productions=self._strength("splitter"),
        )
        pipeline.add(
            _WordCounter(),
            name="counter",
            subscribes={"words": "word"},
            produces=("counts",),
            productions=self._strength("counter"),
        )
        # By the same draw, so that a seed stays what it was.
        is_added = self._weak == "splitter"
        pipeline.add(
            _AddedInitials() if is_added else _Initials(),
            name="initials",
            subscribes={"counts": "initial"},
            state=CombiningState(_SUMS) if is_added else None,
        )
        return pipeline

    def _strength(self, computation: str) -> Any:
        return "weak" if computation == self._weak else "strong"

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        """A line of one to four words; there are no poisonous lines."""
        words = [draw.choice(_VOCABULARY) for _ in range(draw.number(1, _WORDS_MAX))]
        return "lines", {"book": draw.choice(_BOOKS), "number": number, "words": words}

    # -- at each commit --------------------------------------------------------------------

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """A row's list only grows, has no duplicates, and matches the row's records and productions."""
        if computation not in _COMPUTATIONS:
            # An update of the pipeline has added it.
            return
        old, new = _memory(computation, before), _memory(computation, after)
        must(new[: len(old)] == old, "I5", "a memory only grows", key=key, before=old, after=new)
        must(len(set(new)) == len(new), "I2", "each record counts once", key=key, memory=new)
        must(not after.timers, "I6", "this workload sets no timers", key=key, timers=after.timers)
        if computation == "splitter":
            ids = sorted(after.record_ids)
            must(len(ids) == len(new) - len(old), "I3", "a row has the ids of its lines", key=key, ids=ids)
        for stream, (producer, consumer) in _WAYS.items():
            if computation == producer:
                self._sent[stream] += _sent(producer, after) - _sent(producer, before)
            if computation == consumer:
                self._received[stream] += _received(consumer, after) - _received(consumer, before)

    def check_version(self, version: int, productions: Sequence[tuple[str, str, Any, int]]) -> None:
        """On each stream, each sent record has been received or is in flight, in every table version."""
        for stream, (_, consumer) in _WAYS.items():
            # The second stream holds weak productions that were too late for their consumer.
            under_way = sum(name in {stream, f"{stream}@{consumer}"} for name, *_ in productions)
            left = self._sent[stream] - self._received[stream] - under_way
            must(left == 0, "I9", "what was sent is received or under way", stream=stream, left=left)
        self._totals[version] = self._so_far()

    def _so_far(self) -> tuple[int, ...]:
        return tuple(count for stream in _WAYS for count in (self._sent[stream], self._received[stream]))

    def check_cut(self, version: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """A reader sees exactly one version."""
        known = [audited for audited in self._totals if audited <= version]
        expected = self._totals[known[-1]] if known else (0, 0, 0, 0)
        lines, words, initials = (
            states.get(name, {}).values() for name in ("splitter", "counter", "initials")
        )
        counted = sum(len(state["origins"]) for state in words)
        totals = (
            sum(state["sent"] for state in lines),
            counted,
            counted,
            sum(sum(filter(None, state.values())) for state in initials),
        )
        must(totals == expected, "I9", "a reader sees one version", version=version, found=totals)

    # -- at the end ------------------------------------------------------------------------

    def check_end(self, end: End) -> None:
        """Every word of every line counts once, by word and by initial, and there are no dead letters."""
        places = [
            (word, sent.number, index) for sent in end.sent for index, word in enumerate(sent.row["words"])
        ]
        counted = (
            (word, number, index)
            for word, state in end.states.get("counter", {}).items()
            for number, index in state["origins"]
        )
        _must_be_equal(counted, places, "counted by word")
        by_initial = (
            (initial, word)
            for initial, counts in end.states.get("initials", {}).items()
            for word, count in counts.items()
            for _ in range(count or 0)
        )
        _must_be_equal(by_initial, [(word[0], word) for word, _, _ in places], "counted by initial")
        must(not end.letters, "I1", "no line is a dead letter", letters=end.letters[:5])


def _memory(computation: str, row: RowVersion | None) -> list[Any]:
    """What a row remembers, in comparable form; initials remember only sums."""
    if row is None or row.state is None or computation == "initials":
        return []
    return list(row.state["lines"]) if computation == "splitter" else list(map(tuple, row.state["origins"]))


def _sent(producer: str, row: RowVersion | None) -> int:
    if row is None or row.state is None:
        return 0
    return int(row.state["sent"]) if producer == "splitter" else len(row.state["origins"])


def _received(consumer: str, row: RowVersion | None) -> int:
    if row is None or row.state is None:
        return 0
    return sum(filter(None, row.state.values())) if consumer == "initials" else len(row.state["origins"])


def _must_be_equal(actual: Iterable[Any], expected: Iterable[Any], verb: str) -> None:
    there, wanted = Counter(actual), Counter(expected)
    missing, surplus = wanted - there, there - wanted
    must(not missing, "I1", f"every word is {verb}", missing=sorted(missing)[:5])
    must(not surplus, "I2", f"no word is {verb} twice", surplus=sorted(surplus)[:5])
