"""A hot key, a million keys, a row of 64 MiB, and a pipeline that changes hands under load (R23)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.statestore.store import Store
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered

pytestmark = [pytest.mark.fault, pytest.mark.slow]

MIB: Final = 1 << 20


class Wide(Computation):
    """Keeps 64 MiB of text per key, and its record."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set({"n": record.value["n"], "text": "x" * (64 * MIB)})


def test_hot_key_keeps_all_records_in_order(tmp_path: Path, fault_report: FaultReport) -> None:
    LocalRunner(tmp_path / "pond", progress=False).run(
        ledger_pipeline(), {ROWS: numbered(range(10_000), keys=1)}
    )

    with Store.open(tmp_path / "pond", read_only=True) as store:
        assert ledger_of(store) == {"k0": list(range(10_000))}
    fault_report.fault("R23")


def test_million_keys_have_a_row_each(tmp_path: Path, fault_report: FaultReport) -> None:
    keys = 1_000_000
    LocalRunner(tmp_path / "pond", progress=False).run(
        ledger_pipeline(), {ROWS: numbered(range(keys), keys=keys)}
    )

    with Store.open(tmp_path / "pond", read_only=True) as store:
        rows = store.rows_view(LEDGER).to_arrow()
    assert rows.num_rows == keys
    assert pc.count_distinct(rows.column("state")).as_py() == keys
    fault_report.fault("R23")


def test_row_of_64_mib_is_replaced_and_read_again(tmp_path: Path, fault_report: FaultReport) -> None:
    for number in range(2):
        with LocalRunner(tmp_path / "pond", progress=False).start(ledger_pipeline(computation=Wide())) as run:
            run.inject(ROWS, numbered([number], keys=1)).wait()

    with Store.open(tmp_path / "pond", read_only=True) as store:
        (state,) = store.rows_view(LEDGER).to_arrow().column("state").to_pylist()
    assert len(state) > 64 * MIB
    assert state.startswith('{"n":1,')
    fault_report.fault("R23")


def test_pipeline_that_changes_hands_under_load_counts_once(
    tmp_path: Path, fault_report: FaultReport
) -> None:
    records = numbered(range(1_000), keys=50)
    with ExitStack() as opened:
        for owner in range(5):
            store = opened.enter_context(Store.open(tmp_path / "pond"))
            run = LocalRunner(store, progress=False, intervals=4).start(ledger_pipeline())
            opened.callback(run.abandon)
            # A new owner repeats records possibly not acknowledged to its predecessor.
            receipts = [
                run.inject(ROWS, [record])
                for record in records[max(200 * owner - 200, 0) : 200 * owner + 200]
            ]
            if owner < 4:
                receipts[len(receipts) // 2].wait()
        receipts[-1].wait()

    with Store.open(tmp_path / "pond", read_only=True) as store:
        numbers = sorted(number for value in ledger_of(store).values() for number in value)
    assert numbers == list(range(1_000))
    fault_report.fault("R23")
