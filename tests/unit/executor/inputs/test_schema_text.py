from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.executor.inputs.payload import json_schema_text, read_schema_file


def test_a_schema_is_a_file_a_text_or_an_object(tmp_path: Path) -> None:
    """The path of a file, as text too, the text itself and what JSON makes of it are the same schema."""
    file = tmp_path / "s.avsc"
    file.write_text('{"a":1}')

    assert {json_schema_text(one, "x") for one in (file, str(file), '{"a":1}', {"a": 1})} == {'{"a":1}'}
    assert json_schema_text(' ["null"]', "x") == ' ["null"]'
    assert json_schema_text(["null"], "x") == '["null"]'


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("none.avsc", "the schema cannot be read path=`none.avsc` reason=`No such file or directory`"),
        ('{"a"', "the schema is not JSON"),
        ({1: object()}, "the schema must be the path of a file, text, or parsed JSON type=`dict`"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    """A missing file, broken JSON and objects that JSON does not know are refused."""
    with pytest.raises(mp.InvalidError, match=message):
        json_schema_text(schema, "the schema")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """What cannot be read says why."""
    with pytest.raises(mp.InvalidError, match="Is a directory"):
        read_schema_file(tmp_path, "the schema")
