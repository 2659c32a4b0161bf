"""Several combiners at once, one for each field."""

from __future__ import annotations

import inspect
from typing import Any, get_overloads

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp
from millpond.executor.windows.combiners import CombineFields
from millpond.statestore.rows.codec import JsonCodec

_PARTS: dict[str, mp.CombineFn] = {
    "total": mp.Sum("amount"),
    "mean": mp.Mean("amount"),
    "visits": mp.Count(),
    "best": mp.TopN(3, "amount", retractable=True),
    "all": mp.ToList("amount"),
    "kinds": mp.CountDistinct("amount"),
    "middle": mp.Quantiles("amount"),
}
_ELEMENTS = st.lists(
    st.one_of(st.integers(-9, 9), st.floats(-9, 9)).map(lambda amount: {"amount": amount}), max_size=9
)


def _stored(accumulator: Any) -> Any:
    codec = JsonCodec()
    return codec.decode(codec.encode(accumulator))


def _over(combine: mp.CombineFn, elements: list[Any]) -> Any:
    return _stored(combine.add_all(combine.create(), elements))


@given(parts=st.lists(_ELEMENTS, min_size=1, max_size=3), goes=_ELEMENTS, data=st.data())
def test_each_field_is_what_its_combiner_gives_alone(
    parts: list[list[Any]], goes: list[Any], data: st.DataObject
) -> None:
    """Holds whether elements are added singly or together, merged, retracted or stored."""
    together = CombineFields(_PARTS)

    def value(combine: mp.CombineFn) -> Any:
        accumulator = combine.merge([_over(combine, part) for part in [*parts, goes]])
        for element in gone:
            accumulator = _stored(combine.uncombine(accumulator, element))
        return combine.extract(combine.add(accumulator, {"amount": 1}))

    gone = data.draw(st.permutations(goes))

    assert value(together) == {name: value(combine) for name, combine in _PARTS.items()}


def test_empty_fields_show_each_combiners_empty_value() -> None:
    combine = CombineFields({"total": mp.Sum(), "mean": mp.Mean(), "most": mp.Max()})

    assert combine.extract(combine.create()) == {"total": 0, "mean": None, "most": None}


def test_retractions_need_support_from_every_combiner() -> None:
    both = CombineFields({"visits": mp.Count(), "most": mp.Max()})

    assert not both.can_uncombine
    assert CombineFields(_PARTS).can_uncombine
    with pytest.raises(mp.InvalidError, match="retractable"):
        both.uncombine(both.add(both.create(), 3), 3)


def test_retraction_after_a_clear_lowers_sums_but_not_lists() -> None:
    combine = CombineFields({"total": mp.Sum(), "all": mp.ToList()})
    lists = CombineFields({"all": mp.ToList(), "best": mp.TopN(2, retractable=True)})
    accumulator, has_effect = combine.uncombine_if_held(combine.add(combine.create(), 3), 5)

    assert (combine.extract(accumulator), has_effect) == ({"total": -2, "all": [3]}, True)
    assert lists.uncombine_if_held(lists.create(), 5) == (lists.create(), False)


def test_fields_can_be_added_and_removed_between_runs() -> None:
    before = _over(CombineFields({"visits": mp.Count(), "gone": mp.Count()}), [1, 2])
    after = CombineFields({"visits": mp.Count(), "total": mp.Sum()})

    assert after.extract(after.add(before, 7)) == {"visits": 3, "total": 7}
    assert after.extract(before) == {"visits": 2, "total": 0}


def _windowed() -> mp.WindowedStream:
    return mp.Pipeline("p").inject("scores", key="user", at="at").window(mp.FixedWindows("1h"))


def test_fields_are_keywords_or_a_mapping() -> None:
    """A mapping can name fields that a keyword would mistake for options."""
    windowed = _windowed()
    windowed.combine(total=mp.Sum(), visits=mp.Count(), name="keywords", retries=0)
    windowed.combine({"name": mp.Count(), "retries": mp.Sum()}, name="mapping", intervals=3)
    topology = windowed.stream.pipeline.check()  # type: ignore[attr-defined]  # a pipeline

    nodes = topology.computations
    assert list(nodes["keywords"].computation.combine.fields) == ["total", "visits"]
    assert list(nodes["mapping"].computation.combine.fields) == ["name", "retries"]
    assert (nodes["keywords"].retries, nodes["mapping"].intervals) == (0, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"combine": {}},
        {"combine": {"": mp.Count()}},
        {"combine": {3: mp.Count()}},
        {"combine": {"total": mp.Sum}},
        {"combine": "total"},
        {"total": "amount"},
        {"combine": mp.Count(), "retires": 0},
        {"combine": mp.Count(), "total": mp.Sum()},
    ],
    ids=str,
)
def test_invalid_fields_are_refused_naming_the_step(arguments: dict[str, Any]) -> None:
    with pytest.raises(mp.InvalidError) as refused:
        _windowed().combine(**arguments, name="totals")

    assert "totals" in "\n".join([str(refused.value), *getattr(refused.value, "__notes__", [])])


def test_every_option_is_an_argument_next_to_fields() -> None:
    """Type checkers would otherwise take an undeclared option for a field."""
    by_keyword = get_overloads(mp.WindowedStream.combine)[1]
    own = {"self", "name", "key", "result", "fields"}

    assert (
        inspect.signature(by_keyword).parameters.keys() - own
        == mp.types.ComputationOptions.__annotations__.keys()
    )
