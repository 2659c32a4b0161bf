"""Key extractors: field names, functions, and the record's own key."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.inputs.keys import check_key_extractor, extract_key, extract_key_column, extract_keys
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import decode_key, encode_key
from tests.fixtures.typed_keys import key_types, key_values


class Decoded:
    """Values that count how often they are decoded."""

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
    def test_extractor_may_be_none_a_name_or_a_function(self):
        value = {"city": "Bergen"}

        assert extract_key(None, "own", value) == "own"
        assert extract_key("city", "own", value) == "Bergen"
        assert extract_key(lambda v: v["city"].lower(), "own", value) == "bergen"

    @pytest.mark.parametrize(
        "missing", [None, pd.NaT, pd.NA, float("nan"), np.float64("nan"), np.datetime64("NaT")]
    )
    def test_missing_value_of_pandas_is_a_null(self, missing):
        for one in ("city", lambda row: row["city"]):
            with pytest.raises(InvalidError, match="the key is null"):
                extract_key(one, None, {"city": missing})

        row, nulls = {"city": missing, "n": 1}, {"city": None, "n": 1}
        for several in (("city", "n"), lambda row: (row["city"], row["n"])):
            assert extract_key(several, None, row) == extract_key(("city", "n"), None, nulls)
        several = extract_keys(("city", "n"), pa.nulls(2, pa.string()), [row, nulls].__getitem__).keys
        assert several[0] == several[1]

    @pytest.mark.parametrize("text", ["\td4711", "\tname", "\t=no\td4711", "\t", "\t=\x1fIx"])
    def test_text_of_data_is_never_taken_for_a_typed_key(self, text):
        (key,) = {
            extract_key("city", None, {"city": text}),
            extract_key_column("city", pa.table({"city": [text]})).keys[0].as_py(),
        }

        assert decode_key(key) == (text,)

    def test_text_from_code_is_the_typed_key_that_it_spells(self):
        typed = encode_key(("no", 4711))

        assert extract_key(lambda _: typed, None, {}) == typed
        assert decode_key(extract_key(lambda _: "\tname", None, {})) == ("\tname",)
        assert decode_key(extract_key(lambda _: "\td04711", None, {})) == ("\td04711",)

    @pytest.mark.parametrize(
        ("extractor", "own", "value", "text"),
        [
            (None, None, {}, "null"),
            ("city", "own", {}, "no such field"),
            ("city", "own", {"city": None}, "null"),
            ("city", "own", {"city": [5]}, "no values of this type"),
            (["city", "n"], "own", {"city": 5}, "no such field.*field=`n`"),
            (["city"], "own", {"city": {}}, "at least one field"),
            (lambda _: 5, "own", 1, "return text, or a tuple"),
            ("city", "own", [1], "no fields"),
            ("city", "own", '{"city": "a", "x": NaN}', "no fields.*it is no JSON: unexpected character"),
            (broken, "own", 1, "KeyError"),
            (lambda _: b"bytes", "own", 1, "not text"),
            (lambda _: "\ud800", "own", 1, "UTF-8"),
        ],
    )
    def test_missing_or_invalid_key_is_refused_with_a_reason(self, extractor, own, value, text):
        with pytest.raises(InvalidError, match=text):
            extract_key(extractor, own, value)

    def test_empty_and_unicode_texts_are_keys(self):
        assert extract_key("k", None, {"k": ""}) == ""
        assert extract_key("k", None, {"k": "blåbær 🫐"}) == "blåbær 🫐"

    def test_other_types_lists_and_tuples_make_typed_keys(self):
        value = {"city": "Bergen", "card": 4711, "none": None}

        assert extract_key("card", "own", value) == encode_key((4711,))
        assert extract_key(("city",), "own", value) == encode_key(("Bergen",))
        assert extract_key(["city", "card", "none"], "own", value) == encode_key(("Bergen", 4711, None))
        assert extract_key(lambda v: (v["card"], v["city"]), "own", value) == encode_key((4711, "Bergen"))


class TestMany:
    def test_own_keys_are_read_without_decoding_values(self):
        values = Decoded(1, 2)

        extracted = extract_keys(None, pa.array(["a", "b"]), values.value)

        assert extracted.keys.to_pylist() == ["a", "b"]
        assert values.reads == 0

    def test_failing_record_leaves_the_others_their_keys(self):
        extracted = extract_keys(
            "k", pa.array(["a", "b", "c"]), Decoded({"k": "x"}, {"k": []}, {"k": "z"}).value
        )

        assert extracted.keys.to_pylist() == ["x", None, "z"]
        assert list(extracted.errors) == [1]

    def test_null_own_key_is_an_error(self):
        """Such a record needs an extractor."""
        assert list(extract_keys(None, pa.array(["a", None]), Decoded(1, 2).value).errors) == [1]

    @given(st.data())
    def test_keys_of_many_rows_equal_the_keys_of_each(self, data):
        """A row without a key must not disturb the others."""
        kinds = data.draw(st.tuples(key_types(), key_types()))
        cells = [st.one_of(key_values(kind), st.sampled_from([2**63, "\ud800", []])) for kind in kinds]
        row = st.fixed_dictionaries({"a": cells[0]}, optional={"b": cells[1]})
        rows = data.draw(st.lists(row, max_size=5))

        for extractor in (("a", "b"), lambda row: (row["a"], row["b"])):
            together = extract_keys(extractor, pa.nulls(len(rows), pa.string()), Decoded(*rows).value)

            keys, errors = [], {}
            for place, one in enumerate(rows):
                try:
                    keys.append(extract_key(extractor, None, one))
                except InvalidError as error:
                    keys.append(None)
                    errors[place] = str(error)
            assert together.keys.to_pylist() == keys
            assert together.errors == errors

    @pytest.mark.parametrize(
        "made",
        [
            [(1, "a"), (2, None)],
            [(1,), (2, "a")],
            [(1,), (True,), (1.0,)],
            [(1,), "1"],
            [(), (1,)],
            [(float("nan"),), (-0.0,)],
            [(None,), (pd.NaT,)],
        ],
    )
    def test_keys_that_a_function_returns_do_not_depend_on_the_other_rows(self, made):
        together = extract_keys(made.__getitem__, pa.nulls(len(made), pa.string()), lambda row: row)

        alone = [
            extract_keys(made.__getitem__, pa.nulls(1, pa.string()), lambda _, row=row: row)
            for row in range(len(made))
        ]
        assert together.keys.to_pylist() == [one.keys[0].as_py() for one in alone]
        assert together.errors == {row: one.errors[0] for row, one in enumerate(alone) if one.errors}


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
    def test_text_columns_of_every_layout_give_the_same_keys(self, column):
        extracted = extract_key_column("k", pa.table({"k": column}))

        assert extracted.keys.to_pylist() == ["a", None, "c"]
        assert extracted.keys.type == pa.string()
        assert list(extracted.errors) == [1]

    def test_function_gets_each_row_of_a_table_as_a_dict(self):
        rows = pa.table({"a": ["x", "y"], "b": [1, 2]})

        assert extract_key_column(lambda row: f"{row['a']}{row['b']}", rows).keys.to_pylist() == ["x1", "y2"]

    def test_missing_or_nested_column_is_refused_by_name(self):
        with pytest.raises(InvalidError, match="column=`q`"):
            extract_key_column("q", pa.table({"k": ["a"]}))
        with pytest.raises(InvalidError, match=r"single values.*column=`k`"):
            extract_key_column("k", pa.table({"k": [[1]]}))
        with pytest.raises(InvalidError, match="column=`q`"):
            extract_key_column(("k", "q"), pa.table({"k": [1]}))

    def test_typed_keys_of_columns_equal_those_of_rows(self):
        """A null alone is no key; in a list of fields it is a part of the key."""
        rows = pa.table({"k": [1, None, 3], "t": ["a", None, "c"]})

        for extractor in ("k", "t", ("k", "t"), ("t",)):
            by_column = extract_key_column(extractor, rows)
            by_row = extract_keys(extractor, pa.nulls(3, pa.string()), Decoded(*rows.to_pylist()).value)

            assert by_column.keys.to_pylist() == by_row.keys.to_pylist()
            assert by_column.errors == dict.fromkeys(by_row.errors, "the key is null")
            assert list(by_column.errors) == ([1] if isinstance(extractor, str) else [])

    def test_date_outside_of_the_calendar_has_its_own_error(self):
        """A null has a different error."""
        days = pa.array([0, 2_932_897, None], pa.int32()).cast(pa.date32())

        errors = extract_key_column("d", pa.table({"d": days})).errors

        assert errors == {1: "a date or time in the key is not in the years 1 to 9999", 2: "the key is null"}


class TestCheck:
    def test_check_accepts_every_form(self):
        for extractor in ("city", ["city", "card"], ("city",), str, None):
            check_key_extractor(extractor)

    @pytest.mark.parametrize("extractor", [5, "", [], ["city", 5], ["city", ""], ["city", "city"]])
    def test_check_names_the_computation_of_an_invalid_extractor(self, extractor):
        with pytest.raises(InvalidError, match="computation=`counter`"):
            check_key_extractor(extractor, computation="counter")
