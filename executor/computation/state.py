"""
A key's persistent state, as user code holds it (MillWheel §4.4).

Values, not objects, are kept: what `State.set` is given is encoded once, at the end of
the key's turn in the bundle, and decoded once, at the first `State.get`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from millpond.executor.computation.holds import Holds
from millpond.executor.event_time.instants import Moment
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec

__all__ = ["Encoded", "KeyState", "State"]

Encoded: TypeAlias = str | bytes
"""State as the row keeps it: text or bytes, as the codec has it."""

_UNREAD: Final = object()

# Objects of these very types come back from a codec as they went in; anything else
# (a tuple, a user's class) goes through the codec at once, so that what a hook gets
# never depends on how records fell into bundles.
_ROUND_TRIP: Final = frozenset({dict, list, str, int, float, bool, type(None), bytes})


class State:
    """
    The state of the key at hand.
    """

    __slots__ = ("_codec", "_encoded", "_holds", "_is_live", "_value")

    def __init__(self, codec: Codec, holds: Holds) -> None:
        self._codec = codec
        self._holds = holds
        self._encoded: Encoded | None = None
        self._value: Any = _UNREAD
        self._is_live = False

    def get(self, default: Any = None) -> Any:
        """
        The state, or ``default`` when the key has none.

        The object may be changed, but only `set` makes the change count.
        """
        value = self._value
        if value is _UNREAD:
            if self._encoded is None:
                return default
            value = self._value = self._codec.decode(self._encoded)
        return value

    def set(self, value: Any) -> None:
        """
        Replace the state.

        Until the key's turn in the bundle ends, `get` gives this very object: it costs nothing, and
        asks two things. The object must not be changed any more without setting it again. And a
        container must hold what the codec gives back, a list rather than a tuple (a tuple that is the
        state itself is taken care of), or what `get` gives depends on how records fell into bundles.

        A value that the codec refuses fails the record or timer at hand, when its hook or
        the key's turn ends.
        """
        self._value = value
        self._is_live = True
        if type(value) not in _ROUND_TRIP:
            self.settle()

    def delete(self) -> None:
        """
        Forget the state and all that it holds; `get` gives its default from here on.
        """
        self._holds.release_all()
        self._encoded = None
        self._value = _UNREAD
        self._is_live = False

    def hold(self, at: Moment, tag: str = "") -> None:
        """
        Keep the computation's output watermark from passing ``at``, until it is released.

        The key may produce at a time that it holds, however late its input is by then. Nobody
        downstream sees his watermark pass it meanwhile, so a hold that is never released stops
        all that waits for event time there.

        Args:
            at: the time; not below the input's, or an older one that the key owes already.
            tag: the hold's name: setting it again replaces it.

        Raises:
            InvalidError: not a time, or too old.
        """
        self._holds.set(at, tag)

    def release(self, tag: str = "") -> None:
        """
        Let go of what ``tag`` holds, if it does.
        """
        self._holds.release(tag)

    @property
    def held_at(self) -> int | None:
        """
        The oldest time that the state holds; ``None``: it holds nothing.
        """
        return self._holds.oldest()

    def settle(self) -> Encoded | None:
        """
        Encode what was set; ``None`` when the key has no state.

        Raises:
            InvalidError: the codec refuses the value.
        """
        if self._is_live:
            self._encoded = _checked(self._codec, self._codec.encode(self._value))
            self._value = _UNREAD
            self._is_live = False
        return self._encoded


class KeyState(State):
    """
    The engine's side of `State`: one object for all keys of a bundle.
    """

    __slots__ = ()

    def bind(self, encoded: Encoded | None) -> None:
        """
        Become the state of another key, or go back to an earlier state of this one.
        """
        self._encoded = encoded
        self._value = _UNREAD
        self._is_live = False

    def end_hook(self) -> None:
        """
        Forget a value that was read and perhaps changed, but not set.
        """
        if not self._is_live:
            self._value = _UNREAD


def _checked(codec: Codec, encoded: Encoded) -> Encoded:
    if isinstance(encoded, str):
        fits = codec.is_text and (encoded.isascii() or _has_utf8(encoded))
    else:
        fits = isinstance(encoded, bytes) and not codec.is_text
    if fits:
        return encoded
    raise InvalidError(
        "a codec must give text that has a UTF-8 form, or bytes, as its is_text says",
        codec=codec.name,
        type=type(encoded).__name__,
    )


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
