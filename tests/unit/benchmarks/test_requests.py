"""The requests that a store in an object store costs, counted at moto's S3: they do not grow with its age."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from benchmarks.requests import CLOCK, measure
from millpond.testing.servers.s3_proxy import S3Proxy

if TYPE_CHECKING:
    from millpond.testing.servers.s3_server import S3Server

SUPERSTEPS: Final = 24


@pytest.mark.parametrize("versions", [17, 150])
def test_requests_do_not_grow_with_age(s3_server: S3Server, versions: int) -> None:
    with S3Proxy(s3_server.port, CLOCK) as proxy:
        counts = measure(versions, SUPERSTEPS, s3_server, proxy)

    assert counts["open_to_read"]["all"] <= 20
    assert counts["open_to_write"]["all"] <= 20
    assert counts["status"]["all"] <= 20
    # Live files are read whatever the age: of 17 supersteps none has been compacted.
    start = sum(number for kind, number in counts["start"].items() if kind not in {"all", "GET data file"})
    of_sink = sum(number for kind, number in counts["start"].items() if "sink's" in kind)
    assert start - of_sink <= 17
    assert of_sink <= 14
    _check_superstep(counts["superstep"])


def _check_superstep(counts: dict[str, Any]) -> None:
    # Of the store and of the sink: the file and the commit.
    needed = [f"PUT {of}{kind}" for of in ("", "sink's ") for kind in ("data file", "commit")]
    # The sink gets a superstep while the next one runs, so one may be missing or be too many. A compaction adds one, and
    # two may fall into so many supersteps.
    for kind in needed:
        assert counts[kind] == pytest.approx(1, abs=3.1 / SUPERSTEPS), kind
    # A compaction of the sink costs two looks, its own and that of the next delivery.
    assert counts.get("GET sink's boundary", 0) <= 4.1 / SUPERSTEPS
    # The lease service knows the store's; only the first commit, and one after another writer's, look.
    assert counts.get("GET boundary", 0) <= 2.1 / SUPERSTEPS
    # Compactions read this machine's copies.
    assert counts.get("GET data file", 0) <= 4.1 / SUPERSTEPS
    # A checkpoint every eighth version costs two, and its helper reads some commits when it starts; marks come by time.
    ignored = ("mark", "sink's", "data file")
    others = {kind: number for kind, number in counts.items() if not any(part in kind for part in ignored)}
    assert sum(number for kind, number in others.items() if kind not in {*needed, "all"}) <= 1, others
