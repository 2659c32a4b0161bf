"""Triggers as the specifications describe them, slow and obvious: the half of the oracle that decides when.

Written from Beam's semantics of triggers, the triggering patent and the transcripts' format,
without code of `millpond.executor.windows`: every trigger of a window is an object with fields, nothing is
stored, nothing is incremental.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self

from millpond.statestore.types import TIME_MIN_US
from tests.oracles.trigger import EXACT, WALL, Moment, OracleTrigger, TriggerSpec

_SECOND_US: Final = 1_000_000


class _Never(OracleTrigger):
    def is_ready(self, moment: Moment) -> bool:
        return False

    def fire(self, moment: Moment) -> bool:
        return True


class _Amount(OracleTrigger):
    """Fires once, after a number of elements, or of bytes."""

    def __init__(self, bound: int, weigh: Callable[[int], int]) -> None:
        super().__init__()
        self.bound, self.weigh, self.seen = bound, weigh, 0

    def element(self, at: int, value: int, moment: Moment) -> None:
        self.seen += self.weigh(value)

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.seen = sum(source.seen for source in sources)

    def is_ready(self, moment: Moment) -> bool:
        return self.seen >= self.bound

    def fire(self, moment: Moment) -> bool:
        return True


class _UpTo(OracleTrigger):
    """User code that adds up values, and emits while their sum is at least a bound."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound, self.total, self.says_so = bound, 0, False

    def element(self, at: int, value: int, moment: Moment) -> None:
        self.total += value
        self.says_so |= self.total >= self.bound

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.total = sum(source.total for source in sources)
        self.says_so = any(source.says_so for source in sources)

    def is_ready(self, moment: Moment) -> bool:
        return self.says_so

    def fire(self, moment: Moment) -> bool:
        self.says_so = False
        return True


class _ResultIsOdd(OracleTrigger):
    """Fires once, when the values add up to an odd number after an element or a merge."""

    def __init__(self) -> None:
        super().__init__()
        self.is_odd = False

    def element(self, at: int, value: int, moment: Moment) -> None:
        self.is_odd = sum(moment.values) % 2 == 1

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.is_odd = sum(moment.values) % 2 == 1

    def is_ready(self, moment: Moment) -> bool:
        return self.is_odd

    def fire(self, moment: Moment) -> bool:
        self.is_odd = False
        return True


class _Signal(OracleTrigger):
    """Fires once, when the signal comes."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = False

    def signal(self, moment: Moment) -> None:
        self.has_come = True

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.has_come = any(source.has_come for source in sources)

    def is_ready(self, moment: Moment) -> bool:
        return self.has_come

    def fire(self, moment: Moment) -> bool:
        self.has_come = False
        return True


class _AtTime(OracleTrigger):
    """Fires once, at a time that the first element determines; merged windows keep the earliest."""

    def __init__(self, domain: str, due_of: Callable[[int, Moment], int]) -> None:
        super().__init__()
        self.clock, self.due_of = EXACT if domain == "event" else WALL, due_of
        self.due: int | None = None

    def _wait(self, due: int) -> None:
        self.due = due
        self.alarms = {(due, self.clock)}

    def element(self, at: int, value: int, moment: Moment) -> None:
        if self.due is None:
            self._wait(self.due_of(at, moment))

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        known = [source.due for source in sources if source.due is not None]
        if known:
            self._wait(min(known))

    def is_ready(self, moment: Moment) -> bool:
        now = moment.watermark if self.clock == EXACT else moment.wall
        return self.due is not None and now >= self.due

    def fire(self, moment: Moment) -> bool:
        self.alarms.clear()
        return True


def _delay(seconds: int, domain: str = "wall", align: int | None = None) -> _AtTime:
    def due_of(at: int, moment: Moment) -> int:
        has_begun = moment.watermark > TIME_MIN_US
        stream_time = moment.watermark if has_begun else at
        due = (stream_time if domain == "event" else moment.wall) + seconds * _SECOND_US
        step = 1 if align is None else align * _SECOND_US
        while due % step:
            due += step - due % step
        return due

    return _AtTime(domain, due_of)


def _period(reference: int, period: int, domain: str = "wall") -> _AtTime:
    def due_of(at: int, moment: Moment) -> int:
        now = max(at, moment.watermark) if domain == "event" else moment.wall
        strokes = (now - reference * _SECOND_US) // (period * _SECOND_US)
        return reference * _SECOND_US + (strokes + 1) * period * _SECOND_US

    return _AtTime(domain, due_of)


class _AtEnd(OracleTrigger):
    """Fires when a watermark passes the end, once, or again for each late bundle."""

    def __init__(self, *, percentile: int = EXACT, is_once: bool) -> None:
        super().__init__()
        self.percentile, self.is_once = percentile, is_once

    def arm(self, moment: Moment) -> None:
        if not moment.has_passed(self.percentile):
            self.alarms = {(moment.end, self.percentile)}

    def element(self, at: int, value: int, moment: Moment) -> None:
        self.arm(moment)

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.arm(moment)

    def is_ready(self, moment: Moment) -> bool:
        return moment.has_passed(self.percentile)

    def fire(self, moment: Moment) -> bool:
        self.alarms.clear()
        return self.is_once


class _AfterWatermark(OracleTrigger):
    """Repeats one trigger before the end, fires at the end, and repeats another after it."""

    def __init__(self, early: TriggerSpec | None = None, late: TriggerSpec | None = None) -> None:
        super().__init__()
        never = ("Never",)
        self.early_spec, self.late_spec = ("Repeatedly", early or never), ("Repeatedly", late or never)
        self.finishes = late is None
        self.early, self.late = oracle_trigger(self.early_spec), oracle_trigger(self.late_spec)
        self.is_late = False

    def parts(self) -> Sequence[OracleTrigger]:
        return (self.late,) if self.is_late else (self.early,)

    def _await_end(self, moment: Moment) -> None:
        if not moment.is_over:
            self.alarms = {(moment.end, EXACT)}

    def arm(self, moment: Moment) -> None:
        self._await_end(moment)
        self.early.arm(moment)

    def element(self, at: int, value: int, moment: Moment) -> None:
        if not self.is_late:
            self._await_end(moment)
        self.parts()[0].element(at, value, moment)

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.is_late = all(source.is_late for source in sources)
        if self.is_late:
            self.late.merge([source.late for source in sources], moment)
        else:
            self._await_end(moment)
            self.early.merge([source.early for source in sources], moment)

    def is_ready(self, moment: Moment) -> bool:
        if self.is_late:
            return self.finishes or self.late.is_ready(moment)
        return moment.is_over or self.early.is_ready(moment)

    def fire(self, moment: Moment) -> bool:
        if self.is_late:
            return self.finishes or self.late.fire(moment)
        if not moment.is_over:
            self.early.fire(moment)
            return False
        self.is_late = True
        self.alarms.clear()
        # Elements of the on-time pane count towards no early pane of a window that this window merges into.
        self.early = oracle_trigger(self.early_spec)
        return self.finishes


class _Repeated(OracleTrigger):
    """Repeats indefinitely, a number of times, or until another trigger fires; may keep or clear contents."""

    def __init__(
        self,
        inner: TriggerSpec,
        *,
        times: int | None = None,
        until: TriggerSpec | None = None,
        asks: str | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.inner = inner, oracle_trigger(inner)
        self.times, self.asks, self.fired = times, asks, 0
        self.until = oracle_trigger(until or ("Never",))

    def parts(self) -> Sequence[OracleTrigger]:
        return (self.inner, self.until)

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.fired = min(source.fired for source in sources)
        self.inner.merge([source.inner for source in sources], moment)
        self.until.merge([source.until for source in sources], moment)

    def is_ready(self, moment: Moment) -> bool:
        return self.inner.is_ready(moment) or self.until.is_ready(moment)

    def fire(self, moment: Moment) -> bool:
        if self.asks is not None:
            moment.asked = self.asks
        is_over = self.until.is_ready(moment)
        if self.inner.is_ready(moment):
            if self.inner.fire(moment):
                self.inner = oracle_trigger(self.spec)
                self.inner.arm(moment)
            self.fired += 1
        if is_over:
            self.until.fire(moment)
        return is_over or (self.times is not None and self.fired >= self.times)


class _FirstOf(OracleTrigger):
    """The patent's: "At most one of the provided triggers will be allowed to fire"; then it is done."""

    def __init__(self, specs: Sequence[TriggerSpec]) -> None:
        super().__init__()
        self.rivals = [oracle_trigger(spec) for spec in specs]

    def parts(self) -> Sequence[OracleTrigger]:
        return self.rivals

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        for index, rival in enumerate(self.rivals):
            rival.merge([source.rivals[index] for source in sources], moment)

    def is_ready(self, moment: Moment) -> bool:
        return any(rival.is_ready(moment) for rival in self.rivals)

    def fire(self, moment: Moment) -> bool:
        winner = next(rival for rival in self.rivals if rival.is_ready(moment))
        winner.fire(moment)
        return True


class _Finally(_FirstOf):
    """Streaming 102: the second "terminates the parent trigger when the child fires"; until then the first one rules."""

    def fire(self, moment: Moment) -> bool:
        first, last = self.rivals
        is_terminated = last.is_ready(moment)
        has_ended = False
        if first.is_ready(moment):
            has_ended = first.fire(moment)
        if is_terminated:
            last.fire(moment)
            has_ended = True
        return has_ended


class _Conjunction(OracleTrigger):
    """Streaming 102: fires "only once all child triggers have fired"; who has finished has had its turn for good.

    A merge waits for all who are still awaited in any of the windows.
    """

    def __init__(self, specs: Sequence[TriggerSpec]) -> None:
        super().__init__()
        self.specs = specs
        self.awaited = {index: oracle_trigger(spec) for index, spec in enumerate(specs)}

    def parts(self) -> Sequence[OracleTrigger]:
        return list(self.awaited.values())

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self.awaited = {}
        for index, spec in enumerate(self.specs):
            known = [source.awaited[index] for source in sources if index in source.awaited]
            if known:
                self.awaited[index] = oracle_trigger(spec)
                self.awaited[index].merge(known, moment)

    def is_ready(self, moment: Moment) -> bool:
        return not [part for part in self.parts() if not part.is_ready(moment)]

    def fire(self, moment: Moment) -> bool:
        gone = [index for index, part in self.awaited.items() if part.fire(moment)]
        for index in gone:
            del self.awaited[index]
        return not self.awaited


class _Sequence(OracleTrigger):
    """One after another; only the current trigger listens. A merged window continues from the least advanced."""

    def __init__(self, specs: Sequence[TriggerSpec]) -> None:
        super().__init__()
        self.specs, self.position = specs, 0
        self.current = oracle_trigger(specs[0])

    def _go_to(self, position: int) -> None:
        self.position = position
        self.current = oracle_trigger(self.specs[position] if position < len(self.specs) else ("Never",))

    def parts(self) -> Sequence[OracleTrigger]:
        return (self.current,)

    def arm(self, moment: Moment) -> None:
        self.current.arm(moment)

    def element(self, at: int, value: int, moment: Moment) -> None:
        self.current.element(at, value, moment)

    def merge(self, sources: Sequence[Self], moment: Moment) -> None:
        self._go_to(min(source.position for source in sources))
        self.current.merge([source.current for source in sources if source.position == self.position], moment)

    def is_ready(self, moment: Moment) -> bool:
        return self.current.is_ready(moment)

    def fire(self, moment: Moment) -> bool:
        if self.current.fire(moment):
            self._go_to(self.position + 1)
            self.current.arm(moment)
        return self.position == len(self.specs)


def oracle_trigger(spec: TriggerSpec) -> OracleTrigger:
    """Return a trigger in its initial state.

    Raises:
        ValueError: the oracle does not know it.
    """
    made = _simple(spec) or _of_contents(spec) or _composed(spec)
    if made is None:
        raise ValueError(f"the oracle knows no {spec[0]}")
    return made


def _simple(spec: TriggerSpec) -> OracleTrigger | None:
    match spec:
        case ("Never",):
            return _Never()
        case ("Default",):
            return _AtEnd(is_once=False)
        case ("WatermarkPercentile", percentile):
            return _AtEnd(percentile=percentile, is_once=True)
        case ("AfterProcessingTime", seconds):
            return _delay(seconds)
        case ("AfterDelay", *arguments):
            return _delay(*arguments)
        case ("AtPeriod", *arguments):
            return _period(*arguments)
    return None


def _of_contents(spec: TriggerSpec) -> OracleTrigger | None:
    match spec:
        case ("AfterCount", bound):
            return _Amount(bound, lambda _: 1)
        case ("AfterBytes", bound):
            return _Amount(bound, lambda value: len(str(value)))
        case ("UpTo", bound):
            return _UpTo(bound)
        case ("ResultIsOdd",):
            return _ResultIsOdd()
        case ("AfterSignal", _):
            return _Signal()
    return None


def _composed(spec: TriggerSpec) -> OracleTrigger | None:
    match spec:
        case ("AfterWatermark", dict() as named):
            return _AfterWatermark(**named)
        case ("Repeatedly", inner):
            return _Repeated(inner)
        case ("RepeatCount", inner, times):
            return _Repeated(inner, times=times)
        case ("RepeatUntil", inner, until):
            return _Repeated(inner, until=until)
        case ("AskingTo", asks, inner):
            return _Repeated(inner, asks=asks.strip("'"))
        case ("AfterAny", *specs):
            return _FirstOf(specs)
        case ("OrFinally", *specs):
            return _Finally(specs)
        case ("AfterAll", *specs):
            return _Conjunction(specs)
        case ("AfterEach", *specs):
            return _Sequence(specs)
    return None
