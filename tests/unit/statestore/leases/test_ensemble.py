"""The entry in the log that names a store's ensemble."""

from __future__ import annotations

import logging

import pytest

from millpond.statestore.app_ids import AppId, is_app_id
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.ensemble import (
    NO_ENSEMBLE,
    Ensemble,
    ensemble_entry,
    missing_entry,
    recorded_ensemble,
)

FIRST, OTHER = Ensemble("a1", "zk1:2181,zk2:2181"), Ensemble("b2", "zk3:2181")
NAMED = ensemble_entry(FIRST, 3)


def test_newest_entry_counts() -> None:
    assert recorded_ensemble({}) == NO_ENSEMBLE
    assert recorded_ensemble(NAMED) == FIRST
    moved = NAMED | ensemble_entry(OTHER, 7)
    assert recorded_ensemble(moved) == OTHER
    assert recorded_ensemble(moved | ensemble_entry(FIRST, 9)) == FIRST
    assert recorded_ensemble(moved | ensemble_entry(NO_ENSEMBLE, 9)) == NO_ENSEMBLE


@pytest.mark.parametrize("ensemble", [FIRST, OTHER, NO_ENSEMBLE])
def test_entry_is_an_id_of_two_parts(ensemble: Ensemble) -> None:
    (app_id,) = ensemble_entry(ensemble, 1)
    assert is_app_id(app_id)
    assert AppId.ENSEMBLE.parts(app_id) == (ensemble.id, ensemble.hosts)


def test_entry_has_no_user_and_password() -> None:
    (app_id,) = ensemble_entry(Ensemble("a1", "shop:secret@zk1:2181,zk2:2181/root"), 1)
    assert AppId.ENSEMBLE.parts(app_id) == ("a1", "zk1:2181,zk2:2181/root")


def test_entry_is_missing_before_the_first_take_over_and_after_hosts_changed() -> None:
    assert missing_entry({}, FIRST, 4) == ensemble_entry(FIRST, 4)
    assert missing_entry(NAMED, FIRST, 4) == {}
    renamed = Ensemble(FIRST.id, "zk9:2181")
    assert missing_entry(NAMED, renamed, 4) == ensemble_entry(renamed, 4)
    assert missing_entry({}, NO_ENSEMBLE, 4) == {}


@pytest.mark.parametrize(
    ("given", "fault"), [(OTHER, "another ensemble"), (NO_ENSEMBLE, "without the ensemble")]
)
def test_other_ensemble_and_none_are_refused_with_the_hosts(given: Ensemble, fault: str) -> None:
    with pytest.raises(InvalidError, match=f"{fault}.*pass zookeeper='zk1:2181,zk2:2181'"):
        missing_entry(NAMED, given, 4)


def test_ensemble_that_lost_its_data_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its leases are lost too; the same hosts in another order are the same."""
    wiped = Ensemble("c3", "zk2:2181,zk1:2181")
    with caplog.at_level(logging.WARNING, "millpond"):
        assert missing_entry(NAMED, wiped, 4) == ensemble_entry(wiped, 4)
    assert "another identity" in caplog.text
