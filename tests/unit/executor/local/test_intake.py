"""The intake's order, bounds, receipts and end."""

from __future__ import annotations

import threading

import pytest

from millpond.executor.local.intake import Arrival, Intake, Receipt, Taken, UpdateEntry
from millpond.executor.run.run import WatermarkUpdate
from millpond.statestore.errors import FencedError, UnavailableError


def arrival(count: int = 1, receipt: Receipt | None = None) -> Arrival:
    return Arrival(stream="s", rows=[{}] * count, count=count, receipt=receipt or Receipt())


def update(at: int = 5) -> UpdateEntry:
    return UpdateEntry(update=WatermarkUpdate(stream="s", at=at), receipt=Receipt())


def of(stream: str, count: int = 1) -> Arrival:
    return Arrival(stream=stream, rows=[{}] * count, count=count, receipt=Receipt())


class TestHoldingBack:
    def test_stream_held_back_keeps_its_entries_in_order(self):
        """The stream may not add records meanwhile."""
        intake = Intake(10)
        fast, slow, movement_of_fast = of("fast"), of("slow"), update()
        intake.put(fast, timeout_ms=0)
        intake.hold_back({"fast"})
        intake.put(slow, timeout_ms=0)
        held = UpdateEntry(update=WatermarkUpdate(stream="fast", at=5), receipt=Receipt())
        intake.put(held, timeout_ms=0)
        intake.put(movement_of_fast, timeout_ms=0)

        with pytest.raises(UnavailableError, match="skew limit"):
            intake.put(of("fast"), timeout_ms=0)
        first, nothing_more = intake.pop(10), (intake.pop(10), intake.pop(10))
        intake.hold_back(())

        assert first.arrivals == [slow]
        assert nothing_more[0].updates == [movement_of_fast]
        assert nothing_more[1] == Taken()
        assert intake.pop(10).arrivals == [fast]
        assert intake.pop(10).updates == [held]

    def test_records_held_back_take_no_room_from_other_streams(self):
        """Otherwise a fast stream would lock out the slow stream that holds it back."""
        intake = Intake(10)
        intake.put(of("fast", 10), timeout_ms=0)
        with pytest.raises(UnavailableError, match="full"):
            intake.put(of("slow"), timeout_ms=0)

        intake.hold_back({"fast"})

        intake.put(of("slow", 10), timeout_ms=0)

    def test_end_fails_receipts_of_streams_held_back(self):
        intake = Intake(10)
        waiting = of("fast")
        intake.put(waiting, timeout_ms=0)
        intake.hold_back({"fast"})

        intake.end(FencedError("over"))

        with pytest.raises(FencedError):
            waiting.receipt.wait("0s")


class TestOrder:
    def test_update_stays_between_the_arrivals_around_it(self):
        """A watermark must not overtake records that arrived before it."""
        intake = Intake(10)
        entries = [update(1), arrival(), arrival(), update(2), arrival()]
        for entry in entries:
            intake.put(entry, timeout_ms=0)

        first, second, third = intake.pop(10), intake.pop(10), intake.pop(10)

        assert (first.updates, first.arrivals) == (entries[:1], entries[1:3])
        assert (second.updates, second.arrivals) == (entries[3:4], entries[4:])
        assert third == Taken()

    def test_bundle_is_bounded_but_contains_at_least_one_arrival(self):
        """A larger arrival is taken alone."""
        intake = Intake(100)
        for count in (3, 3, 50):
            intake.put(arrival(count), timeout_ms=0)

        assert [a.count for a in intake.pop(5).arrivals] == [3]
        assert [a.count for a in intake.pop(5).arrivals] == [3]
        assert [a.count for a in intake.pop(5).arrivals] == [50]


class TestBounds:
    def test_full_intake_refuses_after_the_timeout(self):
        intake = Intake(5)
        intake.put(arrival(4), timeout_ms=0)

        with pytest.raises(UnavailableError, match="waiting=`4` allowed=`5`"):
            intake.put(arrival(2), timeout_ms=0)
        intake.put(arrival(1), timeout_ms=0)

    def test_arrival_larger_than_the_intake_is_accepted_when_empty(self):
        """Otherwise it could never be accepted."""
        intake = Intake(5)

        intake.put(arrival(50), timeout_ms=0)

        with pytest.raises(UnavailableError):
            intake.put(arrival(1), timeout_ms=0)

    def test_waiting_producer_continues_once_there_is_room(self):
        intake = Intake(1)
        intake.put(arrival(), timeout_ms=0)
        waiting = threading.Thread(target=intake.put, args=(arrival(),), kwargs={"timeout_ms": None})
        waiting.start()

        assert len(intake.pop(1).arrivals) == 1
        waiting.join(10)

        assert not waiting.is_alive()
        assert len(intake.pop(1).arrivals) == 1

    def test_full_intake_accepts_updates(self):
        intake = Intake(1)
        intake.put(arrival(), timeout_ms=0)

        intake.put(update(), timeout_ms=0)

        assert intake.pop(1).arrivals


class TestReceipt:
    def test_receipt_is_durable_after_its_last_piece(self):
        receipt = Receipt(2)
        receipt.settle()
        assert not receipt.wait(timeout="0s")
        receipt.settle()

        assert receipt.wait(timeout="0s")
        assert receipt.is_durable

    def test_receipt_without_rows_is_durable_at_once(self):
        assert Receipt(0).is_durable

    def test_failed_piece_fails_the_receipt(self):
        receipt = Receipt(2)
        receipt.settle(FencedError("gone"))
        receipt.settle()

        with pytest.raises(FencedError, match="gone"):
            receipt.wait()
        assert not receipt.is_durable


class TestEnd:
    def test_calls_after_the_end_raise_its_reason(self):
        intake, receipt = Intake(5), Receipt()
        intake.put(arrival(1, receipt), timeout_ms=0)

        intake.end(FencedError("gone"))

        for call in (
            receipt.wait,
            lambda: intake.put(arrival(), timeout_ms=0),
            lambda: intake.wait_until_idle(0),
        ):
            with pytest.raises(FencedError, match="gone"):
                call()

    def test_first_reason_of_the_end_is_kept(self):
        """Stopping after a failure must not hide the failure."""
        intake = Intake(5)
        intake.end(FencedError("first"))
        intake.end(UnavailableError("second"))

        with pytest.raises(FencedError, match="first"):
            intake.put(arrival(), timeout_ms=0)

    def test_intake_is_idle_only_while_the_worker_rests(self):
        """An empty intake is not idle while the worker processes a bundle."""
        intake = Intake(5)
        assert not intake.wait_until_idle(0)
        resting = threading.Thread(target=intake.rest, args=(60_000,))
        resting.start()

        assert intake.wait_until_idle(10_000)
        intake.end(UnavailableError("stop"))
        resting.join(10)

        assert not resting.is_alive()
