"""Weak productions of one bundle: what is delivered within the superstep, and what its rows must keep.

Which productions are kept is decided in whole columns, and a bundle's row updates can be built again
if a consumer turns out to be too slow (MillWheel §6.1.3, figure 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.bundle.row_update import BundleOutcome, KeptProductions, production_values, row_updates
from millpond.executor.pipeline.weak import WeakStreams, addressed
from millpond.statestore.rows.row import PRODUCTION_TYPE

if TYPE_CHECKING:
    from millpond.executor.bundle.arrivals import Arrivals
    from millpond.executor.bundle.bundle import Bundle
    from millpond.executor.bundle.grouping import Grouping
    from millpond.statestore.rows.row import Fence
    from millpond.statestore.types import Superstep

_Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Weak productions that a consumer did not get in time.

    Attributes:
        positions: their positions among the bundle's weak productions.
        consumer: the computation that still waits for them.
    """

    positions: _Positions
    consumer: str


@dataclass(frozen=True, slots=True)
class RowUpdateDraft:
    """The inputs of a bundle's row updates."""

    bundle: Bundle
    arrivals: Arrivals
    grouping: Grouping
    outcome: BundleOutcome
    kept: KeptProductions

    def updates(self) -> pa.Table | None:
        """Build the row updates; ``None`` when nothing changed."""
        return row_updates(self.bundle, self.arrivals, self.grouping, self.outcome, self.kept)

    def restamped(self, fence: Fence, superstep: Superstep) -> RowUpdateDraft:
        """The same bundle as part of another superstep."""
        return replace(self, bundle=replace(self.bundle, fence=fence, superstep=superstep))


@dataclass(frozen=True, slots=True)
class WeakProductions:
    """A bundle's productions that are delivered before the commit.

    Attributes:
        table: the productions, in order of emission, under the streams' own names.
        owners: the indices of the keys that produced them.
        draft: the inputs of the bundle's row updates.
    """

    table: pa.Table
    owners: _Positions
    draft: RowUpdateDraft

    @property
    def streams(self) -> frozenset[str]:
        """The streams of the productions."""
        return self.draft.bundle.weak.fused

    def keeping(self, stragglers: Sequence[Straggler]) -> RowUpdateDraft:
        """The draft with row updates that also keep these productions."""
        values = [self.draft.kept.values]
        owners = [self.draft.kept.owners]
        for straggler in stragglers:
            late = self.table.take(pa.array(straggler.positions)).to_struct_array()
            late = late.combine_chunks() if isinstance(late, pa.ChunkedArray) else late
            values.append(_readdressed(late, np.ones(len(late), np.bool_), straggler.consumer))
            owners.append(self.owners[straggler.positions])
        index = np.concatenate(owners)
        order = np.argsort(index, kind="stable")
        kept = KeptProductions(pa.concat_arrays(values).take(pa.array(order)), index[order])
        return replace(self.draft, kept=kept)


def split_productions(
    outcome: BundleOutcome, weak: WeakStreams
) -> tuple[KeptProductions, tuple[pa.Table, _Positions]]:
    """Split productions into those that the rows keep and those that are delivered before the commit."""
    values = production_values(outcome.productions)
    owners = np.repeat(np.arange(len(outcome.production_counts)), outcome.production_counts)
    streams = values.field("stream")
    is_fused = _is_in(streams, weak.fused)
    is_kept = _is_in(streams, weak.kept)
    in_rows = ~is_fused | is_kept
    kept = KeptProductions(
        _readdressed(values.filter(pa.array(in_rows)), is_kept[in_rows], ""), owners[in_rows].astype(np.int64)
    )
    fused = values.filter(pa.array(is_fused))
    table = pa.Table.from_arrays(fused.flatten(), schema=pa.schema(list(PRODUCTION_TYPE)))
    return kept, (table, owners[is_fused].astype(np.int64))


def _is_in(streams: pa.StringArray, chosen: frozenset[str]) -> npt.NDArray[np.bool_]:
    is_chosen: npt.NDArray[np.bool_] = pc.is_in(streams, pa.array(sorted(chosen), pa.string())).to_numpy(
        zero_copy_only=False
    )
    return is_chosen


def _readdressed(values: pa.StructArray, chosen: npt.NDArray[np.bool_], consumer: str) -> pa.StructArray:
    if not chosen.any():
        return values
    streams = values.field("stream")
    renamed = pc.binary_join_element_wise(streams, addressed("", consumer), "")
    columns = [pc.if_else(pa.array(chosen), renamed, streams), *values.flatten()[1:]]
    return pa.StructArray.from_arrays(columns, fields=list(PRODUCTION_TYPE))
