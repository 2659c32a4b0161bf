"""The state of a computation that declares a ``state_version``: what earlier code wrote is upgraded when code asks for it.

A row keeps the state that it has until it is written, so a change of code rewrites nothing at once. A turn that only
reads sees the upgraded state and writes no row for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millpond.executor.computation.holds import Holds
from millpond.executor.computation.state import KeyState, OpenStateT, checked_encoding
from millpond.executor.computation.stored_state import FormerState, StoredState
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec

if TYPE_CHECKING:
    from millpond.executor.computation.computation import Computation


def codec_of(computation: Computation, version: int) -> Codec:
    """The codec that a computation's states of a version are encoded with."""
    if version == computation.state_version:
        return computation.codec
    return computation.codecs.get(version, computation.codec)


def upgrade(computation: Computation, name: str, key: str, former: FormerState) -> FormerState:
    """A former state together with what the computation's code makes of it.

    Args:
        computation: today's code.
        name: the computation's name, for errors.
        key: the state's key, for errors.
        former: the state as it is stored.

    Raises:
        InvalidError: the state cannot be decoded, the code fails or returns nothing, or the codec refuses the result;
            the error names computation, key and version.
    """
    try:
        state = codec_of(computation, former.version).decode(former.encoded)
        was_none = state is None
        upgraded = computation.upgrade_state(state, former.version)
        if upgraded is None and not was_none:
            raise InvalidError("it returned None: return the new state, also where it was changed in place")  # noqa: TRY301
        encoded = checked_encoding(computation.codec, computation.codec.encode(upgraded))
    except Exception as error:
        raise InvalidError(
            "the state of an earlier version cannot be upgraded",
            computation=name,
            key=key,
            version=former.version,
            state_version=computation.state_version,
            reason=f"{type(error).__name__}: {error}",
        ) from error
    return replace(former, upgraded=encoded)


class UpgradingState(KeyState):
    """`KeyState` of a computation whose rows may have states of earlier versions.

    Args:
        computation: the user's code.
        holds: the key's holds.
        upgrade: returns a former state of the current key together with its upgraded form.
    """

    __slots__ = ("_former", "_upgrade")

    def __init__(self, codec: Codec, holds: Holds, upgrade: Callable[[FormerState], FormerState]) -> None:
        super().__init__(codec, holds)
        self._upgrade = upgrade
        self._former: FormerState | None = None

    def bind(self, stored: StoredState | None) -> None:
        """Switch to the state of another key, or back to an earlier state of the same key."""
        if isinstance(stored, FormerState):
            self._former = stored
            super().bind(stored.upgraded)
        else:
            self._former = None
            super().bind(stored)

    def get(self, default: Any = None) -> Any:
        """The state, upgraded if earlier code wrote it, or ``default`` if the key has none."""
        former = self._former
        if former is not None and former.upgraded is None:
            self._former = former = self._upgrade(former)
            self._encoded = former.upgraded
        return super().get(default)

    def set(self, value: Any) -> None:
        """Replace the state; a former one need not be upgraded for that."""
        super().set(value)
        self._former = None

    def delete(self) -> None:
        """Delete the state and all its holds."""
        super().delete()
        self._former = None

    def open(self, make: Callable[[Any], OpenStateT]) -> OpenStateT:
        """The upgraded state as an object that is changed in place."""
        opened = super().open(make)
        self._former = None
        return opened

    def settle(self) -> StoredState | None:
        """The current value, encoded; a former state that code has at most read stays one."""
        return super().settle() if self._former is None else self._former
