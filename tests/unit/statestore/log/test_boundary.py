"""The boundary of the log, published before deletions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millpond.statestore.errors import UnavailableError
from millpond.statestore.log.writer import BOUNDARY_FOLDER, log_boundary, publish_log_boundary
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.types import TableVersion
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects


@pytest.fixture(params=["memory", "folder"])
def objects(request, tmp_path):
    return MemoryObjects() if request.param == "memory" else open_objects(str(tmp_path))


def test_boundary_never_falls(objects):
    assert log_boundary(objects) == 0
    for version, stands in ((7, 7), (3, 7), (7, 7), (120, 120), (9, 120)):
        publish_log_boundary(objects, TableVersion(version))
        assert log_boundary(objects) == stands
        assert len(objects.list(BOUNDARY_FOLDER)) <= 2


def test_concurrent_cleanups_keep_higher_boundary():
    """The lower one was decided earlier and lands later."""
    disk = MemoryObjects()
    slow = FaultyObjects(disk)
    slow.interrupt("put_if_absent", lambda: publish_log_boundary(disk, TableVersion(50)))
    publish_log_boundary(slow, TableVersion(20))
    assert log_boundary(disk) == 50


def test_cleanups_may_publish_same_boundary():
    disk = MemoryObjects()
    slow = FaultyObjects(disk)
    slow.interrupt("put_if_absent", lambda: publish_log_boundary(disk, TableVersion(20)))
    publish_log_boundary(slow, TableVersion(20))
    assert log_boundary(disk) == 20


class ListsThenLooks(MemoryObjects):
    """A local folder's listing: names first, then a look at each file that still exists."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[Callable[[], None]] = []

    def list(self, prefix, start_after=None):
        names = super().list(prefix, start_after)
        if self.between:
            self.between.pop()()
        return [name for name in names if name in super(ListsThenLooks, self).list(prefix, start_after)]


def test_reader_of_rising_boundary_sees_old_or_new():
    disk = ListsThenLooks()
    publish_log_boundary(disk, TableVersion(10))
    publish_log_boundary(disk, TableVersion(20))
    disk.between.append(lambda: publish_log_boundary(disk, TableVersion(30)))
    assert log_boundary(disk) == 20
    assert log_boundary(disk) == 30


@pytest.mark.parametrize("operation", ["list", "put_if_absent", "delete"])
def test_cleanup_without_published_boundary_fails(operation):
    """It may delete nothing then."""
    disk = MemoryObjects()
    publish_log_boundary(disk, TableVersion(5))
    faulty = FaultyObjects(disk)
    faulty.plan(Fault.LOST, operation)
    with pytest.raises(UnavailableError):
        publish_log_boundary(faulty, TableVersion(6))
    assert log_boundary(disk) >= 5
