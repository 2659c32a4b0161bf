"""Garbage collection under any interleaving: no needed file is removed (I10; races of R17).

A pipeline, slow readers, savepoints, a slow writer, two collectors and compactions act at random, collectors
die at any of their calls, others act between any two, and wall clocks jump. An oracle remembers the files of
every version, and after each step checks the ones that a reader, savepoint or retention still needs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.collectors import Owned, Retention, collect_garbage
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.catalog.catalog import READER_LIFETIME_MS, Catalog
from millpond.statestore.errors import ConflictError, MillpondError
from millpond.statestore.history.savepoint import drop_savepoint, make_savepoint, open_savepoints
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import Objects, TableVersion
from millpond.statestore.view import RowsView
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request, superstep_request

_IS_LONG = os.environ.get("HYPOTHESIS_PROFILE", "dev") != "dev"
SECOND = 1_000_000
MINUTE_MS = 60_000
POLICY = UpkeepPolicy(compaction=CompactionPolicy(fan_in=3, files_max=5), collect_every=10**9)
ALIEN = Interval("alien")
LETTERS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4)


class First(Computation):
    """Counts and forwards a key's records, and deletes the state at every fifth."""

    def process_record(self, context, record):
        count = (context.state.get() or 0) + 1
        context.produce("seen", {"key": record.key})
        context.state.set(count) if count % 5 else context.state.delete()


class Second(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


class KilledError(Exception):
    """The death of the process."""


class Between:
    """`Objects` that run an action, perhaps a death, before a chosen call."""

    def __init__(self, inner: Objects, at: int, action: Callable[[], object]) -> None:
        self._inner, self._left, self._action = inner, at, action

    @property
    def url(self) -> str:
        return self._inner.url

    def _call(self, name: str, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self._action()
        return getattr(self._inner, name)(*arguments)

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._call("put_if_absent", path, data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        self._call("put_unsynced", path, data)

    def sync(self, paths: Any = ()) -> None:
        self._inner.sync(paths)

    def put(self, path: str, data: bytes) -> None:
        self._call("put", path, data)

    def get(self, path: str) -> bytes:
        return bytes(self._call("get", path))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        return list(self._call("list", prefix, start_after))

    def delete(self, paths: Iterable[str]) -> None:
        # Delete one file per call, so that the collector may die between any two.
        for path in paths:
            self._call("delete", [path])


def own_files(snapshot: Snapshot) -> frozenset[str]:
    """Return the live files, except the slow writer's."""
    return frozenset(file.path for file in snapshot.files if file.computation != ALIEN.computation)


class Garbage(RuleBasedStateMachine):
    """The readers and writers of a store."""

    @initialize(keep=st.sampled_from([0, 3 * MINUTE_MS]))
    def open(self, keep: int) -> None:
        self.disk, self.registry, self.clock = MemoryObjects(), MemoryRegistry(), ManualClock()
        self.keep_ms, self.opened, self.second, self.ids = keep, 0, 0, 0
        self.catalog = Catalog.open("sqlite://", self.clock)
        self.seen: Counter[str] = Counter()
        self.files: dict[int, frozenset[str]] = {}
        self.replaced_ms: dict[int, int] = {}
        self.readers: list[tuple[str, int, RowsView, object, int]] = []
        self.savepoints: dict[str, tuple[int, object]] = {}
        self.horizon, self.has_jumped = 0, False
        self.start()
        self.note()

    def start(self) -> None:
        self.opened += 1
        self.store = Store.in_memory(
            objects=self.disk, registry=self.registry, clock=self.clock, rng=SeededRng(self.opened)
        )
        pipeline = EnginePipeline("p")
        pipeline.inject("in", key="k", at="at", id="id").apply(First(), name="first", produces="seen").apply(
            Second(), name="second", key="key"
        )
        runner = LocalRunner(
            self.store, clock=self.clock, rng=SeededRng("seed"), progress=False, upkeep=POLICY
        )
        self.run = runner.start(pipeline, stepping=True)

    def note(self) -> None:
        """Record the new commits: their files, and when each version was replaced."""
        history = load(Log(self.disk))
        for version in range(max(self.files, default=history.version - 1) + 1, history.version + 1):
            snapshot = load(Log(self.disk), TableVersion(version))
            self.files[version] = own_files(snapshot)
            self.replaced_ms[version - 1] = self.clock.now_us() // 1_000

    def rows(self, view: RowsView) -> object:
        return view.to_arrow().to_pylist()

    # -- the pipeline ----------------------------------------------------------------------

    @rule(letters=LETTERS, again=st.booleans())
    def step(self, letters: list[str], again: bool) -> None:
        self.second += 1
        self.clock.advance_ms(1_000)
        rows = []
        for letter in letters:
            self.ids += 1
            self.seen[letter] += 1
            rows.append({"k": letter, "at": self.second * SECOND, "id": f"{letter}{self.ids}"})
        # A duplicate within the slack must not count, whatever was compacted since.
        self.run.inject("in", rows + (rows if again else []))
        self.run.step()
        self.note()

    @rule()
    def restart(self) -> None:
        self.run.stop()
        self.store.close()
        self.start()
        self.note()

    @rule(minutes=st.integers(1, 20))
    def wait(self, minutes: int) -> None:
        self.clock.advance_ms(minutes * MINUTE_MS)

    @rule(hours=st.sampled_from([-1, 1, 24]))
    def jump(self, hours: int) -> None:
        self.clock.jump_ms(hours * 60 * MINUTE_MS)
        self.has_jumped = True

    # -- readers ---------------------------------------------------------------------------

    @rule(back=st.integers(0, 8))
    def begin_to_read(self, back: int) -> None:
        version = TableVersion(max(load(Log(self.disk)).version - back, 0))
        holder = f"reader{len(self.readers)}-{self.opened}-{self.second}-{back}"
        try:
            published = self.catalog.publish_horizon(holder, version, lifetime_ms=READER_LIFETIME_MS)
        except ConflictError:
            return
        view = RowsView.of(load(Log(self.disk), version), self.disk, "second")
        self.readers.append((holder, version, view, self.rows(view), published.expires_us or 0))

    @precondition(lambda self: self.readers)
    @rule(index=st.integers(0, 99), ends=st.booleans())
    def read(self, index: int, ends: bool) -> None:
        """Check that a slow reader's answer is unchanged until its lease on the version expires."""
        holder, _, view, expected, expires_us = self.readers[index % len(self.readers)]
        try:
            assert self.rows(view) == expected
        except MillpondError:
            assert expires_us <= self.clock.now_us() or self.has_jumped
        if ends:
            self.catalog.withdraw_horizon(holder)
            del self.readers[index % len(self.readers)]

    @precondition(lambda self: len(self.savepoints) < 3)
    @rule(back=st.sampled_from([0, 0, 1, 3, 9]))
    def save(self, back: int) -> None:
        name = next(name for name in "abc" if name not in self.savepoints)
        version = TableVersion(max(load(Log(self.disk)).version - back, 0))
        is_needed = version in self.needed()
        # Use another committer, as the command line does.
        writer = Committer(Log(self.disk), self.clock, SeededRng(name), self.store.leases.high_water)
        try:
            make_savepoint(writer, Log(self.disk), name, version)
        except ConflictError:
            assert not is_needed
            assert not any(known.name == name for known in open_savepoints(writer.refresh().txns))
        else:
            view = RowsView.of(load(Log(self.disk), version), self.disk, "second")
            self.savepoints[name] = version, self.rows(view)
        self.store.committer.refresh()
        self.note()

    @precondition(lambda self: self.savepoints)
    @rule()
    def release(self) -> None:
        name, (version, expected) = self.savepoints.popitem()
        view = RowsView.of(load(Log(self.disk), TableVersion(version)), self.disk, "second")
        assert self.rows(view) == expected
        drop_savepoint(self.store.committer, name)
        self.note()

    # -- collectors ------------------------------------------------------------------------

    def collect(self, objects: Objects | None = None, *, at_once: bool = False) -> None:
        coordinator = self.run._worker.coordinator
        owned = {
            held.interval: Owned(held.fence.sequencer, coordinator.superstep)
            for held in coordinator.ownership.owned.values()
        }
        collected = collect_garbage(
            objects or self.disk,
            self.catalog,
            self.clock,
            announce=None,
            retention=Retention(keep_ms=self.keep_ms, checkpoint_every=2),
            owned=owned,
            at_once=at_once,
        )
        self.horizon = max(self.horizon, collected.horizon)

    @rule(at_once=st.booleans())
    def collect_alone(self, at_once: bool) -> None:
        self.collect(at_once=at_once)

    @rule(at=st.integers(1, 60), at_once=st.booleans())
    def collect_and_die(self, at: int, at_once: bool) -> None:
        def die() -> None:
            raise KilledError

        try:
            self.collect(Between(self.disk, at, die), at_once=at_once)
        except KilledError:
            self.note()

    @rule(at=st.integers(1, 40), back=st.integers(0, 8), letters=LETTERS, at_once=st.booleans())
    def collect_while_others_act(self, at: int, back: int, letters: list[str], at_once: bool) -> None:
        def act() -> None:
            self.begin_to_read(back)
            self.step(letters, again=True)
            self.collect()

        try:
            self.collect(Between(self.disk, at, act), at_once=at_once)
        except ConflictError:
            # The other collector has published a later horizon than this one computed.
            return

    @rule(at=st.integers(1, 8), steps=st.integers(1, 6), hours=st.sampled_from([0, 24]))
    def commit_slowly(self, at: int, steps: int, hours: int) -> None:
        """Pause a writer at any call of its commit while the table advances and its log is truncated."""

        def go_on() -> None:
            for _ in range(steps):
                self.step(["a"], again=False)
            self.clock.jump_ms(hours * 60 * MINUTE_MS)
            self.has_jumped |= hours > 0
            self.collect()

        sequencer = self.number = getattr(self, "number", 0) + 1
        water = MemoryLeases(self.registry, self.clock, writer_id="slow").high_water
        slow = Committer(
            Log(Between(self.disk, 6 + at, go_on)), self.clock, SeededRng(f"slow{sequencer}"), water
        )
        try:
            slow.commit(fence_request(sequencer, ALIEN))
            request = superstep_request(sequencer, 1, ALIEN)
            committed = slow.commit(request)
        except ConflictError:
            self.note()
            return
        self.store.committer.refresh()
        newest = load(Log(self.disk))
        # An acknowledged commit is part of the table that readers see (fact F4).
        assert committed.version <= newest.version
        fence = newest.fence_of(ALIEN)
        assert fence is not None
        assert (fence.sequencer, fence.commit_number) >= (sequencer, 1)
        self.note()

    # -- what must hold --------------------------------------------------------------------

    def needed(self) -> set[int]:
        """Return the versions needed by the newest state, a savepoint, a reader or the retention."""
        newest = load(Log(self.disk))
        needed = {int(newest.version), *(version for version, _ in self.savepoints.values())}
        now_us = self.clock.now_us()
        if not self.has_jumped:
            needed |= {version for _, version, _, _, expires_us in self.readers if expires_us > now_us}
            limit_ms = now_us // 1_000 - self.keep_ms
            needed |= {version for version, at_ms in self.replaced_ms.items() if at_ms > limit_ms}
        return needed

    @invariant()
    def nothing_that_is_needed_is_gone(self) -> None:
        newest = load(Log(self.disk))
        on_disk = set(self.disk.list(""))
        for version in self.needed():
            gone = self.files.get(version, frozenset()) - on_disk
            assert not gone, f"version {version} is needed, and {sorted(gone)} are gone"
        assert own_files(newest) <= on_disk

    @invariant()
    def every_record_has_counted_once(self) -> None:
        view = self.store.rows_view("second").to_arrow()
        counted = Counter(
            dict(zip(view.column("key").to_pylist(), map(int, view.column("state").to_pylist()), strict=True))
        )
        # Productions of the last superstep are not delivered yet.
        waiting = sum((self.seen - counted).values())
        assert not counted - self.seen
        assert waiting <= self.run._worker.coordinator.pending.count

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.run_until_quiet()
        self.every_record_has_counted_once()
        for version, expected in self.savepoints.values():
            view = RowsView.of(load(Log(self.disk), TableVersion(version)), self.disk, "second")
            assert self.rows(view) == expected
        assert [finding for finding in verify_store(self.disk).findings if "alien" not in finding.path] == []
        self.run.stop()
        self.catalog.close()


TestGarbage = Garbage.TestCase
TestGarbage.settings = settings(
    max_examples=200 if _IS_LONG else 6,
    stateful_step_count=40 if _IS_LONG else 14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
