"""Commits of other engines that change the meaning of a store's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.log import foreign_change, refuse_foreign_change

STORE = {"millpond.storeId": "s", "delta.logRetentionDuration": "interval 1 day"}
ADD = Add(path="a", size_bytes=1, partition_values={}, modification_time_ms=0)
REMOVE = Remove(path="a", deletion_time_ms=0)
METADATA = Metadata(table_id="t", name=None, schema_string="{}", configuration=STORE)


def info(operation: str) -> CommitInfo:
    return CommitInfo(operation=operation, timestamp_ms=0, engine_info="other")


@pytest.mark.parametrize(
    "actions",
    [
        (info("WRITE"), ADD),
        (info("DELETE"), REMOVE),
        (ADD,),
        (info("RESTORE"), replace(REMOVE, data_change=False)),
        (info("OPTIMIZE"), replace(ADD, data_change=False), REMOVE),
        (info("WRITE"), Txn(app_id="millpond/input/p/s/x", version=1)),
        (info("SET TBLPROPERTIES"), replace(METADATA, configuration={})),
    ],
)
def test_data_changes_are_refused(actions: tuple[Action, ...]) -> None:
    assert foreign_change(actions, STORE) is not None


@pytest.mark.parametrize(
    "actions",
    [
        (info("OPTIMIZE"), replace(ADD, data_change=False), replace(REMOVE, data_change=False)),
        (info("VACUUM START"),),
        (info("RESTORE"),),
        (info("WRITE"), Txn(app_id="other", version=1)),
        (info("SET TBLPROPERTIES"), METADATA),
        (info("UPGRADE PROTOCOL"), Protocol(min_writer_version=3)),
        (replace(info("MILLPOND REPAIR"), millpond={"kind": "repair"}), ADD, REMOVE),
    ],
)
def test_commits_without_data_change_are_accepted(actions: tuple[Action, ...]) -> None:
    assert foreign_change(actions, STORE) is None


def test_plain_table_accepts_all_commits() -> None:
    """The table of a sink may be written, restored and cleaned by anyone."""
    assert foreign_change((info("RESTORE"), ADD, REMOVE), {"delta.appendOnly": "false"}) is None


def test_commit_without_operation_is_named_by_version() -> None:
    with pytest.raises(DataError, match=r"version=`7` operation=`unknown` engine=`unknown`.*0007\.json"):
        refuse_foreign_change(7, (ADD,), STORE)
