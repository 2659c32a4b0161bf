"""Whether rows fit the pipeline that they are injected into."""

from __future__ import annotations

import pyarrow as pa

from millpond.executor.pipeline.extract_rows import Rows, check_fields, read_injected
from millpond.executor.pipeline.injector_checks import told_of_stream
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.errors import InvalidError


def check_fit(topology: Topology, stream: str, rows: Rows, *, with_mappings: bool = True) -> None:
    """Refuse rows that do not fit the stream's injector and consumers.

    Args:
        topology: the pipeline.
        stream: an injected stream.
        rows: the rows.
        with_mappings: whether to look for fields that are in none of the first rows, if they are no table.

    Raises:
        InvalidError: the stream is not injected, or a column is missing or of the wrong type.
    """
    injector = topology.injector(stream)
    keys = [consumer.subscription.key for consumer in topology.consumers_of(stream)]
    if isinstance(rows, pa.Table):
        # A missing column is an error of this call and must not end the run.
        with told_of_stream(stream):
            for key in keys:
                read_injected(injector, key, rows.slice(0, 0))
    elif rows and with_mappings:
        check_fields(injector, keys, rows)


def check_still_fits(topology: Topology, former: Topology, stream: str, rows: Rows) -> None:
    """Refuse rows that were injected before the pipeline was changed and do not fit it any more.

    Raises:
        InvalidError: says why; nothing of them is processed.
    """
    if stream not in topology.injectors:
        raise InvalidError(
            "the pipeline was changed before these rows were processed, and no longer has their stream",
            pipeline=topology.name,
            stream=stream,
            injected=sorted(topology.injectors),
        )
    now, before = topology.injectors[stream], former.injectors[stream]
    if now.change != before.change or now.payload != before.payload:
        raise InvalidError(
            "the pipeline was changed before these rows were processed: inject them again", stream=stream
        )
    check_fit(topology, stream, rows)
