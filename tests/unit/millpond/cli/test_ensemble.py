"""Commands on a store that an ensemble serves, and ``millpond ensemble``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main
from millpond.statestore.leases.ensemble import HOSTS_VARIABLE, NO_ENSEMBLE, recorded_ensemble
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.system import SystemClock, SystemRng

pytestmark = pytest.mark.zookeeper

COMMANDS: Final = {
    "gc": "gc STORE",
    "rewind": "rewind STORE --version 1 --yes",
    "repair": "repair STORE --yes",
    "run": "run flights:pipeline --store STORE --input flights=flights",
    "upgrade": "upgrade STORE --app flights:pipeline",
    "load": "load STORE more counts.parquet",
    "adopt as restored": "adopt STORE --as restored",
    "retry": "dead-letters retry STORE --all",
    "drop": "dead-letters drop STORE --all",
    "withdraw": "dead-letters withdraw STORE",
    "split": "intervals STORE --split window_counter LAX",
    "savepoint": "savepoint STORE spring",
    "take-over": "take-over STORE out/spikes",
}


class Clicks(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


def clicks() -> mp.Pipeline:
    pipeline = mp.Pipeline("clicks")
    pipeline.inject("in", key="k", at="at").apply(Clicks(), name="counts")
    return pipeline


def write(store: Path, hosts: str | None = None) -> None:
    rows = [{"k": "a", "at": 1}]
    mp.LocalRunner(store, zookeeper=hosts, progress=False, upkeep=None).run(
        clicks(), {"in": rows}, finish=False
    )


def millpond(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env=environment)


def serves(store: Path) -> str:
    return str(json.loads(millpond("ensemble", store, "--json").stdout)["hosts"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pond(folder: Path, zookeeper_hosts: str) -> Path:
    """A store that the run's server serves, as an ensemble."""
    write(folder / "pond", zookeeper_hosts)
    return folder / "pond"


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedZooKeeper(tmp_path_factory.mktemp("other"), SystemClock(), SystemRng(), is_open=True)
    yield server.start_or_join()
    server.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_without_the_ensemble_is_refused(pond: Path, zookeeper_hosts: str, name: str) -> None:
    """The refusal starts no server, commits nothing, and speaks of the option."""
    Path("flights.py").write_text(
        "from tests.unit.millpond.cli.test_ensemble import clicks as pipeline\n", encoding="utf-8"
    )
    Path("flights").mkdir()
    Path("flights/1.jsonl").write_text('{"k": "a", "at": 2}\n', encoding="utf-8")
    Path("counts.jsonl").write_text('{"key": "EWR", "state": 1}\n', encoding="utf-8")
    line = COMMANDS[name].replace("flights=", "in=").replace("counts.parquet", "counts.jsonl")
    before = sorted(pond.rglob("*.json"))

    result = millpond(*line.replace("STORE", str(pond)).split())

    assert result.exit_code == 1, result.output
    assert "without the ensemble that serves it" in result.output
    assert f"give --zookeeper {zookeeper_hosts}" in result.output
    assert "zookeeper='" not in result.output
    assert not (pond / "zookeeper").exists()
    assert sorted(pond.rglob("*.json")) == before


def test_python_is_refused_in_its_own_words(pond: Path, zookeeper_hosts: str) -> None:
    with pytest.raises(mp.InvalidError, match=f"pass zookeeper='{zookeeper_hosts}'"):
        write(pond)


def test_environment_names_the_ensemble(
    pond: Path, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {HOSTS_VARIABLE: zookeeper_hosts}
    assert millpond("gc", pond, environment=named).exit_code == 0
    assert "dead" not in millpond("repair", pond, "--yes", environment=named).output
    monkeypatch.setenv(HOSTS_VARIABLE, zookeeper_hosts)
    write(pond)


def test_store_moves_to_another_ensemble_and_back_to_its_own_server(
    pond: Path, zookeeper_hosts: str, other: str
) -> None:
    refused = millpond("gc", pond, "--zookeeper", other)
    assert (refused.exit_code, "another ensemble" in refused.output) == (1, True)

    with mp.LocalRunner(pond, zookeeper=zookeeper_hosts, progress=False).start(clicks(), stepping=True):
        running = millpond("ensemble", pond, "--move-to", other)
        assert (running.exit_code, "is running" in running.output) == (1, True)
    moved = millpond("ensemble", pond, "--move-to", other)
    assert (moved.exit_code, serves(pond)) == (0, other), moved.output
    assert millpond("gc", pond, "--zookeeper", zookeeper_hosts).exit_code == 1
    write(pond, other)

    assert millpond("ensemble", pond, "--move-to", "own").exit_code == 0
    assert serves(pond) == ""
    write(pond)


def test_store_of_a_lost_ensemble_moves_without_asking_it(pond: Path, other: str) -> None:
    """Its hosts may answer no more."""
    lost = millpond("ensemble", pond, "--move-to", other, "--lost")
    assert (lost.exit_code, serves(pond)) == (0, other), lost.output
    write(pond, other)


def test_store_with_its_own_server_is_taken_over_by_an_ensemble_once_it_is_unused(
    folder: Path, zookeeper_hosts: str
) -> None:
    pond = folder / "pond"
    with mp.Store.open(pond), pytest.raises(mp.ConflictError, match="uses the store's own server"):
        write(pond, zookeeper_hosts)
    write(pond, zookeeper_hosts)
    assert serves(pond) == zookeeper_hosts


def copied(pond: Path) -> Path:
    return Path(shutil.copytree(pond, pond.with_name("trial")))


def forked(pond: Path) -> Path:
    trial = pond.with_name("trial")
    assert millpond("fork", pond, trial).exit_code == 0
    return trial


@pytest.mark.parametrize("made", [copied, forked])
def test_copy_and_fork_have_a_service_of_their_own(
    pond: Path, zookeeper_hosts: str, made: Callable[[Path], Path]
) -> None:
    trial = made(pond)
    if made is copied:
        adopted = millpond("adopt", trial, "--as", "copy")
        assert adopted.exit_code == 0, adopted.output
    write(trial)
    assert serves(trial) == ""
    write(pond, zookeeper_hosts)


def test_restored_backup_needs_its_ensemble(pond: Path, zookeeper_hosts: str) -> None:
    """Or another one, after the move that says that the first is lost."""
    backup = shutil.copytree(pond, pond.with_name("backup"))
    shutil.rmtree(pond)
    shutil.copytree(backup, pond)
    restored = millpond("adopt", pond, "--as", "restored", "--zookeeper", zookeeper_hosts)
    assert restored.exit_code == 0, restored.output
    write(pond, zookeeper_hosts)

    assert millpond("adopt", backup, "--as", "restored").exit_code == 1
    assert millpond("ensemble", backup, "--move-to", "own", "--lost").exit_code == 0
    assert millpond("adopt", backup, "--as", "restored").exit_code == 0
    write(backup)


def test_rewind_keeps_the_ensemble(pond: Path, zookeeper_hosts: str) -> None:
    done = millpond("rewind", pond, "--version", 1, "--yes", "--zookeeper", zookeeper_hosts)
    assert done.exit_code == 0, done.output
    assert serves(pond) == zookeeper_hosts


def test_first_opening_without_take_over_records_nothing(folder: Path, zookeeper_hosts: str) -> None:
    with mp.Store.open(folder / "pond", zookeeper=zookeeper_hosts) as store:
        assert recorded_ensemble(store.snapshot().txns) == NO_ENSEMBLE
