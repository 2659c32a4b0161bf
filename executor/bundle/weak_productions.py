"""
Weak productions of one bundle: what is delivered within the superstep, and what its rows must keep.

They are tables all the way: which productions are kept is decided in whole columns, and a bundle's
row updates can be restated when a consumer turns out to be too slow (MillWheel §6.1.3, figure 11).
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

__all__ = ["RowUpdateDraft", "Straggler", "WeakProductions", "split_productions"]

_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """
    Weak productions that a consumer did not get in time.

    Attributes:
        positions: which of the bundle's weak productions.
        consumer: the computation that still waits for them.
    """

    positions: _Places
    consumer: str


@dataclass(frozen=True, slots=True)
class RowUpdateDraft:
    """
    What a bundle's row updates are made of.
    """

    bundle: Bundle
    arrivals: Arrivals
    grouping: Grouping
    outcome: BundleOutcome
    kept: KeptProductions

    def updates(self) -> pa.Table | None:
        """
        The row updates.
        """
        return row_updates(self.bundle, self.arrivals, self.grouping, self.outcome, self.kept)

    def restamped(self, fence: Fence, superstep: Superstep) -> RowUpdateDraft:
        """
        The same work as part of another superstep.
        """
        return replace(self, bundle=replace(self.bundle, fence=fence, superstep=superstep))


@dataclass(frozen=True, slots=True)
class WeakProductions:
    """
    What a bundle hands on before the commit.

    Attributes:
        table: the productions, in order of emission, under the streams' own names.
        owners: the indices of the keys that produced them.
        draft: what the bundle's rows are made of.
    """

    table: pa.Table
    owners: _Places
    draft: RowUpdateDraft

    @property
    def streams(self) -> frozenset[str]:
        """
        The streams that they are on.
        """
        return self.draft.bundle.weak.fused

    def keeping(self, stragglers: Sequence[Straggler]) -> RowUpdateDraft:
        """
        The bundle's rows when these productions are checkpointed after all.
        """
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
) -> tuple[KeptProductions, tuple[pa.Table, _Places]]:
    """
    What a bundle's rows keep of its productions, and what goes on before the commit.
    """
    values = production_values(outcome.productions)
    owners = np.repeat(np.arange(len(outcome.production_counts)), outcome.production_counts)
    streams = values.field("stream")
    is_fused = _is_in(streams, weak.fused)
    is_kept = _is_in(streams, weak.kept)
    stays = ~is_fused | is_kept
    kept = KeptProductions(
        _readdressed(values.filter(pa.array(stays)), is_kept[stays], ""), owners[stays].astype(np.int64)
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
