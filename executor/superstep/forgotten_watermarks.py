"""Streams without a declared watermark: warns of the first record that is dropped, with a watermark that keeps it.

Without a declaration, rows are assumed to arrive in the order of their times. If they do not, windows close
before their rows arrive, and without a warning only a counter would show it.
"""

from __future__ import annotations

import logging
from typing import Final

from millpond.executor.event_time.duration import duration_text
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.totals import Totals
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks

_LOG: Final = logging.getLogger("millpond")
_DROPPED: Final = "dropped"


class ForgottenWatermarks:
    """Warns once per stream that is out of order, has only an assumed watermark, and has dropped records.

    Args:
        topology: the checked pipeline.
        watermarks: know how far behind the records of each stream were.
    """

    def __init__(self, topology: Topology, watermarks: PipelineWatermarks) -> None:
        self._watermarks = watermarks
        self._fed = {
            stream: topology.reached_from([stream])
            for stream, node in topology.injectors.items()
            if node.is_assumed
        }

    def note(self, counts: Totals) -> None:
        """Check the counts of a committed superstep."""
        if not counts.dropped:
            return
        for stream, fed in list(self._fed.items()):
            behind_us = self._watermarks.behind_us(stream)
            dropped = {
                name: counted[_DROPPED]
                for name, counted in counts.by_computation.items()
                if name in fed and counted.get(_DROPPED)
            }
            if not dropped or not behind_us:
                continue
            del self._fed[stream]
            name, count = next(iter(dropped.items()))
            _LOG.warning(
                "records came too late and are dropped, because no watermark was declared and rows are assumed to "
                'arrive in the order of their times: inject(..., watermark=BoundedDisorder("%s")) would have kept '
                "them: stream=`%s` computation=`%s` dropped=`%s`; later ones are only counted",
                duration_text(behind_us),
                stream,
                name,
                count,
            )
