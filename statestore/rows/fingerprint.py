"""64-bit fingerprints of record ids, a whole Arrow column at a time.

A fingerprint depends only on the id's bytes: it is the same in every process, on
every machine, and for every memory layout of the column. Equal ids have equal
fingerprints; among n different ids a collision has a probability of about n²/2⁶⁵, so
equal fingerprints are a reason to compare the ids, never a proof.

Ids are hashed eight bytes at a time, all ids together; only ids longer than
256 bytes are hashed one at a time. They serve duplicate detection (MillWheel §6.1.1).
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError

Fingerprints: TypeAlias = npt.NDArray[np.uint64]
"""One 64-bit fingerprint per id."""

_Lengths: TypeAlias = npt.NDArray[np.int64]

_WORD_BYTES: Final = 8
_LONG_BYTES: Final = 256
_SEED: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)
# Keeps the first n bytes of a little-endian word.
_TAIL_MASKS: Final = np.array([(1 << 8 * kept) - 1 for kept in range(9)], dtype=np.uint64)


def fingerprints(ids: pa.Array | pa.ChunkedArray) -> Fingerprints:
    """The fingerprints of a column of ids.

    Example:
        >>> a, b = fingerprints(pa.array([b"x", b"y"]))
        >>> bool(a == b), bool(a == fingerprints(pa.array(["x"]))[0])
        (False, True)

    Args:
        ids: binary or string values of any Arrow layout, none of them null.

    Raises:
        InvalidError: an id is null, or the column holds neither bytes nor text.
    """
    if ids.null_count:
        raise InvalidError("a record id is null", nulls=ids.null_count)
    if isinstance(ids, pa.ChunkedArray):
        chunks = [_fingerprints(chunk) for chunk in ids.chunks]
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint64)
    return _fingerprints(ids)


def mix(values: Fingerprints) -> Fingerprints:
    """Spread each value over all 64 bits, one to one (Murmur's finaliser)."""
    mixed = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


def _fingerprints(ids: pa.Array) -> Fingerprints:
    data, offsets = _bytes_of(ids)
    lengths = np.diff(offsets)
    starts = offsets[:-1]
    hashes: Fingerprints = _SEED + lengths.astype(np.uint64) * _MULTIPLIER
    if not len(lengths):
        return hashes
    longest = int(lengths.max())
    if longest == int(lengths.min()) <= _LONG_BYTES:
        _absorb_equal(hashes, data, int(starts[0]), longest)
    else:
        _absorb_any(hashes, data, starts, lengths)
    return mix(hashes)


def _bytes_of(ids: pa.Array) -> tuple[npt.NDArray[np.uint8], _Lengths]:
    """The concatenated bytes of all ids, and the offsets at which each begins and ends."""
    if not (pa.types.is_binary(ids.type) or pa.types.is_string(ids.type)):
        ids = _as_binary(ids)
    _, offset_buffer, data_buffer = ids.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    return data, offsets.astype(np.int64)


def _as_binary(ids: pa.Array) -> pa.BinaryArray:
    if isinstance(ids, pa.DictionaryArray):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type) or pa.types.is_floating(ids.type):
        raise InvalidError("record ids are bytes or text", type=ids.type)
    try:
        return pc.cast(ids, pa.binary())
    except pa.ArrowException as error:
        raise InvalidError("record ids are bytes or text", type=ids.type) from error


def _absorb_equal(hashes: Fingerprints, data: npt.NDArray[np.uint8], start: int, length: int) -> None:
    """Hash ids of equal length as the rows of a matrix."""
    words = -(-length // _WORD_BYTES)
    padded = np.zeros((len(hashes), words * _WORD_BYTES), np.uint8)
    padded[:, :length] = data[start : start + length * len(hashes)].reshape(len(hashes), length)
    columns = padded.view("<u8")
    for word in range(words):
        hashes[:] = _step(hashes, columns[:, word])


def _absorb_any(
    hashes: Fingerprints, data: npt.NDArray[np.uint8], starts: _Lengths, lengths: _Lengths
) -> None:
    """Hash ids of different lengths: the n-th word of every id that is long enough, then the next word."""
    # A word may start at any byte; words that reach past the last id read zeros.
    readable = np.concatenate([data, np.zeros(_WORD_BYTES, np.uint8)])
    words = np.ndarray(len(data) + 1, "<u8", readable.data, strides=(1,))
    at_once = lengths <= _LONG_BYTES
    for position in range(0, min(int(lengths.max()), _LONG_BYTES), _WORD_BYTES):
        (active,) = np.nonzero(at_once & (lengths > position))
        kept = np.minimum(lengths[active] - position, _WORD_BYTES)
        hashes[active] = _step(hashes[active], words[starts[active] + position] & _TAIL_MASKS[kept])
    for row in np.flatnonzero(~at_once):
        content = data[starts[row] : starts[row] + lengths[row]].tobytes()
        hashes[row] = int.from_bytes(hashlib.blake2b(content, digest_size=_WORD_BYTES).digest(), "little")


def _step(hashes: Fingerprints, words: Fingerprints) -> Fingerprints:
    mixed = (hashes ^ words) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(32))
