"""
Composites: functions from streams to streams whose steps have one name in the graph (Beam's composite transforms).

What a composite declares is named after it: its step ``clean`` is the computation ``visits.clean``. A dot
joins the names because a computation's name is a table in SQL, a folder and a ZooKeeper node as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from millpond.statestore.errors import InvalidError

__all__ = ["Composites", "local_name"]

_JOINT = "."


class Composites:
    """
    The composites of a pipeline, and the one that is being declared.
    """

    def __init__(self) -> None:
        self._within: tuple[str, ...] = ()
        self._steps: dict[str, list[str]] = {}

    @property
    def prefix(self) -> str:
        """
        What the names of the composite that is being declared begin with; empty outside of composites.
        """
        return f"{self._within[-1]}{_JOINT}" if self._within else ""

    @property
    def steps(self) -> Mapping[str, tuple[str, ...]]:
        """
        The computations of each composite, those of composites within it too, in order of declaration.
        """
        return {name: tuple(steps) for name, steps in self._steps.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def note(self, computation: str) -> None:
        """
        Take a computation for a step of each composite that is being declared.
        """
        for name in self._within:
            self._steps[name].append(computation)

    @contextmanager
    def declare(self, name: str) -> Iterator[None]:
        """
        What is declared within the block belongs to the composite.

        Args:
            name: its whole name.

        Raises:
            InvalidError: there is one of this name.
        """
        if name in self._steps:
            raise InvalidError("two composites have one name", composite=name)
        self._steps[name] = []
        self._within = (*self._within, name)
        try:
            yield
        finally:
            self._within = self._within[:-1]


def local_name(name: str, prefix: str) -> str:
    """
    A name as the code of its composite says it.

    Example:
        >>> local_name("visits.clean", "visits.")
        'clean'
    """
    return name.removeprefix(prefix)
