"""The ids of dead letters whose records never reached the code: they are checked, and kept, as those of any record.

For that they are among the arrivals of the bundle, last and with no value; the records themselves are given to the code
with the other letters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.bundle.bundle import Deliveries
from millpond.executor.bundle.deduplication import Admission
from millpond.executor.bundle.retried_letter import RetriedLetter
from millpond.executor.computation.values import PythonValues


def unseen_ids(letters: Sequence[RetriedLetter]) -> list[Deliveries]:
    """The ids of letters as records that no code gets."""
    unseen = [letter for letter in letters if letter.unseen_id is not None]
    if not unseen:
        return []
    ids = Deliveries(
        stream="",
        keys=pa.array([letter.key for letter in unseen], pa.string()),
        at=np.array([letter.at for letter in unseen], np.int64),
        values=PythonValues([None] * len(unseen)),
        ids=pa.array([letter.unseen_id for letter in unseen], pa.binary()),
    )
    return [ids]


def are_ids(ids: Sequence[Deliveries], admission: Admission, arrived: int) -> npt.NDArray[np.bool_]:
    """Which of the admitted records are only the ids of letters.

    Args:
        ids: what `unseen_ids` returned, the last of the arrivals.
        admission: what was admitted.
        arrived: how many records arrived, these included.
    """
    if not ids:
        return np.zeros(arrived if admission.kept is None else len(admission.kept), np.bool_)
    first = arrived - sum(len(part.at) for part in ids)
    admitted = np.arange(arrived) if admission.kept is None else admission.kept
    are_of_letters: npt.NDArray[np.bool_] = admitted >= first
    return are_of_letters


def without_duplicates(
    letters: Sequence[RetriedLetter], ids: Sequence[Deliveries], admission: Admission, arrived: int
) -> Sequence[RetriedLetter]:
    """The letters without those whose ids have been consumed meanwhile."""
    if not ids or admission.kept is None:
        return letters
    first = arrived - sum(len(part.at) for part in ids)
    admitted = set(admission.kept.tolist())
    kept, position = [], first
    for letter in letters:
        if letter.unseen_id is None:
            kept.append(letter)
            continue
        if position in admitted:
            kept.append(letter)
        position += 1
    return kept
