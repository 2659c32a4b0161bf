"""Arguments that Python would take for another meaning: every public call refuses them by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.statestore.errors import InvalidError

Call = Callable[..., Any]


def windowed() -> mp.WindowedStream:
    return mp.Pipeline("p").inject("in", key="k", at="t").window(mp.FixedWindows("1h"))


def stream(method: str, **options: Any) -> Any:
    return getattr(windowed().stream, method)(**{"name": "c", **options})


def windows(method: str, **options: Any) -> Any:
    return getattr(windowed(), method)(**{"name": "c", **options})


def declare(**attributes: Any) -> Any:
    return windowed().stream.apply(type("Code", (mp.Computation,), attributes)(), name="c")


def local(**options: Any) -> Any:
    return mp.LocalRunner("nowhere", **options)


def spark(**options: Any) -> Any:
    return mp.SparkRunner("nowhere", **options)


def in_memory(method: str, **options: Any) -> Any:
    with mp.Store.in_memory() as store:
        return getattr(store, method)(**options)


def run(method: str, **options: Any) -> Any:
    with mp.Store.in_memory() as store:
        runner = mp.LocalRunner(store, progress=False)
        return getattr(runner, method)(windowed().combine(mp.Count(), name="c").pipeline, **options)


COMPUTE: Mapping[str, Any] = {"combine": mp.Count()}
FUNCTION: Mapping[str, Any] = {"function": len}

WRONG: Mapping[str, list[Any]] = {
    "flag": ["no", "", 0, 1, None, []],
    "count": ["5", True, 1.5, math.nan, math.inf, -1, [], int],
    "number": ["5", True, math.nan, -1, None],
    "function": ["upper", "", 5, math.nan, []],
    "key": [5, True, "", [], ["a", "a"], [1], b"k"],
    "mapping": ["no", 5, ["a"], dict],
    "upkeep": [mp.UpkeepPolicy, True, "1h", {}],
    "compaction": [mp.CompactionPolicy, None, True, 8],
    "balance": [mp.BalancePolicy, True, {}],
    "dead_letter_limit": [mp.DeadLetterLimit, 0.5, True],
    "zookeeper_security": [mp.ZooKeeperSecurity, True, {"user": "a"}],
    "codec": [mp.JsonCodec, "json", None],
    "percentile": [0.99, 0, -1, True, 101, math.nan, "99"],
}

CASES: list[tuple[str, str, Call]] = [
    ("flag", "create", partial(mp.Store.open, "nowhere")),
    ("flag", "read_only", partial(mp.Store.open, "nowhere")),
    ("flag", "check_mark", partial(mp.Store.open, "nowhere")),
    ("flag", "allow_files", partial(in_memory, "sql")),
    ("flag", "finish", partial(run, "run", inputs={"in": []})),
    ("flag", "stepping", partial(run, "start")),
    ("flag", "background", mp.UpkeepPolicy),
    ("flag", "tls", mp.ZooKeeperSecurity),
    ("flag", "check_hostname", mp.ZooKeeperSecurity),
    ("flag", "accept_ended", local),
    ("flag", "accept_checkpoint", spark),
    ("flag", "in_order_of_arrival", declare),
    ("flag", "in_micro_batches", declare),
    ("flag", "holds_watermark", declare),
    ("count", "version", partial(in_memory, "snapshot")),
    ("count", "every", mp.BalancePolicy),
    ("count", "intervals_max", mp.BalancePolicy),
    ("count", "fan_in", mp.CompactionPolicy),
    ("count", "files_max", mp.CompactionPolicy),
    ("count", "small_bytes", mp.CompactionPolicy),
    ("count", "memory_bytes_max", mp.CompactionPolicy),
    ("count", "collect_every", mp.UpkeepPolicy),
    ("count", "records_min", mp.DeadLetterLimit),
    ("count", "records_min", partial(mp.types.ObservedPercentile, 99)),
    ("count", "intervals", local),
    ("count", "cache_mib", local),
    ("count", "disk_mib", spark),
    ("count", "intake_records_max", local),
    ("count", "precision", mp.windows.ApproximateCountDistinct),
    ("number", "hot", mp.BalancePolicy),
    ("number", "cold", mp.BalancePolicy),
    ("number", "garbage_ratio", mp.CompactionPolicy),
    ("number", "share", mp.DeadLetterLimit),
    ("function", "function", partial(stream, "map")),
    ("function", "function", partial(stream, "flat_map")),
    ("function", "function", partial(stream, "with_timestamps")),
    ("function", "function", partial(windows, "process_windows")),
    ("function", "result", partial(windows, "combine", **COMPUTE)),
    ("function", "among", partial(windows, "top", count=3, **COMPUTE)),
    ("function", "function", mp.windows.ShouldEmit),
    ("function", "merge", partial(mp.windows.ShouldEmit, max)),
    ("function", "upgrade_state", partial(mp.windows.WindowingStrategy, state_version=1)),
    ("key", "key", partial(stream, "map", **FUNCTION)),
    ("key", "key", partial(stream, "flat_map", **FUNCTION)),
    ("key", "key", partial(stream, "with_timestamps", **FUNCTION)),
    ("key", "key", partial(windows, "combine", **COMPUTE)),
    ("key", "key", partial(windows, "process_windows", **FUNCTION)),
    ("mapping", "storage_options", partial(mp.Store.open, "nowhere")),
    ("mapping", "storage_options", partial(mp.DeltaSink, "nowhere")),
    ("mapping", "storage_options", local),
    ("upkeep", "upkeep", local),
    ("upkeep", "upkeep", spark),
    ("compaction", "compaction", mp.UpkeepPolicy),
    ("balance", "balance", local),
    ("dead_letter_limit", "dead_letter_limit", local),
    ("zookeeper_security", "zookeeper_security", local),
    ("codec", "codec", declare),
    ("percentile", "percentile", mp.windows.WatermarkPercentile),
    ("percentile", "percentile", mp.types.ObservedPercentile),
    ("percentile", "percentiles", lambda percentiles: declare(percentiles=[percentiles])),
]


@pytest.mark.parametrize(
    ("kind", "argument", "call"), CASES, ids=[f"{argument}-{n}" for n, (_, argument, _) in enumerate(CASES)]
)
def test_argument_of_another_kind_is_refused_by_name(
    kind: str, argument: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in WRONG[kind]:
        with pytest.raises(InvalidError, match=argument.rstrip("s")):
            call(**{argument: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "value"),
    [
        *product(["hold", "release", "set_timer", "delete_timer", "timer_at"], [5, None, b"t"]),
        ("hold", "\ud800"),
        ("set_timer", "\ud800"),
    ],
)
def test_tag_that_is_no_text_fails_the_record(method: str, value: Any) -> None:
    """The run once ended with an error of Arrow when it wrote the row."""

    class Code(mp.Computation):
        def process_record(self, context: mp.Context, record: mp.Record) -> None:
            owner = context.state if method in ("hold", "release") else context
            at = (record.at + 1,) if method in ("hold", "set_timer") else ()
            getattr(owner, method)(*at, tag=value)

    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Code(), name="c", on_error="stop")
    with (
        mp.Store.in_memory() as store,
        pytest.raises(InvalidError, match=r"tag (must be text|needs a UTF-8 form)"),
    ):
        mp.LocalRunner(store, progress=False).run(pipeline, {"in": [{"k": "a", "t": 1_700_000_000_000_000}]})
