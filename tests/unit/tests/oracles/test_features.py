"""Features of transcripts, and the sample that covers them."""

from __future__ import annotations

from typing import Any

from tests.oracles.features import constructor_names, cover, features_of


def _document(trigger: str, **rest: Any) -> dict[str, Any]:
    return {"name": trigger, "trigger_fn": trigger, "transcript": [{"input": [1]}], **rest}


def test_constructor_names_are_found_at_any_depth() -> None:
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


def test_accumulation_step_and_field_are_features() -> None:
    plain = features_of(_document("Default"))
    expecting = [{"input": [1]}, {"expect": [{"late": True}]}]

    assert features_of(_document("Default", accumulation_mode="discarding")) != plain
    assert features_of(_document("Default", transcript=expecting)) > plain


def test_cover_has_all_features_and_no_redundant_document() -> None:
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
