"""Changes of the state's version at any step, against an oracle that upgrades all states at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.codec import Codec, JsonCodec, MsgpackCodec
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

NEWEST: Final = 3
CODECS: Final[dict[int, Codec]] = {0: JsonCodec(), 1: JsonCodec(), 2: MsgpackCodec(), 3: JsonCodec()}
SECOND_US: Final = 1_000_000


class Counter(Computation):
    """A sum whose form depends on the version: a number, a dict, a pair in another codec, text."""

    def __init__(self, version: int) -> None:
        self.state_version = version
        self.codec = CODECS[version]
        self.codecs = {earlier: CODECS[earlier] for earlier in range(version)}

    def upgrade_state(self, state: Any, version: int) -> Any:
        """Convert step by step to the form of this version."""
        for step in range(version, self.state_version):
            if step == 0:
                state = {"sum": state}
            elif step == 1:
                state = [state["sum"], "since 2"]
            else:
                state = f"{state[0]}"
        return state

    def _sum(self, state: Any) -> int:
        if state is None:
            return 0
        return int(
            state["sum"] if self.state_version == 1 else state[0] if self.state_version == 2 else state
        )

    def _form(self, number: int) -> Any:
        return [number, {"sum": number}, [number, "since 2"], f"{number}"][self.state_version]

    def process_record(self, context: Context, record: Record) -> None:
        kind, amount = record.value["kind"], record.value["amount"]
        match kind:
            case "add":
                context.state.set(self._form(self._sum(context.state.get()) + amount))
            case "replace":
                context.state.set(self._form(amount))
            case "delete":
                context.state.delete()
            case "tell":
                context.produce("told", self._sum(context.state.get()))
            case "look":
                context.state.get()
            case "later":
                context.set_timer(record.at + amount * SECOND_US, tag="later")
            case "fail":
                context.state.set(self._form(self._sum(context.state.get()) + amount))
                raise ValueError(amount)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set(self._form(self._sum(context.state.get()) + 1_000))


class Told(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value])


@dataclass(frozen=True, slots=True)
class Step:
    """A bundle, and the version of the code that processes it."""

    records: tuple[dict[str, Any], ...]
    raises_to: int | None
    restarts: bool


_RECORDS: Final = st.fixed_dictionaries(
    {
        "key": st.sampled_from("abcd"),
        "kind": st.sampled_from(["add", "add", "replace", "delete", "tell", "look", "later", "fail"]),
        "amount": st.integers(1, 9),
    }
)
_STEPS: Final = st.builds(
    Step,
    records=st.lists(_RECORDS, max_size=6).map(tuple),
    raises_to=st.none() | st.integers(0, NEWEST),
    restarts=st.booleans(),
)


@dataclass
class Oracle:
    """Numbers in a dict, which no change of code affects."""

    sums: dict[str, int] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)

    def fire(self, watermark: int) -> None:
        for key in [key for key, at in self.timers.items() if at <= watermark]:
            del self.timers[key]
            self.sums[key] = self.sums.get(key, 0) + 1_000

    def take(self, key: str, kind: str, amount: int, at: int) -> None:
        match kind:
            case "add":
                self.sums[key] = self.sums.get(key, 0) + amount
            case "replace":
                self.sums[key] = amount
            case "delete":
                self.sums.pop(key, None)
            case "tell":
                self.told.setdefault(key, []).append(self.sums.get(key, 0))
            case "later":
                self.timers[key] = at + amount * SECOND_US


class Player:
    """A store in memory, and a pipeline whose code changes its version."""

    def __init__(self, *, cache_mib: int, with_ids: bool) -> None:
        self.disk, self.registry, self.clock = MemoryObjects(), MemoryRegistry(), ManualClock()
        self.cache_mib, self.with_ids, self.version, self.opened = cache_mib, with_ids, 0, 0
        self.start()

    def start(self) -> None:
        self.opened += 1
        rng = SeededRng(self.opened)
        self.store = Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=rng)
        pipeline = EnginePipeline("p")
        stream = pipeline.inject("in", key="key", at="at", id="id" if self.with_ids else None)
        stream.apply(Counter(self.version), name="sums", produces=["told"], retries=1)
        pipeline.stream("told").apply(Told(), name="told_sums", produces=["nothing"])
        upkeep = UpkeepPolicy(compaction=CompactionPolicy(fan_in=2, files_max=3), collect_every=3)
        runner = LocalRunner(
            self.store,
            clock=self.clock,
            rng=SeededRng(f"r{self.opened}"),
            progress=False,
            dead_letter_limit=None,
            intervals=2,
            upkeep=upkeep,
            cache_mib=self.cache_mib,
        )
        self.run = runner.start(pipeline, stepping=True)

    def restart(self, version: int) -> None:
        self.run.stop()
        self.store.close()
        self.version = version
        self.start()

    def sums(self) -> dict[str, int]:
        """Return the numbers in the rows, each decoded by its version."""
        found = {}
        for row in self.store.rows_view("sums").to_arrow().to_pylist():
            version = row["state_version"]
            if version is None:
                continue
            assert version <= self.version
            codec = CODECS[version]
            state = codec.decode(row["state"] if codec.is_text else row["state_bytes"])
            found[row["key"]] = int(
                [lambda s: s, lambda s: s["sum"], lambda s: s[0], lambda s: s][version](state)
            )
        return found

    def told(self) -> dict[str, list[int]]:
        """Return the productions."""
        rows = self.store.rows_view("told_sums").to_arrow().to_pylist()
        return {row["key"]: JsonCodec().decode(row["state"]) for row in rows}


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=40
)
@given(
    steps=st.lists(_STEPS, min_size=1, max_size=12),
    cache_mib=st.sampled_from([0, 512]),
    with_ids=st.booleans(),
)
def test_versions_of_state_change_no_answer(steps: list[Step], cache_mib: int, with_ids: bool) -> None:
    """Rows have mixed versions, and are compacted and evicted."""
    player, oracle = Player(cache_mib=cache_mib, with_ids=with_ids), Oracle()
    number = 0
    for step in steps:
        version = max(player.version, step.raises_to or 0)
        if step.restarts or version > player.version:
            player.restart(version)
        rows = []
        for record in step.records:
            number += 1
            rows.append(
                {
                    "key": record["key"],
                    "at": number * SECOND_US,
                    "id": f"{number}",
                    "kind": record["kind"],
                    "amount": record["amount"],
                }
            )
        watermark = player.run.watermark("sums")
        if rows:
            # The bundle's watermark fires the timers that its records set.
            player.run.inject("in", rows)
        player.run.run_until_quiet()
        oracle.fire(watermark)
        for row in sorted(rows, key=lambda row: (row["key"], row["at"])):
            oracle.take(row["key"], row["kind"], row["amount"], row["at"])
        oracle.fire(player.run.watermark("sums"))

        assert player.sums() == oracle.sums
        assert player.told() == oracle.told
    assert verify_store(player.disk).findings == ()
