"""The stream of signals."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.executor.pipeline.nodes import SIGNALS
from tests.fixtures.panes import SeenPanes


def waiting(**options: Any) -> mp.Pipeline:
    """Declare a step that waits for a signal, and another that does not."""
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("in", key="k", at="at", at_unit="us", watermark=mp.ManualWatermark())
    windows = rows.window(mp.FixedWindows("10us"), trigger=mp.Repeatedly(mp.AfterSignal("show")))
    windows.combine(mp.Count(), name="counts", **options)
    rows.window(mp.FixedWindows("10us")).combine(mp.Count(), name="others")
    return pipeline


def test_only_steps_that_wait_for_a_signal_consume_the_stream() -> None:
    """The stream is not an input that a runner must be given."""
    topology = waiting().check(inputs=["in"])

    assert [consumer.computation.name for consumer in topology.consumers_of(SIGNALS)] == ["counts"]
    assert topology.injectors[SIGNALS].signals == {"counts": frozenset({"show"})}
    with pytest.raises(mp.InvalidError, match="no injector names this input"):
        waiting().check(inputs=["in", SIGNALS])


def test_name_of_the_signals_stream_is_reserved() -> None:
    with pytest.raises(mp.InvalidError, match="reserved"):
        mp.Pipeline("p").inject(SIGNALS, key="k", at="at")


def test_on_late_drop_does_not_drop_signals() -> None:
    node = waiting(on_late="drop").check().computations["counts"]

    assert node.drops_late("in")
    assert not node.drops_late(SIGNALS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hide", "a"), "no windowed step waits"),
        (("show", 1), "a signal's key must be text"),
        (("show", "a", (0, 10, 20)), "a window must be its start and end"),
        (("show", "a", (0.5, 10)), "a window must be its start and end"),
    ],
)
def test_malformed_signals_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(waiting(), stepping=True) as run:
        with pytest.raises(mp.InvalidError, match=message):
            run.signal(*arguments)
        with pytest.raises(mp.InvalidError, match="no windowed step waits"):
            run.signal("show", "a", step="others")
        with pytest.raises(mp.InvalidError, match="a signal's id must be text"):
            run.signal("show", "a", id=7)  # type: ignore[arg-type]


def test_co_group_can_wait_for_a_signal() -> None:
    pipeline, seen = mp.Pipeline("p"), SeenPanes()
    streams = {
        name: pipeline.inject(name, key="k", at="at", at_unit="us", watermark=mp.ManualWatermark())
        for name in ("left", "right")
    }
    strategy = mp.windows.WindowingStrategy(window_fn=mp.FixedWindows("10us"), trigger=mp.AfterSignal("show"))
    mp.co_group(streams, strategy, name="both", of={"left": "n", "right": "n"}).apply(seen, name="seen")
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for number, name in enumerate(streams):
            run.inject(name, [{"k": "a", "at": 1, "n": number}])
        run.signal("show", "a", (0, 10), step="both")
        run.run_until_quiet()

    assert seen.values == [{"left": [0], "right": [1]}]


def test_receipt_of_a_signal_becomes_durable() -> None:
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(waiting()) as run:
        run.inject("in", [{"k": "a", "at": 1}]).wait()
        receipt = run.signal("show", "a")

        assert receipt.wait()
        assert receipt.is_durable
