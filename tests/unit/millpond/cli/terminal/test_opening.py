"""Options of object stores, which hold secrets."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.cli.terminal.opening import read_options, storage_option
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store


@click.command()
@storage_option
def show(storage_options: tuple[str, ...]) -> None:
    click.echo(read_options(storage_options))


def test_options_come_from_file_environment_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('aws_secret_access_key = "a=b"\naws_region = "x"\n')
    call = ["--storage-options-file", str(file)]
    both = {"aws_secret_access_key": "a=b", "aws_region": "x"}

    assert CliRunner().invoke(show, call).output.strip() == str(both)
    environment = {"MILLPOND_STORAGE_OPTIONS_FILE": str(file)}
    changed = CliRunner().invoke(show, ["--storage-option", "aws_region=y"], env=environment)
    assert changed.output.strip() == str(both | {"aws_region": "y"})


@pytest.mark.parametrize(
    "text",
    [
        "SECRET", 'key = SECRET"', "[key]\nSECRET = 1", "key = 7", None, "SECRET = " + "[" * 9_000, "x." * 9_000 + "x = 1",
        "SECRET = 1" + "0" * 5_000, "SECRET = 9999-99-99",
    ],
)  # fmt: skip
def test_unusable_file_is_not_quoted(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "options.toml"
    if text is not None:
        file.write_text(text)
    done = CliRunner().invoke(main, ["status", "s3://b/pond", "--storage-options-file", str(file)])

    assert done.exit_code == 1
    assert str(file) in done.output
    assert "SECRET" not in done.output + repr(done.exception)


@pytest.mark.parametrize("option", ["SECRET", "=SECRET"])
def test_option_without_name_is_refused_and_hidden(option: str) -> None:
    with pytest.raises(InvalidError, match="NAME=VALUE") as caught:
        read_options((option,))

    assert "SECRET" not in str(caught.value)


def test_catalog_url_comes_from_environment_without_showing_password(
    tmp_path: Path, zookeeper_hosts: str
) -> None:
    Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts).close()
    for url in (
        "nosuch+driver://u:SECRET@h/db",
        "nosuch+driver://u@h/db?password=SECRET",
        "sqlite://u:SEC@RET@h/",
    ):
        environment = {"MILLPOND_CATALOG": url}
        done = CliRunner().invoke(
            main, ["gc", str(tmp_path / "pond"), "--zookeeper", zookeeper_hosts], env=environment
        )

        assert done.exit_code == 1
        assert "catalog" in done.output
        assert "SEC" not in done.output
        assert "RET" not in done.output
