from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.executor.inputs.payload import json_schema_text, read_schema_file


def test_schema_may_be_a_path_text_or_parsed_json(tmp_path: Path) -> None:
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
def test_missing_file_and_invalid_schema_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(mp.InvalidError, match=message):
        json_schema_text(schema, "the schema")


def test_folder_instead_of_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(mp.InvalidError, match="Is a directory"):
        read_schema_file(tmp_path, "the schema")
