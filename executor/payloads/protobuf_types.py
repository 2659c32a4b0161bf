"""Types of messages out of descriptor sets, in a pool of their own, so that two versions of a type do not meet."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError

from millpond.statestore.errors import InvalidError

_SHIPPED: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )
}
"""The files that Protobuf itself brings along, which a set may leave out."""


def message_type(descriptor_set: bytes, name: str) -> Any:
    """The descriptor of a type.

    Args:
        descriptor_set: a serialized ``FileDescriptorSet``.
        name: the full name of the type.

    Raises:
        InvalidError: the bytes are no descriptor set, a file in it lacks another one, or the type is in none.
    """
    files = _files(descriptor_set)
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in _in_order(files):
            pool.AddSerializedFile(file)
    except (TypeError, CycleError) as cause:
        raise InvalidError(
            "the descriptor set is not complete: make it with protoc --include_imports", reason=cause
        ) from cause
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError as cause:
        known = [
            f"{file.package}.{message.name}".removeprefix(".")
            for file in files.values()
            for message in file.message_type
        ]
        raise InvalidError(
            "the descriptor set has no such message: say its full name, with the package",
            type=name,
            types=known,
        ) from cause


def _files(descriptor_set: bytes) -> dict[str, Any]:
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file
    except DecodeError as cause:
        raise InvalidError(
            "this is no descriptor set: make it with protoc --include_imports --descriptor_set_out=FILE",
            reason=cause,
        ) from cause
    return {file.name: file for file in files}


def _in_order(files: dict[str, Any]) -> Iterable[bytes]:
    """The files, each after those that it imports."""
    sorter = TopologicalSorter({name: list(file.dependency) for name, file in files.items()})
    wanted = [*sorter.static_order()]
    extra = [name for name in wanted if name not in files and name in _SHIPPED]
    yield from (_SHIPPED[name] for name in extra)
    yield from (files[name].SerializeToString() for name in wanted if name in files)
