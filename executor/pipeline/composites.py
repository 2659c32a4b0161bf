"""Composites: functions from streams to streams whose steps have one name in the graph (Beam's composite transforms).

What a composite declares is named after it: its step ``clean`` is the computation ``visits.clean``. A dot
joins the names because a computation's name is a table in SQL, a folder and a ZooKeeper node as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from millpond.executor.pipeline.checks import check_name
from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.statestore.errors import InvalidError

_JOINT = "."
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Composites:
    """The composites of a pipeline, and the one that is being declared."""

    def __init__(self) -> None:
        self._within: tuple[str, ...] = ()
        self._steps: dict[str, list[str]] = {}
        self._computations: set[str] = set()

    @property
    def prefix(self) -> str:
        """What the names of the composite that is being declared begin with; empty outside of composites."""
        return f"{self._within[-1]}{_JOINT}" if self._within else ""

    @property
    def steps(self) -> Mapping[str, tuple[str, ...]]:
        """The computations of each composite, those of composites within it too, in order of declaration."""
        return {name: tuple(steps) for name, steps in self._steps.items()}

    def note(self, computation: str) -> None:
        """Take a computation for a step of each composite that is being declared.

        Raises:
            InvalidError: a composite has its name.
        """
        if computation in self._steps:
            raise InvalidError("a computation and a composite have one name", computation=computation)
        self._computations.add(computation)
        for name in self._within:
            self._steps[name].append(computation)

    @contextmanager
    def declare(self, name: str) -> Iterator[None]:
        """What is declared within the block belongs to the composite.

        Args:
            name: its whole name.

        Raises:
            InvalidError: a composite or a computation has this name.
        """
        if name in self._steps:
            raise InvalidError("two composites have one name", composite=name)
        if name in self._computations:
            raise InvalidError("a computation and a composite have one name", composite=name)
        self._steps[name] = []
        self._within = (*self._within, name)
        try:
            yield
        finally:
            self._within = self._within[:-1]


class CompositeGraph:
    """The part of a pipeline that names what is declared, and declares composites."""

    def __init__(self) -> None:
        self._composites = Composites()

    def transform(
        self,
        name: str,
        function: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function from streams to streams, whose steps belong together under one name: a composite.

        What the function declares (steps, streams, sinks, inputs) is named after the composite: its step
        ``clean`` is the computation ``visits.clean``, in SQL, in `millpond status` and everywhere. So a
        function may be applied several times, under different names, and composites may be nested. Code
        within produces to its streams by their own names. Streams from outside are arguments.

        Args:
            name: the composite's name; it is stored with every step, so keep it.
            function: takes streams and any further arguments, and returns a stream, several, or nothing.
            args: the arguments of the function.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            InvalidError: the name is malformed, or a composite or computation has it; ``function`` is none;
                or a declaration within is invalid.

        Example:
            ``matched = pipeline.transform("matching", match, clicks, orders, within="1h")``
        """
        name = self._named("composite", name)
        if not callable(function):
            raise InvalidError(
                "a composite is a function of streams", composite=name, type=type(function).__qualname__
            )
        with self._composites.declare(name):
            return function(*args, **kwargs)

    def _named(self, kind: str, name: object, *, reserved: frozenset[str] = frozenset({DEAD_LETTERS})) -> str:
        """The whole name of what is being declared, within its composite."""
        own = check_name(kind, name, reserved=reserved)
        return own if own == DEAD_LETTERS else check_name(kind, f"{self._composites.prefix}{own}")
