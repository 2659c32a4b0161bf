"""The stored form of application ids, which existing stores depend on."""

from __future__ import annotations

import pytest

from millpond.statestore.app_ids import AppId, sink_app_id
from millpond.statestore.interval import Interval

_STORED = [
    (AppId.CLAIM, ("c",), "millpond/claim/c"),
    (AppId.SUPERSTEP, ("daily clicks",), "millpond/superstep/daily%20clicks"),
    (AppId.INPUT, ("p", "a/b", "q 1"), "millpond/input/p/a%2Fb/q%201"),
    (AppId.INPUT_ROWS, ("p/q", "x%y"), "millpond/input_rows/p%2Fq/x%25y"),
    (AppId.INJECTED, ("p/q", "x%y"), "millpond/injected/p%2Fq/x%25y"),
    (AppId.BACKFILL, ("p", "c", "s"), "millpond/backfill/p/c/s"),
    (AppId.WATERMARK, ("p", "injector", "s"), "millpond/watermark/p/injector/s"),
    (AppId.LAST_EVENT, ("p/q",), "millpond/last_event/p%2Fq"),
    (AppId.MEMBER_STATUS, ("p", "s", ""), "millpond/standing/p/s/"),
    (AppId.TOTAL, ("p/q", "x%y"), "millpond/total/p%2Fq/x%25y"),
    (AppId.COUNT, ("p", "c", "records"), "millpond/count/p/c/records"),
    (AppId.LETTERS, ("p", "drop", "all"), "millpond/letters/p/drop/all"),
    (AppId.CUT, ("c", "split", "ü"), "millpond/cut/c/split/%C3%BC"),
    (AppId.BARE_IDS, ("c",), "millpond/bare_ids/c"),
    (AppId.ID_SLACK, ("c",), "millpond/id_slack/c"),
    (AppId.PIPELINE_NAME, ("p/q", "x%y"), "millpond/pipeline_name/p%2Fq/x%25y"),
    (AppId.CODEC, ("p/q", "x%y"), "millpond/codec/p%2Fq/x%25y"),
    (AppId.STATE_VERSION, ("c", 3), "millpond/state_version/c/3"),
    (AppId.FINGERPRINT, ("c", '{"a":"b"}'), "millpond/fingerprint/c/%7B%22a%22%3A%22b%22%7D"),
    (AppId.KEY_COLUMNS, ("p/q", "x%y"), "millpond/key_columns/p%2Fq/x%25y"),
    (AppId.STATE_COLUMNS, ("p/q", "x%y"), "millpond/state_columns/p%2Fq/x%25y"),
    (AppId.DECLARED_INTERVALS, ("c", 0), "millpond/declared_intervals/c/0"),
    (AppId.SAVEPOINT, ("before the sale",), "millpond/savepoint/before%20the%20sale"),
    (AppId.LOCATION, ("/a b",), "millpond/location/%2Fa%20b"),
    (AppId.INCARNATION, ("77ab", "fork"), "millpond/incarnation/77ab/fork"),
    (AppId.FORK, ("77ab", "p"), "millpond/fork/77ab/p"),
    (AppId.ENSEMBLE, ("4e5f", "z1:2181,z2:2181"), "millpond/ensemble/4e5f/z1%3A2181%2Cz2%3A2181"),
    (AppId.SINK_OWNER, ("51d0", "p", "s", "77ab"), "millpond/sink_owner/51d0/p/s/77ab"),
    (AppId.SINK_REACHED, ("flights", "out"), "millpond/sink_reached/flights/out"),
    (AppId.SINK_SERVED, ("flights", "out"), "millpond/sink_served/flights/out"),
    (AppId.SINK_TAKEN, ("77ab", "/out/s"), "millpond/sink_taken/77ab/%2Fout%2Fs"),
]


@pytest.mark.parametrize(("kind", "parts", "stored"), _STORED, ids=lambda value: getattr(value, "name", ""))
def test_app_id_keeps_its_stored_form(kind: AppId, parts: tuple[str | int, ...], stored: str) -> None:
    assert type(kind.of(*parts)) is str
    assert kind.of(*parts) == stored
    assert kind.parts(stored) == tuple(map(str, parts))


def test_every_kind_of_app_id_has_its_stored_form_tested() -> None:
    assert {kind for kind, _, _ in _STORED} | {AppId.INTERVAL, AppId.SINK} == set(AppId)


def test_interval_app_id_keeps_its_stored_form() -> None:
    assert Interval("c", "a/b", "ü").app_id == "millpond/interval/c/a%2Fb/=%C3%BC"
    assert Interval("c").app_id == "millpond/interval/c//"


def test_sink_app_id_names_incarnation_only_after_first() -> None:
    assert sink_app_id("51d0", "z", "s") == "millpond/sink/51d0/z/s"
    assert sink_app_id("51d0", "z", "s", "51d0") == "millpond/sink/51d0/z/s"
    assert sink_app_id("51d0", "z", "s", "77ab") == "millpond/sink/51d0/z/s/77ab"
