"""The engines side by side, and what each of them gives besides a sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from benchmarks.peers.loads import Load

Part = Literal["local", "spark"]

PARTS: Final[tuple[Part, ...]] = ("local", "spark")

LOADS: Final[dict[Part, tuple[Load, ...]]] = {
    "local": (Load(records=500_000, batch=50_000),),
    # Long enough that what the JVM still compiles is a small part.
    "spark": (Load(records=2_000_000, batch=50_000), Load(records=4_000_000, batch=500_000)),
}
"""The measured loads of each part."""

QUICK_LOADS: Final[dict[Part, tuple[Load, ...]]] = {
    "local": (Load(records=100_000, batch=50_000),),
    "spark": (Load(records=200_000, batch=50_000),),
}
"""The loads of a run that has little time."""

WARM_UPS: Final[dict[Part, Load]] = {
    "local": Load(records=20_000, batch=10_000),
    "spark": Load(records=500_000, batch=50_000),
}
"""The load that each engine runs first, so that neither imports nor a cold JVM are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gives:
    """Answers to the questions of `QUESTIONS`, in a few words each.

    Attributes:
        ids: whether a record that is sent again, with the same id, is dropped.
        commit: what becomes durable together, and what a second process can spoil.
        sql: whether SQL reads the state while the job runs.
        rewind: whether the job can continue from an older state.
    """

    ids: str
    commit: str
    sql: str
    rewind: str


QUESTIONS: Final = {
    "ids": "drops repeated ids",
    "commit": "commit",
    "sql": "state in SQL",
    "rewind": "rewind",
}
"""Headings of the fields of `Gives`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine under measurement.

    Attributes:
        name: its name in the figures.
        title: its name in tables.
        part: engines of one part are compared with each other.
        module: the module of this package that runs it.
        environment: the requirements that it is installed from; ``None``: this interpreter runs it.
        has_ids: whether the module can drop repeated ids.
        records: the number of records, where those of the load would take too long.
        gives: what it gives besides a sum.
    """

    name: str
    title: str
    part: Part
    module: str
    environment: str | None = None
    has_ids: bool = False
    records: int | None = None
    gives: Gives

    def load_of(self, load: Load) -> Load:
        """Return the load as this engine runs it."""
        return load if self.records is None else replace(load, records=self.records)


_MILLPOND: Final = Gives(
    ids="for three hours",
    commit="input, state and timers in one, fenced by a lease; the sink exactly once",
    sql="yes",
    rewind="yes",
)
_PATHWAY: Final = Gives(
    ids="no",
    commit="none in this run; with persistence, snapshots and at least once (exactly once in the paid edition)",
    sql="no",
    rewind="no",
)

ENGINES: Final = (
    Engine(
        name="millpond",
        title="Millpond",
        part="local",
        module="millpond_windows",
        has_ids=True,
        gives=_MILLPOND,
    ),
    Engine(
        name="millpond_without_upkeep",
        title="Millpond, upkeep off",
        part="local",
        module="millpond_windows_without_upkeep",
        has_ids=True,
        gives=_MILLPOND,
    ),
    Engine(
        name="pathway_windows",
        title="Pathway, windows",
        part="local",
        module="pathway_windows",
        environment="pathway",
        gives=_PATHWAY,
    ),
    Engine(
        name="pathway_groups",
        title="Pathway, groups without end",
        part="local",
        module="pathway_groups",
        environment="pathway",
        gives=_PATHWAY,
    ),
    Engine(
        name="bytewax",
        title="Bytewax, windows",
        part="local",
        module="bytewax_windows",
        environment="bytewax",
        records=100_000,
        gives=Gives(
            ids="no", commit="snapshots of the state; the output at least once", sql="no", rewind="no"
        ),
    ),
    Engine(
        name="polars",
        title="Polars, one group-by",
        part="local",
        module="polars_groups",
        environment="polars",
        has_ids=True,
        gives=Gives(ids="within one table", commit="none: no state", sql="no state", rewind="no state"),
    ),
    Engine(
        name="millpond_on_spark",
        title="Millpond on Spark",
        part="spark",
        module="millpond_windows_on_spark",
        has_ids=True,
        gives=_MILLPOND,
    ),
    Engine(
        name="spark_native",
        title="Spark's own windows",
        part="spark",
        module="spark_windows",
        has_ids=True,
        gives=Gives(
            ids="within the watermark",
            commit="state and offsets in a checkpoint that one query may use; the sink exactly once",
            sql="a checkpoint, read by a batch query",
            rewind="older batches can be read, not continued",
        ),
    ),
)
"""All engines; the first of each part is the one that the others are compared with."""
