"""The hooks of a computation, looked at before they run."""

from __future__ import annotations

import inspect
from typing import Final

from millpond.executor.computation.computation import Computation
from millpond.statestore.errors import InvalidError

_HOOKS: Final = ("process_record", "process_records", "process_timer", "upgrade_state")


def check_hooks(name: str, computation: Computation) -> None:
    """Refuse hooks whose body would never run: a call of theirs only makes a generator or a coroutine.

    Args:
        name: the computation's name, for the error.
        computation: the user's code.

    Raises:
        InvalidError: names the hook.
    """
    for hook in _HOOKS:
        function = getattr(computation, hook)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidError(
                "a hook is a plain function: nothing awaits one that is async, so it would never run",
                computation=name,
                hook=hook,
            )
        if inspect.isgeneratorfunction(function):
            raise InvalidError(
                "a hook is a plain function: nothing reads what it yields, so it would never run; "
                "call context.produce instead of yield",
                computation=name,
                hook=hook,
            )
