"""
All orders in which processes can meet at what they share: two owners of a store, tried out to the end.

Each actor runs in a thread of its own, one at a time, and stops before every call to something shared. Who
goes on is chosen depth first, until every order has been tried. Orders that differ only in calls that do not
touch each other are tried once (sleep sets: Godefroid, Partial-Order Methods for the Verification of Concurrent
Systems, 1996, chapter 5). Faults are choices too, so "a reply is lost somewhere" is tried everywhere.

Example:
    >>> from millpond.statestore.objects import MemoryObjects
    >>> seen = set()
    >>> def race(stage):
    ...     disk = MemoryObjects()
    ...     disk.put("count", b"0")
    ...     def add():
    ...         shared = stage.objects(disk)
    ...         shared.put("count", b"%d" % (int(shared.get("count")) + 1))
    ...     stage.enter("first", add)
    ...     stage.enter("second", add)
    ...     return lambda: seen.add(disk.get("count"))
    >>> explore(race).orders, sorted(seen)
    (4, [b'1', b'2'])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from millpond.statestore.errors import InternalError, UnavailableError
from millpond.statestore.high_water import HighWater, Mark
from millpond.statestore.types import Objects, TableVersion

__all__ = ["Explored", "Scenario", "Stage", "explore"]

_Result = TypeVar("_Result")
_PATIENCE_S: Final = 60.0
_REPLIES: Final = ("comes", "is lost", "is lost, and so was the call")


@dataclass(frozen=True, slots=True)
class _Call:
    """
    A call to something shared: two calls touch each other if one writes what the other reads or writes.
    """

    place: str
    writes: bool
    is_folder: bool = False

    def touches(self, other: _Call) -> bool:
        if not (self.writes or other.writes):
            return False
        if self.is_folder or other.is_folder:
            return self.place.startswith(other.place) or other.place.startswith(self.place)
        return self.place == other.place


@dataclass(slots=True)
class _Node:
    """
    A point at which there was a choice: the next actor, or how a call ends.
    """

    options: tuple[str | int, ...]
    calls: dict[str, _Call] = field(default_factory=dict)
    asleep: dict[str, _Call] = field(default_factory=dict)
    at: int = 0

    @property
    def chosen(self) -> str | int:
        return self.options[self.at]

    def asleep_below(self) -> dict[str, _Call]:
        """
        Whose next call need not be tried again below this choice: it was tried first, and touches nothing since.
        """
        mine = self.calls[str(self.chosen)]
        tried = {str(name): self.calls[str(name)] for name in self.options[: self.at]}
        return {name: call for name, call in (self.asleep | tried).items() if not call.touches(mine)}


class _Curtain(BaseException):
    """
    The order is not tried to its end.
    """


class _Actor:
    def __init__(self, name: str, play: Callable[[], object]) -> None:
        self.name = name
        self.call: _Call | None = None
        self.choices = 0
        self.answer = 0
        self.error: BaseException | None = None
        self.has_ended = False
        self.may_go_on = threading.Semaphore(0)
        self.has_stopped = threading.Semaphore(0)
        self._play = play
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """
        Run to the first shared call.
        """
        self._thread.start()
        self._wait()

    def go_on(self) -> None:
        """
        Make the call that it stands before, and run to the next one.
        """
        self.call, self.choices = None, 0
        self.may_go_on.release()
        self._wait()

    def stop(self, *, is_over: bool) -> None:
        self.has_stopped.release()
        self.may_go_on.acquire()
        if is_over:
            raise _Curtain

    def _wait(self) -> None:
        if not self.has_stopped.acquire(timeout=_PATIENCE_S):
            raise InternalError("an actor waits for something that is not shared", actor=self.name)

    def _run(self) -> None:
        try:
            self._play()
        except _Curtain:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again where the scenario was begun
            self.error = error
        self.has_ended = True
        self.has_stopped.release()


class Stage:
    """
    Where the actors of one order meet.
    """

    def __init__(self, nodes: list[_Node], *, preemptions_max: int | None, faults_max: int) -> None:
        self._nodes = nodes
        self._depth = 0
        self._preemptions_left = preemptions_max
        self._faults_left = faults_max
        self._actors: list[_Actor] = []
        self._asleep: dict[str, _Call] = {}
        self._on_stage: _Actor | None = None
        self._is_over = False

    def enter(self, name: str, play: Callable[[], object]) -> None:
        """
        Another actor; every error that leaves ``play`` ends the exploration.
        """
        self._actors.append(_Actor(name, play))

    def objects(self, inner: Objects) -> Objects:
        """
        The object store as the actors share it; with faults, a write may fail, done or not.
        """
        return _SharedObjects(self, inner)

    def high_water(self, inner: HighWater) -> HighWater:
        """
        The high-water mark as the actors share it.
        """
        return _SharedHighWater(self, inner)

    def before(self, place: str, *, writes: bool, is_folder: bool = False) -> None:
        """
        Stop before a call to something shared; outside of actors nothing happens.
        """
        actor = self._on_stage
        if actor is None:
            return
        actor.call = _Call(place, writes, is_folder)
        actor.stop(is_over=False)
        if self._is_over:
            raise _Curtain

    def reply(self) -> str:
        """
        How a call that writes ends.
        """
        actor = self._on_stage
        if actor is None or not self._faults_left:
            return _REPLIES[0]
        actor.choices = len(_REPLIES)
        actor.stop(is_over=False)
        if actor.answer:
            self._faults_left -= 1
        return _REPLIES[actor.answer]

    # -- for the explorer ------------------------------------------------------------------

    def play(self) -> bool:
        """
        Play one order; whether to its end.
        """
        for actor in self._actors:
            self._on_stage = actor
            actor.begin()
        current: _Actor | None = None
        while waiting := [actor for actor in self._actors if not actor.has_ended]:
            chosen = self._choose(waiting, current)
            if chosen is None:
                self._end(waiting)
                return False
            current = self._on_stage = chosen
            chosen.go_on()
            while chosen.choices and not chosen.has_ended:
                chosen.answer = int(self._next(lambda: _Node(tuple(range(len(_REPLIES))))).chosen)
                chosen.go_on()
        self._on_stage = None
        for actor in self._actors:
            if actor.error is not None:
                raise actor.error
        return True

    def _choose(self, waiting: Sequence[_Actor], current: _Actor | None) -> _Actor | None:
        by_name = {actor.name: actor for actor in waiting}
        names = sorted(by_name, key=lambda name: (by_name[name] is not current, name))
        calls = {name: actor.call for name, actor in by_name.items() if actor.call is not None}
        may_go_on = current is not None and current.name in by_name
        if self._preemptions_left is None:
            names = [name for name in names if name not in self._asleep]
        elif may_go_on and not self._preemptions_left:
            names = names[:1]
        if not names:
            return None
        asleep = self._asleep
        node = self._next(lambda: _Node(tuple(names), calls, asleep))
        if node.calls != calls:
            raise InternalError("the same order was not the same play", before=node.calls, now=calls)
        if self._preemptions_left is None:
            self._asleep = node.asleep_below()
        elif may_go_on and current is not None and node.chosen != current.name:
            self._preemptions_left -= 1
        return by_name[str(node.chosen)]

    def _next(self, make: Callable[[], _Node]) -> _Node:
        if self._depth == len(self._nodes):
            self._nodes.append(make())
        self._depth += 1
        return self._nodes[self._depth - 1]

    def _end(self, waiting: Iterable[_Actor]) -> None:
        self._is_over = True
        for actor in waiting:
            self._on_stage = actor
            while not actor.has_ended:
                actor.go_on()


Scenario: TypeAlias = Callable[[Stage], Callable[[], object]]
"""Lets actors enter a fresh stage, and returns what to look at when they have ended; raises if a promise is broken."""


@dataclass(frozen=True, slots=True)
class Explored:
    """
    What was tried.

    Attributes:
        orders: played to their ends, each of them unlike all others.
        cut: begun, and found to be like one that was tried.
    """

    orders: int
    cut: int


def explore(scenario: Scenario, *, preemptions_max: int | None = None, faults_max: int = 0) -> Explored:
    """
    Play every order of the scenario's shared calls.

    Args:
        scenario: called afresh for every order; must do the same again when the same happens to it.
        preemptions_max: how often an actor that could go on may be interrupted; ``None``: always.
        faults_max: how many writes may fail, done or not, in one order.

    Raises:
        InternalError: the scenario is not the same each time, or an actor waits for another unseen.
        AssertionError: or whatever an actor or the look at the end has raised.
    """
    nodes: list[_Node] = []
    orders = cut = 0
    while True:
        stage = Stage(nodes, preemptions_max=preemptions_max, faults_max=faults_max)
        look = scenario(stage)
        if stage.play():
            look()
            orders += 1
        else:
            cut += 1
        while nodes and nodes[-1].at + 1 == len(nodes[-1].options):
            nodes.pop()
        if not nodes:
            return Explored(orders, cut)
        nodes[-1].at += 1


class _SharedObjects:
    """
    `Objects` that stop before every call.
    """

    def __init__(self, stage: Stage, inner: Objects) -> None:
        self._stage = stage
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._write(path, lambda: self._inner.put_if_absent(path, data))

    def put(self, path: str, data: bytes) -> None:
        self._write(path, lambda: self._inner.put(path, data))

    def get(self, path: str) -> bytes:
        self._stage.before(path, writes=False)
        return self._inner.get(path)

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        self._stage.before(prefix, writes=False, is_folder=True)
        return self._inner.list(prefix, start_after)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._write(path, lambda path=path: self._inner.delete([path]))  # type: ignore[misc]

    def _write(self, path: str, action: Callable[[], _Result]) -> _Result:
        self._stage.before(path, writes=True)
        reply = self._stage.reply()
        if reply == _REPLIES[2]:
            raise UnavailableError("a fault of the order", path=path, reply=reply)
        result = action()
        if reply == _REPLIES[1]:
            raise UnavailableError("a fault of the order", path=path, reply=reply)
        return result


class _SharedHighWater:
    """
    `HighWater` that stops before every call.
    """

    def __init__(self, stage: Stage, inner: HighWater) -> None:
        self._stage = stage
        self._inner = inner

    def read(self) -> Mark | None:
        self._stage.before("high-water mark", writes=False)
        return self._inner.read()

    def advance(self, version: TableVersion, digest: str) -> None:
        self._stage.before("high-water mark", writes=True)
        self._inner.advance(version, digest)

    def flush(self) -> None:
        self._inner.flush()
