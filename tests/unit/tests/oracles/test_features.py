"""Features of transcripts, and the sample that covers them."""

from __future__ import annotations

from typing import Any

from tests.oracles.features import constructor_names, cover, features_of


def _document(trigger: str, **rest: Any) -> dict[str, Any]:
    return {"name": trigger, "trigger_fn": trigger, "transcript": [{"input": [1]}], **rest}


def test_names_are_found_at_any_depth() -> None:
    """Constructor names are recognised in calls, bare, dotted and as keyword values; words and numbers are not names."""
    text = (
        "AfterWatermark(early=Repeatedly(AfterAny(AtPeriod(0, 60, EVENT_TIME), AfterCount(2))), late=Default)"
    )

    assert constructor_names(text) == {
        "AfterAny",
        "AfterCount",
        "AfterWatermark",
        "AtPeriod",
        "Default",
        "Repeatedly",
    }
    assert constructor_names('CalendarWindows.days(1, zone="Europe/Berlin")') == {"CalendarWindows.days"}


def test_a_mode_a_step_and_a_field_are_features() -> None:
    """Documents that differ in accumulation, in a step or in a field of a pane differ in features."""
    plain = features_of(_document("Default"))
    expecting = [{"input": [1]}, {"expect": [{"late": True}]}]

    assert features_of(_document("Default", accumulation_mode="discarding")) != plain
    assert features_of(_document("Default", transcript=expecting)) > plain


def test_a_cover_has_all_features_and_no_document_that_adds_none() -> None:
    """The sample has every feature of all documents, no redundant document, and their order."""
    documents = [
        _document("AfterCount(1)"),
        _document("AfterCount(2)"),
        _document("Never", window_fn="Sessions(1)"),
    ]
    sample = cover(documents)

    assert sample == [documents[0], documents[2]]
    assert {feature for document in sample for feature in features_of(document)} == {
        feature for document in documents for feature in features_of(document)
    }
