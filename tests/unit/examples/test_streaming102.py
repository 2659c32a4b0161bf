"""*Streaming 102*: every figure of the article, and the nine events of the book, through the public API."""

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
    """All figures on the local runner."""
    return play_figures(FIGURES)


@pytest.mark.parametrize("number", FIGURES)
def test_the_figure_is_that_of_the_article(number: int, played: _Played) -> None:
    """Every pane has the article's value, window, timing and time; where the article errs, those of its own data."""
    figure = FIGURES[number]
    for panel, shown in played[number]:
        expected = figure.expected(panel)

        assert expected
        assert differences(expected, shown) == []


def test_all_figures_with_panes_are_there() -> None:
    """Each figure of the data has its pipeline: 2, 4, 6, 7, 8, 9, 10, 13, 14, 15 and 17."""
    assert list(FIGURES) == list(article()["figures"])
    assert list(FIGURES) == [2, 4, 6, 7, 8, 9, 10, 13, 14, 15, 17]


def test_table_1(played: _Played) -> None:
    """The second window's panes in each mode are the article's, and add up to 22, 43 and 22: its 51 is an error."""
    window = next(pane.window for pane in played[9][0][1] if pane.value == 8)
    figures = {"discarding": 9, "accumulating": 7, "accumulating_and_retracting": 10}
    sums = {}
    for mode, number in figures.items():
        panes = [pane for pane in played[number][-1][1] if pane.window == window]
        signed = [-pane.value if pane.is_retraction else pane.value for pane in panes]
        sums[mode] = sum(signed)

        assert sorted(signed) == sorted(value for row in table_1() for value in row[mode])
    assert sums == {"discarding": 22, "accumulating": 43, "accumulating_and_retracting": 22}


def test_what_is_dropped_is_counted() -> None:
    """In figure 8 the 6 comes within the allowed lateness and the 9 does not: one element is dropped."""
    panel = FIGURES[8].panels[0]
    outcome = play(stories()[panel.story], {"sums": panel.step})["sums"]

    assert [pane.value for pane in outcome.panes if pane.timing == "late"] == [11]
    assert outcome.dropped == 1


def test_differences_are_seen(played: _Played) -> None:
    """A pane that is missing, has another value, or comes at another time is a difference."""
    ((panel, shown),) = played[10]
    expected = FIGURES[10].expected(panel)

    assert differences(expected, shown[:-1])
    assert differences(expected[:-1], shown)
    assert differences([expected[1], expected[0], *expected[2:]], shown)


@pytest.mark.parametrize("name", book_cases())
def test_the_books_nine_events(name: str) -> None:
    """The nine events of the book give the panes that Beam gives: values, windows, timing, indices and times."""
    assert book_differences(name, play_book(name)) == []


def test_the_books_cases_are_all_there() -> None:
    """Of the book's 13 cases two are left out, each for a reason that the file gives."""
    left_out = {case["name"]: case["why"] for case in book()["left_out"]}

    assert len({*book_cases(), *left_out}) == 13
    assert len(book_cases()) == 11
    assert all(left_out.values())


def test_scores_add_up_to_those_of_the_article_and_the_book() -> None:
    """The article's ten scores sum to 51 in both orders of arrival, and the book's nine to 48."""
    sums = {name: sum(score.value for score in story.scores) for name, story in stories().items()}
    batch = [row for row in rows(book()["streams"]["batch_bounded"]) if row[0] == "score"]

    assert sums.pop("with_a_late_six") == 57
    assert set(sums.values()) == {51}
    assert (len(batch), sum(int(row[1]) for row in batch)) == (9, 48)


def test_some_on_spark(spark: SparkSession) -> None:
    """On Spark the figures about accumulation have the article's panes too, all from one run."""
    for number, panels in play_figures([9, 10], spark).items():
        for panel, shown in panels:
            assert differences(FIGURES[number].expected(panel), shown) == []


@pytest.mark.spark_all
@pytest.mark.timeout(1_800)
def test_all_on_spark(spark: SparkSession) -> None:
    """On Spark every figure has the article's panes."""
    for number, panels in play_figures(FIGURES, spark).items():
        for panel, shown in panels:
            assert differences(FIGURES[number].expected(panel), shown) == []


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    """The command prints each pane, says that it is the article's, and draws a picture."""
    result = CliRunner().invoke(main, ["--figure", "17", "--out", str(tmp_path)], catch_exceptions=False)

    assert result.exit_code == 0
    assert "\N{MINUS SIGN}25" in result.output
    assert "as in the article" in result.output
    assert (tmp_path / "figure_17.png").read_bytes().startswith(b"\x89PNG")


def test_the_pipelines_are_of_the_public_library() -> None:
    """What a figure asks is a windowed stream of the public API."""
    pipeline = mp.Pipeline("asked")
    scores = pipeline.inject("scores", key="team", at="at")

    assert all(
        isinstance(panel.step(scores), mp.WindowedStream) for f in FIGURES.values() for panel in f.panels
    )
    assert isinstance(_first(FIGURES), Panel)


def _first(figures: Mapping[int, Any]) -> Panel:
    panel: Panel = next(iter(figures.values())).panels[0]
    return panel
