"""The job as a pipeline: the three computations joined by their streams, and what flows out of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import millpond as mp
from examples.zeitgeist.computations import PATIENCE_MINUTES, Detector, HourModel, WindowCounter
from examples.zeitgeist.normal import MEASURES

_EARLY_MINUTES: Final = 60
"""No flight is reported this long before its schedule; the earliest left 43 minutes early."""

_DISORDER: Final = f"{PATIENCE_MINUTES + _EARLY_MINUTES}m"
"""
How far a flight that is not late by our own rule may come behind one that was scheduled later:
it leaves up to five hours late, and the other one up to an hour early.
"""

_PLACE: Final = [("origin", pa.string()), ("hour", pa.string())]
_EXPECTED: Final = pa.struct([("mean", pa.float64()), ("deviation", pa.float64())])

OUTPUTS: Final[Mapping[str, pa.Schema]] = {
    "counts": pa.schema(
        [
            *_PLACE,
            ("flights", pa.int64()),
            ("departed", pa.int64()),
            ("cancelled", pa.int64()),
            ("delay", pa.int64()),
        ]
    ),
    "expectations": pa.schema(
        [*_PLACE, *((name, _EXPECTED) for name in MEASURES)],
    ),
    "alerts": pa.schema(
        [
            *_PLACE,
            ("local_time", pa.string()),
            ("kind", pa.string()),
            ("measure", pa.string()),
            ("stage", pa.string()),
            ("value", pa.int64()),
            ("expected", pa.float64()),
            ("strength", pa.float64()),
        ]
    ),
}
"""The streams that are written to Delta tables of their own, with their columns."""


def zeitgeist(output: Path, detector: mp.Computation | None = None) -> mp.Pipeline:
    """The pipeline; its input is called ``flights``.

    Args:
        output: folder for its tables, one for each of `OUTPUTS`.
        detector: stands in for `Detector`.
    """
    pipeline = mp.Pipeline("zeitgeist")
    pipeline.inject("flights", key="origin", at="scheduled", id="id", watermark=mp.BoundedDisorder(_DISORDER))
    pipeline.add(
        WindowCounter(),
        name="window_counter",
        subscribes={"flights": None},
        produces=["progress", "counts"],
    )
    pipeline.add(
        HourModel(),
        name="hour_model",
        subscribes={"counts": _origin_and_hour},
        produces=["expectations"],
    )
    pipeline.add(
        detector or Detector(),
        name="detector",
        subscribes={"progress": "origin", "counts": "origin", "expectations": "origin"},
        produces=["alerts"],
    )
    for name, schema in OUTPUTS.items():
        pipeline.stream(name).sink(name, mp.DeltaSink(str(output / name), schema=schema))
    return pipeline


def _origin_and_hour(count: Mapping[str, Any]) -> str:
    return f"{count['origin']} {count['local_hour']:02d}"
