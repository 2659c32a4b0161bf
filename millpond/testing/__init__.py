"""Tools for the tests of pipelines: clocks and leases that a test controls, fakes, transcripts, and the simulator."""

from millpond.executor.sinks.sink import RecordingSink as RecordingSink
from millpond.statestore.leases.memory import MemoryLeases as MemoryLeases
from millpond.statestore.leases.memory import MemoryRegistry as MemoryRegistry
from millpond.testing.fixtures.determinism import ManualClock as ManualClock
from millpond.testing.fixtures.determinism import SeededRng as SeededRng
