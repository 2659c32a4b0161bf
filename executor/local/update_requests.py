"""Requests to change the pipeline of a run whose supersteps run in a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.pipeline_update import PipelineUpdate


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A changed pipeline that waits for its turn.

    Attributes:
        topology: the pipeline.
        then: called once it runs, before the next superstep.
        outcome: how it ended.
    """

    topology: Topology
    then: Callable[[], None]
    outcome: Future[PipelineUpdate] = field(default_factory=Future)


class UpdateRequests:
    """Hands changed pipelines to the thread that runs supersteps; each sender waits, so no more wait than threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[UpdateRequest] = deque()
        self._ended: BaseException | None = None

    def put(self, topology: Topology, then: Callable[[], None]) -> Future[PipelineUpdate]:
        """Ask for an update; the future has its outcome."""
        request = UpdateRequest(topology, then)
        with self._lock:
            if self._ended is None:
                self._waiting.append(request)
            else:
                request.outcome.set_exception(self._ended)
        return request.outcome

    def take(self) -> UpdateRequest | None:
        """The next request; ``None`` without one."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def end(self, reason: BaseException) -> None:
        """Refuse all requests, waiting and future."""
        with self._lock:
            self._ended = reason
            waiting = [*self._waiting]
            self._waiting.clear()
        for request in waiting:
            request.outcome.set_exception(reason)
