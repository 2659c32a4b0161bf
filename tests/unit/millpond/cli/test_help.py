"""The examples in the help of every command, run on a store that has the names in them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner, Result
from kazoo.client import KazooClient

from millpond.cli.main import main
from millpond.cli.terminal.cli_help import EXIT_CODES, Example, TeachingCommand, TeachingGroup
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from tests.prepared_pond import write_pond

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def _commands() -> Iterator[str]:
    for name in main.list_commands(click.Context(main)):
        yield name
        command = main.get_command(click.Context(main), name)
        if isinstance(command, click.Group):
            yield from (f"{name} {own}" for own in command.list_commands(click.Context(command)))


COMMANDS: Final = [*_commands()]
_REST: Final = re.compile(r"\s+(?:\|\s*(?P<filter>jq .*)|>>?\s*\S+)$")
_FIELD: Final = re.compile(r"(?<![\w.])\.(\w+)")


def command_of(name: str) -> TeachingCommand | TeachingGroup:
    found: click.Command | None = main
    for word in name.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word)
    assert isinstance(found, TeachingCommand | TeachingGroup)
    return found


def on_spark(example: str) -> bool:
    return "--spark" in shlex.split(example)


@dataclass(frozen=True)
class Template:
    """The initial folder of the examples, with its nodes in ZooKeeper."""

    folder: Path
    kept: Path
    zookeeper: KazooClient
    nodes: dict[str, bytes]

    def restore(self) -> None:
        shutil.copytree(self.kept, self.folder)
        self.zookeeper.delete(min(self.nodes), recursive=True)
        for path, value in self.nodes.items():
            self.zookeeper.create(path, value)


def _nodes(zookeeper: KazooClient, path: str) -> Iterator[tuple[str, bytes]]:
    yield path, zookeeper.get(path)[0]
    for child in zookeeper.get_children(path):
        yield from _nodes(zookeeper, f"{path}/{child}")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, zookeeper_hosts: str) -> Iterator[Template]:
    """Create the folder once, on the shared ZooKeeper: a server for each example costs more than all examples."""
    folder = tmp_path_factory.mktemp("examples") / "here"
    folder.mkdir()
    zookeeper = KazooClient(zookeeper_hosts)
    zookeeper.start()
    zookeeper.ensure_path("/millpond")
    others = set(zookeeper.get_children("/millpond"))
    with patch.object(EmbeddedZooKeeper, "start_or_join", lambda _: zookeeper_hosts):
        write_pond(folder)
    (store,) = set(zookeeper.get_children("/millpond")) - others
    kept = folder.with_name("kept")
    folder.rename(kept)
    yield Template(folder, kept, zookeeper, dict(_nodes(zookeeper, f"/millpond/{store}")))
    zookeeper.stop()
    zookeeper.close()


@pytest.fixture
def here(template: Template, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    template.restore()
    folder = template.folder
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(EmbeddedZooKeeper, "start_or_join", lambda _: zookeeper_hosts)
    yield folder
    sys.modules.pop("flights", None)
    shutil.rmtree(folder)


def run(example: str) -> Result:
    """Run our part of an example and check the rest against its output."""
    rest = _REST.search(example)
    line = example[: rest.start()] if rest else example
    program, *arguments = shlex.split(line)
    assert program == "millpond", example
    result = CliRunner().invoke(main, arguments, input="y\n" * 9, prog_name="millpond")
    expected = example.exit_code if isinstance(example, Example) else 0
    assert result.exit_code == expected, f"{example}\n{result.output}\n{result.exception!r}"
    if rest and rest["filter"]:
        printed = [json.loads(line) for line in result.stdout.splitlines()]
        fields = _FIELD.findall(rest["filter"])
        assert fields, example
        assert all(fields[0] in each for each in printed), example
    return result


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_command_run(name: str, here: Path) -> None:
    """Output piped into ``jq`` must be JSON with the field."""
    examples = command_of(name).examples

    assert examples
    for example in examples:
        if not on_spark(example) and not (isinstance(example, Example) and example.not_run):
            run(example)


def test_examples_of_program_run(here: Path) -> None:
    for example in main.examples:
        run(example)


def test_examples_on_spark_run_in_existing_session(here: Path, spark: SparkSession) -> None:
    spark.sparkContext.addPyFile(str(here / "flights.py"))
    examples = [example for name in COMMANDS for example in command_of(name).examples if on_spark(example)]

    assert examples
    for example in examples:
        run(example)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_that_need_more_are_parsed(name: str) -> None:
    command = command_of(name)
    for example in command.examples:
        if isinstance(example, Example) and example.not_run is not None:
            assert example.not_run.strip(), example
            assert isinstance(command, click.Command)
            command.make_context(name, shlex.split(example)[1 + len(name.split()) :])


WRONG: Final = (
    "millpond rows pond no_such_computation",
    "millpond rows pond window_counter --no-such-option",
    "millpond no-such-command pond",
    "millpond status pond --json | jq .no_such_field",
    "millpond status pond | jq .version",
    Example("millpond status pond", exit_code=1),
)


def test_wrong_example_is_found(here: Path) -> None:
    for example in WRONG:
        with pytest.raises((AssertionError, ValueError)):
            run(example)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_exit_codes(name: str) -> None:
    """2 is wrong usage for every command."""
    words = name.split()
    shown = " ".join(CliRunner().invoke(main, [*words, "--help"]).stdout.split())

    assert (
        f"Exit codes: 0 {getattr(command_of(name), 'exit_codes', EXIT_CODES).get(0, EXIT_CODES[0])}" in shown
    )
    assert f"2 {EXIT_CODES[2]}" in shown
    assert CliRunner().invoke(main, [*words, "--no-such-option"]).exit_code == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if not isinstance(command_of(name), click.Group)])
def test_every_command_has_json(name: str) -> None:
    command = command_of(name)
    assert isinstance(command, click.Command)
    options = {option for parameter in command.params for option in parameter.opts}

    assert "--json" in options
