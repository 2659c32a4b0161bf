"""The hand-over of a slot: its records go to the worker process that has its soft state.

Spark gives a task to any idle Python worker of an executor. So the first process that runs a slot listens for it, at
an address that all workers of the executor can tell, and another one that gets the slot's task hands the plan and the
records over and waits for the report. If the home has ended meanwhile, a process runs the slot itself: a task is pure,
so that it may run twice.

Addresses are abstract ones, which only Linux has: they need no folder and end with their process. A process that connects
must know the run's secret.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Final, TypeAlias

import pyarrow as pa

from millpond.executor.spark.task_plan import SlotReport

_LOG = logging.getLogger("millpond")
_FAMILY: Final = "AF_UNIX"
_WAITING_MAX: Final = 16
_CALL_S: Final = 5.0


def has_abstract_addresses(system: str = sys.platform) -> bool:
    """Whether this system can hand slots over."""
    return system == "linux"


class HandedOver:
    """A slot that another process has handed over; its report is given once.

    Args:
        connection: to the process that waits.
        plan: what `TaskPlan.to_neighbour` made.
        batches: the slot's routed records.
    """

    def __init__(self, connection: Connection, plan: bytes, batches: Sequence[pa.RecordBatch]) -> None:
        self.plan = plan
        self.batches = batches
        self._connection = connection
        self._giving = threading.Lock()
        self._is_given = False

    def give(self, report: SlotReport) -> None:
        """Answer, unless that was done: code that is stuck may come back after the watchdog has reported it."""
        with self._giving:
            if not self._is_given:
                self._is_given = True
                self._connection.send_bytes(report.to_bytes())


Serve: TypeAlias = Callable[[HandedOver], None]
"""Runs a slot and gives its report; called in a thread of its own."""


class SlotHomes:
    """The slots that this process is home to, and the way to those of its neighbours.

    Args:
        secret: what only the run's tasks know.
        serve: runs a slot that another process hands over.
        executor: what the worker processes of an executor have in common; the process that forks them.
    """

    def __init__(self, secret: str, serve: Serve, executor: int | None = None) -> None:
        self.secret = secret
        self._serve = serve
        self._executor = os.getppid() if executor is None else executor
        self._listeners: dict[int, tuple[Listener, threading.Thread]] = {}
        self._is_closed = False

    def neighbour(self, slot: int, slots_max: int) -> Connection | None:
        """A connection to the slot's home, if that is another process. If there is none, this one becomes it.

        Args:
            slot: the slot.
            slots_max: to how many this process may be home; it runs others without becoming it.
        """
        if slot in self._listeners:
            return None
        if len(self._listeners) < slots_max and self._settle(slot):
            return None
        try:
            return Client(self._address(slot), _FAMILY, authkey=self._key)
        except (OSError, EOFError, AuthenticationError, ValueError) as failure:
            # There is none, it has just ended, or it is not ours; or this Python has no MD5, which the proof is made with.
            _LOG.debug("slot %s has no home to be reached: %s", slot, failure)
            return None

    def close(self) -> None:
        """Be home to no slot any more."""
        self._is_closed = True
        while self._listeners:
            slot, (listener, thread) = self._listeners.popitem()
            # A thread that waits for a caller keeps the address, even of a listener that is closed.
            with socket.socket(socket.AF_UNIX) as caller, suppress(OSError):
                caller.settimeout(_CALL_S)
                caller.connect(self._address(slot))
            thread.join(_CALL_S)
            listener.close()

    @property
    def _key(self) -> bytes:
        return self.secret.encode()

    def _address(self, slot: int) -> str:
        run = hashlib.sha256(self._key).hexdigest()[:24]
        return f"\0millpond-{run}-{self._executor}-{slot}"

    def _settle(self, slot: int) -> bool:
        """Listen for a slot; false if another process does."""
        try:
            listener = Listener(self._address(slot), _FAMILY, backlog=_WAITING_MAX)
        except OSError:
            return False
        thread = threading.Thread(
            target=self._listen, args=(listener,), name=f"millpond-slot-{slot}", daemon=True
        )
        self._listeners[slot] = listener, thread
        thread.start()
        return True

    def _listen(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                # Out of file descriptors, for example: then tasks run where they are.
                _LOG.exception("this process no longer takes a slot over from others")
                listener.close()
                return
            if self._is_closed:
                connection.close()
                return
            threading.Thread(
                target=self._answer, args=(connection,), name="millpond-handed-over", daemon=True
            ).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                plan, batches = connection.recv_bytes(), _batches(connection.recv_bytes())
                self._serve(HandedOver(connection, plan, batches))
            except (OSError, EOFError, AuthenticationError, ValueError) as failure:
                _LOG.debug("a slot was not handed over to its end: %s", failure)
            except Exception:  # noqa: BLE001 - the other process hears that there is no report, and runs the slot
                _LOG.warning("a slot that was handed over has failed", exc_info=True)


def hand_over(neighbour: Connection, plan: bytes, batches: Sequence[pa.RecordBatch]) -> SlotReport | None:
    """Have a slot's home run it; ``None`` if the home ends before it has reported.

    Args:
        neighbour: what `SlotHomes.neighbour` returned.
        plan: what `TaskPlan.to_neighbour` made.
        batches: the slot's routed records.
    """
    with neighbour:
        try:
            neighbour.send_bytes(plan)
            neighbour.send_bytes(_bytes(batches))
            return SlotReport.from_bytes(neighbour.recv_bytes())
        except (OSError, EOFError) as failure:
            _LOG.warning("the process that a slot was handed over to has ended: %s", failure)
            return None


def _bytes(batches: Sequence[pa.RecordBatch]) -> bytes | pa.Buffer:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def _batches(data: bytes) -> Sequence[pa.RecordBatch]:
    return list(pa.ipc.open_stream(data)) if data else []
