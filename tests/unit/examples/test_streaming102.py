"""The figures of the article *Streaming 102*, and the nine events of the book, through the public API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import millpond as mp
from examples.streaming102.__main__ import main
from examples.streaming102.article import article, stories, table_1
from examples.streaming102.book import book, book_cases, book_differences, play_book
from examples.streaming102.figures import FIGURES, Panel, differences, play_figures
from examples.streaming102.play import Shown, play
from examples.streaming102.tables import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Played = Mapping[int, list[tuple[Panel, list[Shown]]]]


@pytest.fixture(scope="module")
def played() -> _Played:
    """Play all figures on the local runner."""
    return play_figures(FIGURES)


@pytest.mark.parametrize("number", FIGURES)
def test_figure_has_the_panes_of_the_article(number: int, played: _Played) -> None:
    """Where the article errs, the panes follow from its own data."""
    figure = FIGURES[number]
    for panel, shown in played[number]:
        expected = figure.expected(panel)

        assert expected
        assert differences(expected, shown) == []


def test_every_figure_of_the_data_has_a_pipeline() -> None:
    assert list(FIGURES) == list(article()["figures"])
    assert list(FIGURES) == [2, 4, 6, 7, 8, 9, 10, 13, 14, 15, 17]


def test_table_1_is_that_of_the_article_except_for_its_sum(played: _Played) -> None:
    """The article's sum of 51 in accumulating mode is an error; its panes add up to 43."""
    window = next(pane.window for pane in played[9][0][1] if pane.value == 8)
    figures = {"discarding": 9, "accumulating": 7, "accumulating_and_retracting": 10}
    sums = {}
    for mode, number in figures.items():
        panes = [pane for pane in played[number][-1][1] if pane.window == window]
        signed = [-pane.value if pane.is_retraction else pane.value for pane in panes]
        sums[mode] = sum(signed)

        assert sorted(signed) == sorted(value for row in table_1() for value in row[mode])
    assert sums == {"discarding": 22, "accumulating": 43, "accumulating_and_retracting": 22}


def test_late_element_of_figure_8_is_counted_as_dropped() -> None:
    """The 6 is within the allowed lateness, the 9 is not."""
    panel = FIGURES[8].panels[0]
    outcome = play(stories()[panel.story], {"sums": panel.step})["sums"]

    assert [pane.value for pane in outcome.panes if pane.timing == "late"] == [11]
    assert outcome.dropped == 1


def test_missing_reordered_and_additional_panes_are_differences(played: _Played) -> None:
    ((panel, shown),) = played[10]
    expected = FIGURES[10].expected(panel)

    assert differences(expected, shown[:-1])
    assert differences(expected[:-1], shown)
    assert differences([expected[1], expected[0], *expected[2:]], shown)


@pytest.mark.parametrize("name", book_cases())
def test_nine_events_of_the_book_give_beams_panes(name: str) -> None:
    """Values, windows, timing, indices and times must agree."""
    assert book_differences(name, play_book(name)) == []


def test_every_case_of_the_book_is_played_or_left_out_with_a_reason() -> None:
    left_out = {case["name"]: case["why"] for case in book()["left_out"]}

    assert len({*book_cases(), *left_out}) == 13
    assert len(book_cases()) == 11
    assert all(left_out.values())


def test_scores_have_the_sums_of_article_and_book() -> None:
    sums = {name: sum(score.value for score in story.scores) for name, story in stories().items()}
    batch = [row for row in rows(book()["streams"]["batch_bounded"]) if row[0] == "score"]

    assert sums.pop("with_a_late_six") == 57
    assert set(sums.values()) == {51}
    assert (len(batch), sum(int(row[1]) for row in batch)) == (9, 48)


def test_figures_9_and_10_have_the_articles_panes_on_spark(spark: SparkSession) -> None:
    """Both figures are played in one run."""
    for number, panels in play_figures([9, 10], spark).items():
        for panel, shown in panels:
            assert differences(FIGURES[number].expected(panel), shown) == []


@pytest.mark.spark_all
@pytest.mark.timeout(1_800)
def test_all_figures_have_the_articles_panes_on_spark(spark: SparkSession) -> None:
    for number, panels in play_figures(FIGURES, spark).items():
        for panel, shown in panels:
            assert differences(FIGURES[number].expected(panel), shown) == []


def test_command_prints_panes_and_draws_a_picture(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--figure", "17", "--out", str(tmp_path)], catch_exceptions=False)

    assert result.exit_code == 0
    assert "\N{MINUS SIGN}25" in result.output
    assert "as in the article" in result.output
    assert (tmp_path / "figure_17.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_windowed_streams_of_the_public_api() -> None:
    pipeline = mp.Pipeline("asked")
    scores = pipeline.inject("scores", key="team", at="at")

    assert all(
        isinstance(panel.step(scores), mp.WindowedStream) for f in FIGURES.values() for panel in f.panels
    )
    assert isinstance(_first(FIGURES), Panel)


def _first(figures: Mapping[int, Any]) -> Panel:
    panel: Panel = next(iter(figures.values())).panels[0]
    return panel
