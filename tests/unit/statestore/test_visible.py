"""Values from outside in errors, logs and JSON."""

from __future__ import annotations

import json
import logging
import pickle
import re

import pytest

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.visible import (
    CHARACTERS_MAX,
    options_without_secrets,
    visible,
    visible_json,
    visible_lines,
    without_secrets,
)

HOSTILE = (
    "\x1b]0;owned\x07", "\x1b[2K", "\x1b]52;c;cm0=\x07", "\x9b31m", "\r", "\n", "\u2028", "\u2029", "\x85",
    "\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\x7f", "\x00", "\U000e0041", "\ud800", "\t", "\x08",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_escaped(text: str) -> None:
    for shown in (visible(f"a{text}b"), str(InvalidError(f"a{text}b")), str(DataError("a", key=text))):
        assert shown.isprintable()
        assert re.search(r"\\[xuUnrt]", shown)


@pytest.mark.parametrize(
    "text", ["key", "Müller", "日本語", "Ελλάδα 🎉", "a b", 'a\\b"c', "עברית", "e\u0301"]
)
def test_letters_of_any_language_stay(text: str) -> None:
    assert visible(text) == visible_lines(text) == visible_json(text) == text


def test_line_breaks_stay_in_text() -> None:
    assert visible_lines("a\n\x1bb\r\nc") == "a\n\\x1bb\\r\nc"


@pytest.mark.parametrize("text", HOSTILE)
def test_json_is_equal_and_harmless(text: str) -> None:
    shown = visible_json(json.dumps({"k": text}, ensure_ascii=False))

    assert shown.isprintable()
    assert json.loads(shown) == {"k": text}


def test_long_value_is_cut_in_error_and_kept_in_details() -> None:
    error = DataError("it is damaged", row="x" * 10_000)

    assert len(str(error)) < CHARACTERS_MAX + 100
    assert str(error).endswith("… (10,000 characters)`")
    assert error.details["row"] == "x" * 10_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_note_of_error_keeps_its_lines() -> None:
    error = DataError("it failed")
    error.add_note("line\n\x1b[2Jline password=abc")

    assert error.__notes__ == ["line\n\\x1b[2Jline password=***"]


def test_log_line_is_one_line_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("millpond")
    logger.warning("key=`%s` of %d", "a\nforged: \x1b[2J", 7)
    logger.warning("url=`%s`", InvalidError("x", url="postgresql://u:SECRET@h/db"))
    logger.warning("key=`%(key)s`", {"key": "a\x1bb"})
    logger.warning("raw \x1b\n")

    assert [record.getMessage() for record in caplog.records] == [
        "key=`a\\nforged: \\x1b[2J` of 7",
        "url=`x url=`postgresql://u:***@h/db``",
        "key=`a\\x1bb`",
        "raw \\x1b\\n",
    ]


def test_trace_in_log_shows_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    try:
        int("a\x1b[2J password=SECRET")
    except ValueError:
        logging.getLogger("millpond").warning("it failed", exc_info=True)

    assert "a\\x1b[2J password=***" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://u:SECRET@h:1/db",
        "postgresql+psycopg://u:SECRET@PW@h/db",
        "postgresql+psycopg://u:SEC/RET@h/db",
        "postgresql://h/db?user=u&password=SECRET&sslmode=require",
        "postgresql://u@h/db?sslpassword=SECRET",
        "mysql+pymysql://u@h/db?passwd=SECRET",
        "mysql://u@h/db?ssl_key=SECRET",
        "https://account.blob.core.windows.net/c?sv=1&sig=SECRET",
        "https://h/x?access_token=SECRET#end",
        "https://h/x?X-Amz-Signature=SECRET;b=1",
        "http://user:SECRET@127.0.0.1:9000",
        "host=h password=SECRET dbname=x",
        "aws_secret_access_key=SECRET",
    ],
)
def test_secrets_of_urls_are_hidden(url: str) -> None:
    for text in (
        without_secrets(f"no answer from '{url}' now"),
        str(InvalidError(url)),
        str(DataError("x", url=url)),
    ):
        assert "SECRET" not in text
        assert "PW" not in text
        assert "RET" not in text
        assert "***" in text


@pytest.mark.parametrize(
    "text",
    ["sqlite:////data/pond/catalog.sqlite", "s3://bucket/pond", "abfss://container@account.dfs.core.windows.net/pond",
     "key=`EWR` pairs=3", "postgresql://shop@h/db?sslmode=require", "at=2020-01-01T00:00:00+00:00"],
)  # fmt: skip
def test_text_without_secrets_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_values_of_secret_options_are_hidden() -> None:
    options = {
        "aws_secret_access_key": "S", "aws_session_token": "S", "azure_storage_sas_key": "S", "account_key": "S",
        "spark.hadoop.fs.s3a.secret.key": "S", "spark.ssl.keyPassword": "S", "google_service_account_key": "S",
        "spark.sql.shuffle.partitions": "4", "aws_region": "eu",
    }  # fmt: skip
    shown = options_without_secrets(options)

    assert [name for name, value in shown.items() if value == "***"] == list(options)[:7]
    assert "S" not in shown.values()
