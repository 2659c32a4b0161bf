"""Input admission: which outside input a pipeline accepts, given what its store has consumed."""

from __future__ import annotations

from millpond.executor.pipeline.positions import admit_batch, consumed_elsewhere, input_positions
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import input_app_id, input_rows_app_id
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store


class InputAdmission:
    """Compares outside inputs with what the store has consumed of them.

    Args:
        store: the open store.
        topology: the checked pipeline.
        watermarks: know which inputs have ended.
        accept_checkpoint: whether to accept an outside source that the store does not know.
        accept_ended: whether to accept records of a stream that an earlier run has ended.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        watermarks: PipelineWatermarks,
        *,
        accept_checkpoint: bool,
        accept_ended: bool,
    ) -> None:
        self._store = store
        self._topology = topology
        self._watermarks = watermarks
        self._accept_checkpoint = accept_checkpoint
        self._accept_ended = accept_ended

    def admit(self, position: InputPosition) -> bool:
        """Whether a batch is new; see `admit_batch`.

        Raises:
            InvalidError: the source's checkpoint does not belong to this store, or its query to another pipeline.
        """
        accept, known = self._accept_checkpoint, self.consumed(position.stream)
        positions = self._store.committer.snapshot.txns
        other = consumed_elsewhere(positions, self._topology.name, position.source)
        if other is not None and not known and not accept:
            raise InvalidError(
                "another pipeline of this store has consumed this input's query: give the pipeline its former "
                "name again (foreach_batch: name= or pipeline=, and renamed_from= for the computation), or "
                "start the query with a new checkpoint",
                input=position.stream,
                pipeline=self._topology.name,
                consumed_by=other,
            )
        return admit_batch(known, position.stream, position.source, position.batch, accept_checkpoint=accept)

    def consumed(self, stream: str) -> dict[str, int]:
        """The consumed positions of a stream's outside inputs, by source."""
        return input_positions(self._store.committer.snapshot.txns, self._topology.name, stream)

    def offsets(self, stream: str, source: str) -> str | None:
        """Where the consumed position of a source lies, as the source said it; ``None`` if it did not."""
        app_id = input_app_id(self._topology.name, stream, source)
        return self._store.committer.snapshot.source_offsets.get(app_id)

    @property
    def closed(self) -> frozenset[str]:
        """The injected streams that accept no more records, because an earlier run has ended their input."""
        return frozenset() if self._accept_ended else self._watermarks.ended_before

    def input_rows(self, stream: str) -> int | None:
        """How many rows of a bounded input count towards its watermark; ``None`` if unknown."""
        positions = self._store.committer.snapshot.txns
        return positions.get(input_rows_app_id(self._topology.name, stream))
