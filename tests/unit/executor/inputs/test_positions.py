"""Admission of batches by stored input positions."""

from __future__ import annotations

import pytest

from millpond.executor.inputs.positions import (
    admit_batch,
    claimed_by,
    conflicting_pipeline,
    input_positions,
    percentile_watermark_app_id,
)
from millpond.statestore.app_ids import AppId, pipeline_number
from millpond.statestore.errors import InvalidError


def test_batch_0_of_an_empty_store_is_new() -> None:
    assert admit_batch({}, "s", "q", 0)


def test_next_batch_is_new_and_the_last_one_is_a_replay() -> None:
    """Spark repeats its last batch after a crash."""
    assert admit_batch({"q": 4}, "s", "q", 5)
    assert not admit_batch({"q": 4}, "s", "q", 4)


@pytest.mark.parametrize(
    ("known", "source", "batch", "words", "ways_out"),
    [
        ({"q": 4}, "q", 3, "was rewound", set()),
        ({"q": 4}, "q", 6, "is ahead of the store", {"millpond repair"}),
        ({"q": 4}, "other", 0, "another checkpoint", {"accept_checkpoint"}),
        ({}, "q", 7, "never saw", {"millpond repair", "accept_checkpoint"}),
    ],
)
def test_foreign_and_rewound_checkpoints_are_refused(
    known: dict[str, int], source: str, batch: int, words: str, ways_out: set[str]
) -> None:
    """Otherwise input would be lost or repeated."""
    with pytest.raises(InvalidError, match=words) as caught:
        admit_batch(known, "s", source, batch)
    said = str(caught.value)
    assert {way for way in ("millpond repair", "accept_checkpoint") if way in said} == ways_out
    assert "the checkpoint that belongs to this store" in said


def test_accepted_checkpoint_may_start_at_any_batch() -> None:
    assert admit_batch({"q": 4}, "s", "other", 9, accept_checkpoint=True)


def test_names_with_slashes_keep_their_own_positions() -> None:
    positions = {AppId.INPUT.of("p", "a", "q"): 1, AppId.INPUT.of("p", "a/b", "q"): 2}
    assert input_positions(positions, "p", "a") == {"q": 1}
    assert input_positions(positions, "p", "a/b") == {"q": 2}


def test_equal_percentiles_have_one_app_id() -> None:
    """The watermark at 100 is the low watermark."""
    names = [
        percentile_watermark_app_id("p", "computation", "c", each) for each in (90, 90.0, 99.5, 100, 100.0)
    ]
    low = "millpond/watermark/p/computation/c"
    assert names == [f"{low}@90.0", f"{low}@90.0", f"{low}@99.5", low, low]


def test_claims_identify_the_pipeline_by_number() -> None:
    """The name is known only once the pipeline has run."""
    positions = {
        AppId.CLAIM.of("mine"): pipeline_number("p"),
        AppId.CLAIM.of("theirs"): pipeline_number("q"),
        AppId.SUPERSTEP.of("q"): 3,
    }

    assert claimed_by(positions, "p") == {"mine"}
    assert [conflicting_pipeline(positions, "p", name) for name in ("mine", "theirs", "free")] == [
        None,
        "q",
        None,
    ]
    assert conflicting_pipeline({AppId.CLAIM.of("c"): pipeline_number("z")}, "p", "c") == "another one"
