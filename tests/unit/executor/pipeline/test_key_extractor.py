"""
Key extractors: field names, functions, and the record's own key.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.executor.pipeline.key_extractor import (
    check_key_extractor,
    extract_key,
    extract_key_column,
    extract_keys,
)
from millpond.statestore.errors import InvalidError


class Decoded:
    """
    Values that count how often they are decoded.
    """

    def __init__(self, *values: object) -> None:
        self.values = values
        self.reads = 0

    def __len__(self) -> int:
        return len(self.values)

    def value(self, index):
        self.reads += 1
        return self.values[index]


def broken(value):
    raise KeyError(value)


class TestOne:
    def test_three_forms_give_the_key(self):
        """
        None keeps the record's own key, a name takes a field, a function computes.
        """
        value = {"city": "Bergen"}

        assert extract_key(None, "own", value) == "own"
        assert extract_key("city", "own", value) == "Bergen"
        assert extract_key(lambda v: v["city"].lower(), "own", value) == "bergen"

    @pytest.mark.parametrize(
        ("extractor", "own", "value", "text"),
        [
            (None, None, {}, "null"),
            ("city", "own", {}, "no such field"),
            ("city", "own", {"city": None}, "null"),
            ("city", "own", {"city": 5}, "not text"),
            ("city", "own", [1], "no fields"),
            (broken, "own", 1, "KeyError"),
            (lambda _: b"bytes", "own", 1, "not text"),
            (lambda _: "\ud800", "own", 1, "UTF-8"),
        ],
    )
    def test_what_is_not_text_is_refused_with_a_reason(self, extractor, own, value, text):
        """
        A key that is missing, not text or not encodable, and a failing function, are errors.
        """
        with pytest.raises(InvalidError, match=text):
            extract_key(extractor, own, value)

    def test_the_empty_key_and_any_unicode_are_keys(self):
        """
        Every text is a key.
        """
        assert extract_key("k", None, {"k": ""}) == ""
        assert extract_key("k", None, {"k": "blåbær 🫐"}) == "blåbær 🫐"


class TestMany:
    def test_own_keys_cost_no_decoding(self):
        """
        Without an extractor no value is looked at.
        """
        values = Decoded(1, 2)

        extracted = extract_keys(None, pa.array(["a", "b"]), values)

        assert extracted.keys.to_pylist() == ["a", "b"]
        assert values.reads == 0

    def test_a_failing_record_does_not_disturb_the_others(self):
        """
        Keys are null exactly where there is an error.
        """
        extracted = extract_keys("k", pa.array(["a", "b", "c"]), Decoded({"k": "x"}, {"k": 1}, {"k": "z"}))

        assert extracted.keys.to_pylist() == ["x", None, "z"]
        assert list(extracted.errors) == [1]

    def test_null_own_keys_are_errors(self):
        """
        A record without a key of its own needs an extractor.
        """
        assert list(extract_keys(None, pa.array(["a", None]), Decoded(1, 2)).errors) == [1]


class TestColumn:
    @pytest.mark.parametrize(
        "column",
        [
            pa.array(["a", None, "c"]),
            pa.array(["a", None, "c"], pa.large_string()),
            pa.array(["a", None, "c"]).dictionary_encode(),
            pa.chunked_array([["a"], [None, "c"]]),
        ],
    )
    def test_text_columns_of_every_layout_are_keys(self, column):
        """
        Strings, large strings, dictionaries and chunks give the same keys; nulls are errors.
        """
        extracted = extract_key_column("k", pa.table({"k": column}))

        assert extracted.keys.to_pylist() == ["a", None, "c"]
        assert extracted.keys.type == pa.string()
        assert list(extracted.errors) == [1]

    def test_a_function_sees_rows(self):
        """
        A function gets each row as a dict.
        """
        rows = pa.table({"a": ["x", "y"], "b": [1, 2]})

        assert extract_key_column(lambda row: f"{row['a']}{row['b']}", rows).keys.to_pylist() == ["x1", "y2"]

    def test_a_missing_or_wrong_column_is_a_mistake_in_the_call(self):
        """
        Columns that cannot hold text are refused as a whole, by name.
        """
        with pytest.raises(InvalidError, match="column=`q`"):
            extract_key_column("q", pa.table({"k": ["a"]}))
        with pytest.raises(InvalidError, match="not text"):
            extract_key_column("k", pa.table({"k": [1]}))


class TestCheck:
    def test_names_functions_and_none_pass(self):
        """
        The three forms are accepted.
        """
        for extractor in ("city", str, None):
            check_key_extractor(extractor)

    @pytest.mark.parametrize("extractor", [5, "", ["city"]])
    def test_anything_else_names_computation_and_stream(self, extractor):
        """
        The error says whose extractor it is.
        """
        with pytest.raises(InvalidError, match="computation=`counter`"):
            check_key_extractor(extractor, computation="counter")
