"""The boundary of the log: published before anything is deleted, and never falling."""

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


def test_it_rises_and_never_falls(objects):
    """A lower boundary changes nothing, a higher one takes the place of the last."""
    assert log_boundary(objects) == 0
    for version, stands in ((7, 7), (3, 7), (7, 7), (120, 120), (9, 120)):
        publish_log_boundary(objects, TableVersion(version))
        assert log_boundary(objects) == stands
        assert len(objects.list(BOUNDARY_FOLDER)) <= 2


def test_of_two_cleanups_at_once_the_higher_boundary_stays():
    """One that was decided earlier and lands later does not take the other one back."""
    disk = MemoryObjects()
    slow = FaultyObjects(disk)
    slow.interrupt("put_if_absent", lambda: publish_log_boundary(disk, TableVersion(50)))
    publish_log_boundary(slow, TableVersion(20))
    assert log_boundary(disk) == 50


def test_two_cleanups_may_publish_the_same_boundary():
    """One that lands second finds that what it has to say is said."""
    disk = MemoryObjects()
    slow = FaultyObjects(disk)
    slow.interrupt("put_if_absent", lambda: publish_log_boundary(disk, TableVersion(20)))
    publish_log_boundary(slow, TableVersion(20))
    assert log_boundary(disk) == 20


class ListsThenLooks(MemoryObjects):
    """As a local folder does: names first, then a look at each, and what is gone by then is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[Callable[[], None]] = []

    def list(self, prefix, start_after=None):
        names = super().list(prefix, start_after)
        if self.between:
            self.between.pop()()
        return [name for name in names if name in super(ListsThenLooks, self).list(prefix, start_after)]


def test_a_boundary_that_rises_while_it_is_read_is_not_overlooked():
    """A concurrent reader sees the old boundary or the new one, and never none."""
    disk = ListsThenLooks()
    publish_log_boundary(disk, TableVersion(10))
    publish_log_boundary(disk, TableVersion(20))
    disk.between.append(lambda: publish_log_boundary(disk, TableVersion(30)))
    assert log_boundary(disk) == 20
    assert log_boundary(disk) == 30


@pytest.mark.parametrize("operation", ["list", "put_if_absent", "delete"])
def test_a_cleanup_that_could_not_publish_fails(operation):
    """Nothing may be deleted then; whatever was published already stands."""
    disk = MemoryObjects()
    publish_log_boundary(disk, TableVersion(5))
    faulty = FaultyObjects(disk)
    faulty.plan(Fault.LOST, operation)
    with pytest.raises(UnavailableError):
        publish_log_boundary(faulty, TableVersion(6))
    assert log_boundary(disk) >= 5
