"""What a computation declares of the versions of its state, looked at before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millpond.executor.computation.computation import Computation
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec

STATE_VERSION_MAX: Final = 2**31 - 1
"""The greatest number that the column has room for."""


def check_state_version(name: str, computation: Computation) -> None:
    """Refuse a version that is no number, and codecs of versions that are not earlier ones.

    Args:
        name: the computation's name, for the error.
        computation: the user's code.

    Raises:
        InvalidError: names the computation and what is wrong.
    """
    version, codecs = computation.state_version, computation.codecs
    if type(version) is not int or not 0 <= version <= STATE_VERSION_MAX:
        raise InvalidError(
            "state_version is a whole number of at least 0", computation=name, state_version=version
        )
    if not isinstance(codecs, Mapping):
        raise InvalidError(
            "codecs maps earlier state versions to their codecs", computation=name, type=type(codecs).__name__
        )
    for of_version, codec in codecs.items():
        if type(of_version) is not int or not 0 <= of_version < version:
            raise InvalidError(
                "codecs names a version that is not earlier than state_version",
                computation=name,
                version=of_version,
                state_version=version,
            )
        if not isinstance(codec, Codec):
            raise InvalidError(
                "this is no codec", computation=name, version=of_version, type=type(codec).__name__
            )
