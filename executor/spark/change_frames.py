"""Changes in a DataFrame as flat rows, made in the JVM: what `millpond.executor.pipeline.changes` makes of rows in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows

from millpond.executor.pipeline.changes import (
    CHANGE_ERROR,
    CHANGE_SIGN,
    ENVELOPE_WORDS,
    SIGN_OF_WORD,
    UNKNOWN_CHANGE,
    meta_field,
    renamed,
)
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_IMAGE: Final = meta_field("image")
_SIGN_OF_IMAGE: Final = {"before": -1, "after": 1}


def flat_frame(change: str | None, frame: DataFrame) -> DataFrame:
    """The changes in a frame as flat rows; the frame itself if its rows are no changes.

    Args:
        change: the column that says what kind of change a row is; ``None``: each row is an element.
        frame: a batch, or a whole input.

    Raises:
        InvalidError: there is no such column, or ``before`` and ``after`` are no rows.
    """
    if change is None:
        return frame
    if change not in frame.columns:
        raise InvalidError("the input has no such change column", column=change, columns=frame.columns)
    if {"before", "after"} <= set(frame.columns):
        return _unfolded(change, frame)
    words = ", ".join(f"'{word}', {sign}" for word, sign in SIGN_OF_WORD.items())
    sign = f"coalesce(element_at(map({words}), CAST({_quoted(change)} AS STRING)), 0)"
    return frame.selectExpr(
        *(f"{_quoted(name)} AS {_quoted(renamed(change, name))}" for name in frame.columns),
        f"CAST({sign} AS TINYINT) AS {CHANGE_SIGN}",
        f"CASE WHEN {sign} = 0 THEN '{UNKNOWN_CHANGE}' END AS {CHANGE_ERROR}",
    )


def _unfolded(change: str, frame: DataFrame) -> DataFrame:
    for name in ("before", "after"):
        kind = frame.schema[name].dataType
        if not isinstance(kind, T.StructType):
            raise InvalidError(
                "before and after of a change are rows: parse the text of Debezium with from_json",
                column=name,
                type=kind.simpleString(),
            )
    meta = [name for name in frame.columns if name not in ("before", "after")]
    word = _quoted(change)
    whens = [
        f"WHEN {word} = '{known}' AND {' AND '.join(f'{name} IS NOT NULL' for name in wanted)} "
        f"THEN array({', '.join(_image(_SIGN_OF_IMAGE[name], name) for name in wanted)})"
        for known, wanted in ENVELOPE_WORDS.items()
    ]
    # A tombstone has nothing to unfold.
    tombstone = f"WHEN {word} IS NULL AND before IS NULL AND after IS NULL THEN NULL"
    other = f"ELSE array({_image(0, 'coalesce(after, before)')})"
    images = f"explode(CASE {tombstone} {' '.join(whens)} {other} END) AS {_IMAGE}"
    unfolded = frame.selectExpr(*(f"{_quoted(name)} AS {_quoted(meta_field(name))}" for name in meta), images)
    return unfolded.selectExpr(
        *(_quoted(meta_field(name)) for name in meta),
        f"{_IMAGE}.sign AS {CHANGE_SIGN}",
        f"{_IMAGE}.error AS {CHANGE_ERROR}",
        f"{_IMAGE}.image.*",
    )


def _image(sign: int, row: str) -> str:
    error = f"'{UNKNOWN_CHANGE}'" if not sign else "CAST(NULL AS STRING)"
    return f"named_struct('sign', CAST({sign} AS TINYINT), 'error', {error}, 'image', {row})"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
