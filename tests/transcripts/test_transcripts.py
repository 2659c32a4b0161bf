"""Every transcript of this folder, on the runners."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import millpond as mp
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.testing.transcripts.command import failure_of, failures_of, read_documents
from millpond.testing.transcripts.runs import LocalTranscriptRun, SparkTranscriptRun
from millpond.testing.transcripts.transcript import read_transcript
from tests.oracles.features import constructor_names, cover

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOLDER = Path(__file__).parent
_FILES = tuple(sorted(_FOLDER.glob("*.yaml")))


def _documents() -> Iterator[Any]:
    for path in _FILES:
        for document in read_documents([path]):
            yield pytest.param(document, id=f"{path.stem}:{document['name']}")


_DOCUMENTS = tuple(_documents())


def _is_played(document: Any) -> bool:
    """Return True if a document reaches a runner; others are refused before."""
    try:
        read_transcript(document).stage()
    except mp.InvalidError:
        return False
    return True


_PLAYED = tuple(fields for document in _DOCUMENTS if _is_played(fields := document.values[0]))


def _names(documents: Any) -> set[str]:
    texts = [document.get(part) for document in documents for part in ("window_fn", "trigger_fn")]
    return {name for text in texts if text is not None for name in constructor_names(text)}


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_local_runner_plays_every_transcript(document: Any) -> None:
    """Documents with an expected error are refused with it."""
    assert failure_of(document, LocalTranscriptRun) is None


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_restarts_between_all_steps_change_no_pane(document: Any) -> None:
    # Each start reads all rows: use Arrow here, Parquet above.
    opener = partial(LocalTranscriptRun, row_format=IpcRowFormat())

    assert failure_of(document, opener, restart=True) is None


def test_sample_on_spark(spark: SparkSession) -> None:
    """Documents that together have every feature run side by side."""
    sample = cover(_PLAYED)

    assert _failures(sample, spark) == {}


@pytest.mark.spark_all
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("restart", [False, True], ids=["through", "restarts"])
def test_all_on_spark(path: Path, restart: bool, spark: SparkSession) -> None:
    """Every document also restarts between all steps."""
    assert _failures(list(read_documents([path])), spark, restart=restart) == {}


def _failures(documents: list[Any], spark: SparkSession, *, restart: bool = False) -> dict[str, str]:
    failures = failures_of(documents, partial(SparkTranscriptRun, spark=spark), restart=restart)
    named = zip(documents, failures, strict=True)
    return {document["name"]: failure for document, failure in named if failure is not None}


def test_sample_has_every_constructor() -> None:
    assert _names(cover(_PLAYED)) == _names(_PLAYED)


def test_documents_have_every_trigger_and_window_function() -> None:
    """Names that take a function have an alias."""
    kinds = {name: getattr(mp, name) for name in mp.__all__} | vars(mp.windows)
    public = {
        name
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, mp.Trigger | mp.WindowFn)
    }

    assert public - _names(_PLAYED) == {"Trigger", "WindowFn", "ShouldEmit", "ResultIs"}
    assert {"UpTo", "ResultIsOdd"} <= _names(_PLAYED)


def test_every_trigger_merges_and_retracts() -> None:
    """Each mode occurs with every kind of windows, too."""
    triggers = {
        name for document in _PLAYED for name in constructor_names(document.get("trigger_fn", "Default"))
    }
    merging = [document for document in _PLAYED if "Sessions" in document.get("window_fn", "")]
    retracting = [document for document in _PLAYED if document.get("accumulation_mode") == "retracting"]
    kinds = ("FixedWindows", "SlidingWindows", "Sessions", "GlobalWindows")
    modes = {
        (kind, document.get("accumulation_mode", "accumulating"))
        for document in _PLAYED
        for kind in constructor_names(document.get("window_fn", "GlobalWindows"))
    }

    # Aliases of AfterEach and Repeatedly need no documents with sessions.
    assert triggers - _names(merging) <= {"AfterAny", "Repeat", "SequenceOf"}
    assert triggers - _names(retracting) == set()
    assert {(kind, str(mode)) for kind in kinds for mode in mp.windows.Accumulation} <= modes


def test_at_least_200_transcripts_have_unique_names() -> None:
    """At least twenty of them must be refused."""
    documents = [document.values[0] for document in _DOCUMENTS]

    assert len(documents) >= 200
    assert sum("error" in document for document in documents) >= 20
    assert len({document["name"] for document in documents}) == len(documents)
