"""The hand-over of a slot's records to the worker process that has the slot's soft state, its home.

Spark gives a task to any idle Python worker of an executor. So the first process that runs a slot listens for it, at an
address that all workers of the executor can compute. Another process that gets the slot's task hands plan and records
over and waits for the report. If the home has ended meanwhile, the process runs the slot itself, because a task is pure
and may run twice.

On one machine the driver can compute the address as well, and hands a small superstep over without a job of Spark.

Addresses are abstract sockets, which only Linux has: they need no folder and end with their process. A process that
connects must know the run's secret.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Final, TypeAlias

import pyarrow as pa

from millpond.executor.spark.task_plan import SlotReport, TaskPlan

_LOG = logging.getLogger("millpond")
_FAMILY: Final = "AF_UNIX"
_WAITING_MAX: Final = 16
_CALL_S: Final = 5.0
_POLL_S: Final = 0.5

ONE_MACHINE: Final = 0
"""The executor's part of an address where all processes are on the driver's machine. No process has this id."""


class HandedOver:
    """A slot's plan and records from another process, which waits for one report."""

    def __init__(self, connection: Connection, plan: bytes, batches: Sequence[pa.RecordBatch]) -> None:
        self.plan = plan
        self.batches = batches
        self._connection = connection
        self._giving = threading.Lock()
        self._is_given = False

    def give(self, report: SlotReport) -> None:
        # Stuck user code may return after the watchdog has reported it: its report must not follow as a second one.
        with self._giving:
            if not self._is_given:
                self._is_given = True
                self._connection.send_bytes(pickle.dumps(report))


Serve: TypeAlias = Callable[[HandedOver], None]
"""Runs a slot and gives its report, in a separate thread."""


class SlotHomes:
    """The slots whose home is this process, and connections to the homes of others in the same executor."""

    def __init__(self, secret: str, serve: Serve, executor: int) -> None:
        self.secret = secret
        self._key = secret.encode()
        self._serve = serve
        self._executor = executor
        self._listeners: dict[int, tuple[Listener, threading.Thread]] = {}
        self._is_closed = False

    def neighbour(self, slot: int, slots_max: int) -> Connection | None:
        """Return a connection to the slot's home; ``None`` if this process is the home, or becomes it, or none answers.

        A process becomes home to at most ``slots_max`` slots, because it could not run more of them at once.
        """
        self.take(slot, slots_max)
        if slot in self._listeners:
            return None
        return _connect(self._address(slot), self._key)

    def take(self, slot: int, slots_max: int) -> None:
        """Become the slot's home, if there is none and this process has room for it."""
        if slot not in self._listeners and len(self._listeners) < slots_max:
            self._listen(slot)

    def close(self) -> None:
        self._is_closed = True
        while self._listeners:
            slot, (listener, thread) = self._listeners.popitem()
            # A thread in accept() keeps the address bound even after close(), so wake it by a call.
            with socket.socket(socket.AF_UNIX) as caller, suppress(OSError):
                caller.settimeout(_CALL_S)
                caller.connect(self._address(slot))
            thread.join(_CALL_S)
            listener.close()

    def _address(self, slot: int) -> str:
        return _address(self._key, self._executor, slot)

    def _listen(self, slot: int) -> None:
        """Become the slot's home, unless another process is."""
        try:
            listener = Listener(self._address(slot), _FAMILY, backlog=_WAITING_MAX)
        except OSError:
            return
        thread = threading.Thread(
            target=self._serve_callers, args=(listener,), name=f"millpond-slot-{slot}", daemon=True
        )
        self._listeners[slot] = listener, thread
        thread.start()

    def _serve_callers(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                # Out of file descriptors, for example. Without a home, tasks run in the process that gets them.
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
                # Both sides prove that they know the secret before either unpickles anything from the other.
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                plan, packed = connection.recv_bytes(), connection.recv_bytes()
                batches = list(pa.ipc.open_stream(packed)) if packed else []
                self._serve(HandedOver(connection, plan, batches))
            except (OSError, EOFError, AuthenticationError, ValueError) as failure:
                _LOG.debug("a slot was not handed over to its end: %s", failure)
            except Exception:  # noqa: BLE001 - the other process gets no report, and runs the slot
                _LOG.warning("a slot that was handed over has failed", exc_info=True)


def _address(key: bytes, executor: int, slot: int) -> str:
    return f"\0millpond-{hashlib.sha256(key).hexdigest()[:24]}-{executor}-{slot}"


def _connect(address: str, key: bytes) -> Connection | None:
    try:
        return Client(address, _FAMILY, authkey=key)
    except (OSError, EOFError, AuthenticationError, ValueError) as failure:
        # There is no home, it has just ended, it knows another secret, or this Python lacks MD5 for the challenge.
        _LOG.debug("%s is no home to be reached: %s", address[1:], failure)
        return None


def hand_over(neighbour: Connection, plan: bytes, batches: Sequence[pa.RecordBatch]) -> SlotReport | None:
    """Have a slot's home run it; ``None`` if the home ends before its report."""
    packed = pa.BufferOutputStream()
    if batches:
        with pa.ipc.new_stream(packed, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    with neighbour:
        try:
            neighbour.send_bytes(plan)
            neighbour.send_bytes(packed.getvalue())
            answer = neighbour.recv_bytes()
        except (OSError, EOFError) as failure:
            _LOG.warning("no report came from the process that a slot was handed over to: %s", failure)
            return None
    report: SlotReport = pickle.loads(answer)  # noqa: S301 - the home has proved that it knows the run's secret
    return report


def reach_homes(secret: str, slots: Sequence[int]) -> HomesReached | None:
    """Return connections from the driver to the homes of all ``slots``; ``None`` if any of them has no home."""
    key, homes = secret.encode(), dict[int, Connection]()
    for slot in slots:
        home = _connect(_address(key, ONE_MACHINE, slot), key)
        if home is None:
            HomesReached(homes).close()
            return None
        homes[slot] = home
    return HomesReached(homes)


class HomesReached:
    """The driver's connections to the homes of a superstep's slots, for one hand-over."""

    def __init__(self, homes: Mapping[int, Connection]) -> None:
        self._homes = homes
        # Not a pool, whose threads would keep a program that ends waiting for user code.
        self._threads: dict[int, threading.Thread] = {}

    def run(
        self, plan: TaskPlan, batches: Mapping[int, Sequence[pa.RecordBatch]], poll: Callable[[], None]
    ) -> tuple[SlotReport, ...] | None:
        """Have the homes run their slots at once; ``None`` if any of them ends before its report.

        ``poll`` is called after each half second without a report. What it raises ends the wait, not the work of the
        homes: their files count for nothing unless they are committed.
        """
        answers = queue.SimpleQueue[SlotReport | BaseException | None]()

        def call(slot: int, home: Connection) -> None:
            try:
                answers.put(hand_over(home, plan.to_neighbour(slot), batches.get(slot, ())))
            except BaseException as failure:  # noqa: BLE001 - raised by the thread that waits
                answers.put(failure)

        for slot, home in self._homes.items():
            name = f"millpond-home-call-{slot}"
            self._threads[slot] = threading.Thread(target=call, args=(slot, home), name=name, daemon=True)
            self._threads[slot].start()
        reports: list[SlotReport] = []
        while len(reports) < len(self._homes):
            try:
                answer = answers.get(timeout=_POLL_S)
            except queue.Empty:
                poll()
                continue
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                return None
            reports.append(answer)
        return tuple(reports)

    def close(self) -> None:
        for slot, home in self._homes.items():
            thread = self._threads.get(slot)
            if thread is None:
                home.close()
            elif thread.is_alive():
                # To close a file under a thread that reads it would let it read from the next file of that number.
                with suppress(OSError), socket.socket(fileno=os.dup(home.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join()
