from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

import millpond as mp
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX

_TALLY = mp.JsonPayload({"type": "object", "required": ["k"]})


class Tally(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.late])


def _pipeline(payload: mp.types.Payload = _TALLY) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="t", at_unit="us", payload=payload).apply(Tally(), name="tally")
    return pipeline


def _row(**value: Any) -> dict[str, bytes]:
    return {"value": orjson.dumps(value)}


def test_long_input_is_decoded_in_pieces_without_late_records(tmp_path: Path) -> None:
    """The decoded times are in reverse order."""
    count = BUNDLE_RECORDS_MAX + 5
    values = [
        orjson.dumps({"k": "a" if place % 1_000 else "b", "t": count - place}) for place in range(count)
    ]
    table = pa.table({"value": values})
    runner = mp.LocalRunner(tmp_path / "pond", progress=False)

    summary = runner.run(_pipeline(), {"in": table}, finish=False)
    again = runner.run(_pipeline(), {"in": table}, finish=False)

    assert (summary.run.records, summary.run.late, summary.supersteps > 1) == (count, 0, True)
    assert again.run.records == 0


def test_waiting_rows_are_refused_after_their_payload_changes(tmp_path: Path) -> None:
    """The rows were decoded under the former declaration."""
    with mp.LocalRunner(tmp_path / "pond", progress=False).start(_pipeline(), stepping=True) as run:
        kept = run.inject("in", [_row(k="a", t=1)])
        run.update(_pipeline(mp.JsonPayload({"type": "object", "required": ["k"]})))
        run.step()
        refused = run.inject("in", [_row(k="a", t=2)])
        run.update(_pipeline(mp.JsonPayload({"type": "object"})))
        run.step()

        assert kept.is_durable
        with pytest.raises(mp.InvalidError, match="inject them again"):
            refused.wait()


def test_failed_schema_lookup_fails_the_inject_call(tmp_path: Path) -> None:
    """The run accepts the next rows."""
    record = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "k", "type": "string"}, {"name": "t", "type": "long"}],
    }
    answers: list[Any] = [ConnectionError("no route"), record]

    def schema(number: int) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    payload = mp.AvroPayload(record, framing="confluent", schemas=schema)
    rows = [{"value": b"\x00\x00\x00\x00\x01\x02a\x02"}]
    with mp.LocalRunner(tmp_path / "pond", progress=False).start(_pipeline(payload)) as run:
        with pytest.raises(mp.UnavailableError, match="a schema could not be looked up"):
            run.inject("in", rows)
        run.inject("in", rows).wait()

        assert run.summary().run.records == 1


def test_changed_value_is_unchanged_for_other_consumers_and_retries(tmp_path: Path) -> None:
    class Spoil(mp.Computation):
        tries = 0

        def process_record(self, context: mp.Context, record: mp.Record) -> None:
            record.value["parts"][0]["n"] += 1
            Spoil.tries += 1
            if Spoil.tries == 1:
                raise ValueError("once more")
            context.state.set(record.value)

    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at="t", at_unit="us", payload=_TALLY)
    for name in ("one", "two"):
        stream.apply(Spoil(), name=name)
    mp.LocalRunner(tmp_path / "pond", progress=False).run(
        pipeline, {"in": [_row(k="a", t=1, parts=[{"n": 1}])]}
    )

    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        states = [store.rows_view(name).to_arrow()["state"].to_pylist() for name in ("one", "two")]
    assert [orjson.loads(state)["parts"] for (state,) in states] == [[{"n": 2}]] * 2
