"""Delta actions and commit files."""

from __future__ import annotations

import orjson
import pytest

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Other, Protocol, Remove, Txn
from millpond.statestore.log.commit_file import decode, digest_of, encode

ADD = Add(
    path="computation=a%20b/7.parquet",
    size_bytes=10,
    partition_values={"computation": "a b"},
    modification_time_ms=5,
    stats='{"numRecords":1}',
    tags={"interval": "i"},
)
EVERY_KIND: tuple[Action, ...] = (
    Protocol(),
    Metadata(
        table_id="id",
        name="rows",
        schema_string="{}",
        partition_columns=("computation",),
        configuration={"k": "v"},
        created_ms=1,
    ),
    Txn(app_id="a", version=3, updated_ms=9),
    ADD,
    Remove(path="x.parquet", deletion_time_ms=8, partition_values={}, size_bytes=1, data_change=False),
)
INFO = CommitInfo(operation="WRITE", timestamp_ms=1, millpond={"writer": "w", "previous": "p"})


class TestEncode:
    def test_actions_round_trip(self) -> None:
        assert decode(encode(EVERY_KIND)) == EVERY_KIND

    def test_commit_info_is_first_line(self) -> None:
        lines = encode((*EVERY_KIND, INFO)).splitlines()

        assert "commitInfo" in orjson.loads(lines[0])
        assert len(lines) == 6

    def test_paths_are_url_encoded_in_log_only(self) -> None:
        """Delta escapes a percent sign of a real path once more."""
        data = encode((ADD,))

        assert orjson.loads(data)["add"]["path"] == "computation=a%2520b/7.parquet"
        assert decode(data) == (ADD,)

    def test_metadata_must_be_json(self) -> None:
        with pytest.raises(InvalidError):
            encode((CommitInfo(operation="x", timestamp_ms=1, millpond={"big": 2**70}),))

    def test_unknown_action_is_not_written(self) -> None:
        with pytest.raises(DataError):
            encode((Other(name="cdc"),))


class TestDecode:
    def test_unknown_actions_and_fields_are_tolerated(self) -> None:
        data = b'{"cdc":{"path":"x"}}\n{"txn":{"appId":"a","version":1,"new":true}}\n{}\n'

        assert decode(data) == (Other(name="cdc"), Txn(app_id="a", version=1), Other(name=""))

    @pytest.mark.parametrize(
        "data", [b"", b"\n", b"\0\0\0\0", b'{"add":{"pa', b"[]", b'{"add":{"path":1}}', b"7", b'{"txn":{}}']
    )
    def test_malformed_commit_is_named(self, data: bytes) -> None:
        with pytest.raises(DataError, match=r"7\.json"):
            decode(data, "7.json")


class TestSeal:
    def test_commit_cut_at_line_end_is_refused(self) -> None:
        lines = encode((INFO, *EVERY_KIND)).splitlines(keepends=True)

        for kept in range(1, len(lines)):
            with pytest.raises(DataError, match="incomplete"):
                decode(b"".join(lines[:kept]), "f")

    def test_flipped_bit_is_noticed_or_breaks_chain(self) -> None:
        data = encode((INFO, *EVERY_KIND))
        silent = 0
        for at in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << at % 8
            assert digest_of(bytes(flipped)) != digest_of(data)
            try:
                actions = decode(bytes(flipped), "f")
            except DataError:
                continue
            # A flip that passes can only be in the words "commitInfo" or "millpond", which removes the seal.
            silent += 1
            assert actions[1:] == EVERY_KIND
        assert silent <= 8 * len("commitInfomillpond")

    def test_foreign_commit_needs_no_seal(self) -> None:
        foreign = CommitInfo(operation="OPTIMIZE", timestamp_ms=1)

        assert decode(encode((foreign, ADD)))[1] == ADD
