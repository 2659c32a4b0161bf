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
    def test_actions_come_back(self) -> None:
        """Decoding what was encoded gives the same actions."""
        assert decode(encode(EVERY_KIND)) == EVERY_KIND

    def test_commit_info_comes_first(self) -> None:
        """The first line is the commitInfo, wherever it stood."""
        lines = encode((*EVERY_KIND, INFO)).splitlines()

        assert "commitInfo" in orjson.loads(lines[0])
        assert len(lines) == 6

    def test_paths_are_url_encoded_in_the_file_only(self) -> None:
        """A percent sign of a real path is escaped once more in the log, as Delta has it."""
        data = encode((ADD,))

        assert orjson.loads(data)["add"]["path"] == "computation=a%2520b/7.parquet"
        assert decode(data) == (ADD,)

    def test_what_is_not_json_is_refused(self) -> None:
        """Metadata that JSON cannot say raises InvalidError before anything is written."""
        with pytest.raises(InvalidError):
            encode((CommitInfo(operation="x", timestamp_ms=1, millpond={"big": 2**70}),))

    def test_an_unknown_action_is_not_written(self) -> None:
        """What was read without being understood cannot be written."""
        with pytest.raises(DataError):
            encode((Other(name="cdc"),))


class TestDecode:
    def test_unknown_actions_and_fields_are_tolerated(self) -> None:
        """What other writers add to the protocol is counted and otherwise left alone."""
        data = b'{"cdc":{"path":"x"}}\n{"txn":{"appId":"a","version":1,"new":true}}\n{}\n'

        assert decode(data) == (Other(name="cdc"), Txn(app_id="a", version=1), Other(name=""))

    @pytest.mark.parametrize(
        "data", [b"", b"\n", b"\0\0\0\0", b'{"add":{"pa', b"[]", b'{"add":{"path":1}}', b"7", b'{"txn":{}}']
    )
    def test_damaged_bytes_are_named(self, data: bytes) -> None:
        """Bytes that are no commit raise DataError with the file's name."""
        with pytest.raises(DataError, match=r"7\.json"):
            decode(data, "7.json")


class TestSeal:
    def test_every_cut_at_a_line_end_is_noticed(self) -> None:
        """A Millpond commit that lost whole lines is refused."""
        lines = encode((INFO, *EVERY_KIND)).splitlines(keepends=True)

        for kept in range(1, len(lines)):
            with pytest.raises(DataError, match="incomplete"):
                decode(b"".join(lines[:kept]), "f")

    def test_every_flipped_bit_is_noticed_or_breaks_the_chain(self) -> None:
        """No changed bit leaves the actions different unseen, and each one changes the digest."""
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
            # What passes can only have hit the words "commitInfo" or "millpond", which unseal it.
            silent += 1
            assert actions[1:] == EVERY_KIND
        assert silent <= 8 * len("commitInfomillpond")

    def test_a_foreign_commit_needs_no_seal(self) -> None:
        """A commit without Millpond's part is read as it is."""
        foreign = CommitInfo(operation="OPTIMIZE", timestamp_ms=1)

        assert decode(encode((foreign, ADD)))[1] == ADD
