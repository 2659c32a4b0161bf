"""Stores named on the command line, and the options that open them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import click

from millpond.cli.completion import complete_savepoint, complete_store
from millpond.cli.terminal.options import Command, option, options, several
from millpond.cli.terminal.output import note
from millpond.statestore.errors import ConflictError, InvalidError, did_you_mean
from millpond.statestore.history.savepoint import Savepoint
from millpond.statestore.leases.ensemble import HOSTS_VARIABLE
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, read_toml
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.store import Store

_OPTIONS_VARIABLE: Final = "MILLPOND_STORAGE_OPTIONS_FILE"


@dataclass(frozen=True, slots=True)
class StoreAt:
    """A store named on the command line; ``storage_options`` are ``NAME=VALUE`` texts."""

    path: str
    storage_options: tuple[str, ...] = ()
    zookeeper: str | None = None
    zookeeper_security: ZooKeeperSecurity | None = None

    def to_read(self, catalog: str | None = None, *, check_mark: bool = True) -> Store:
        """Open the store read-only: no lease, no ZooKeeper server, no writes but a reader's horizon in the catalog."""
        options = read_options(self.storage_options)
        return Store.open(
            self.path,
            catalog=catalog,
            storage_options=options,
            create=False,
            read_only=True,
            check_mark=check_mark,
        )

    def to_write(self, *, create: bool = False, **options: Any) -> Store:
        """Open the store with the leases of its ensemble; see `Store.open` for further options."""
        return Store.open(
            self.path,
            zookeeper=self.zookeeper,
            zookeeper_security=self.zookeeper_security,
            storage_options=read_options(self.storage_options),
            create=create,
            **options,
        )

    @contextmanager
    def reading(self, named: str | None) -> Iterator[tuple[Store, Snapshot]]:
        """Open the store read-only with the version of that number or savepoint, pinned until the block ends.

        Without a name it is the newest version.
        """
        with self.to_read() as store, ExitStack() as resources:
            version = None if named is None else version_in(store.savepoints(), named)
            try:
                snapshot = resources.enter_context(store.reading(version))
            except ConflictError:
                # A version that is being collected cannot be pinned any more.
                snapshot = store.snapshot(version)
                note("that version is older than the retention: its files may be deleted at any moment")
            yield store, snapshot


def store_argument(command: Command) -> Command:
    """Add the argument STORE and the option --storage-option to a command, which gets a `StoreAt` as ``store``."""

    @wraps(command)
    def given(
        *arguments: Any,
        store: str,
        storage_options: tuple[str, ...],
        zookeeper: str | None = None,
        zookeeper_security: ZooKeeperSecurity | None = None,
        **options: Any,
    ) -> Any:
        place = StoreAt(store, storage_options, zookeeper, zookeeper_security)
        return command(*arguments, store=place, **options)

    return click.argument("store", shell_complete=complete_store)(storage_option(given))


def storage_option(command: Command) -> Command:
    """Add the options --storage-option and --storage-options-file to a command, as ``storage_options``."""

    @wraps(command)
    def given(
        *arguments: Any, storage_options: tuple[str, ...], options_file: str | None, **options: Any
    ) -> Any:
        in_file = () if options_file is None else options_in(options_file)
        return command(*arguments, storage_options=(*in_file, *storage_options), **options)

    add_option = several(
        "--storage-option=NAME=VALUE storage_options",
        "An endpoint or another option of an object store; may be repeated. Every user of the machine can read it "
        "in the list of processes: keep secrets in a file, or in the environment (AWS_SECRET_ACCESS_KEY and so on).",
    )
    add_file = option(
        "--storage-options-file=FILE options_file",
        'TOML file with options of an object store, as in aws_secret_access_key = "…"; also the environment\'s '
        f"{_OPTIONS_VARIABLE}.",
        envvar=_OPTIONS_VARIABLE,
    )
    return add_option(add_file(given))


def options_in(file: str) -> tuple[str, ...]:
    """Return the ``NAME=VALUE`` texts of a TOML file; no error quotes it, because it has secrets."""
    options = read_toml(file, "the file of storage options")
    wrong = [name for name, value in options.items() if not isinstance(value, str)]
    if wrong:
        raise InvalidError("a storage option must be text in quotes", name=wrong[0], file=file)
    return tuple(f"{name}={value}" for name, value in options.items())


version_option: Final = option(
    "--version=N|NAME",
    "Show the store as it was at table version N (see `millpond history`), or at savepoint NAME.",
    shell_complete=complete_savepoint,
)
"""Selects an older table version by its number or its savepoint."""

zookeeper_options: Final = options(
    option(
        "--zookeeper=HOSTS",
        "The store's ensemble, as host:port,…, unless it has its own server; also the environment's "
        f"{HOSTS_VARIABLE}.",
        envvar=HOSTS_VARIABLE,
    ),
    option(
        "--zookeeper-security=FILE",
        "TOML file with TLS and credentials for the ensemble; by default the environment's MILLPOND_ZOOKEEPER_….",
        type=ZooKeeperSecurity.from_file,
    ),
)
"""The options that name the store's ensemble."""


def check_computation(snapshot: Snapshot, computation: str) -> None:
    """Refuse a computation without rows in this version; the error names the nearest one."""
    if computation not in snapshot.computations:
        known = ", ".join(snapshot.computations) or "none has rows yet"
        hint = did_you_mean(computation, snapshot.computations)
        raise InvalidError(
            f"the store has no rows of that computation{hint}", computation=computation, known=known
        )


def version_in(savepoints: Iterable[Savepoint], named: str) -> int:
    """Return the version of that number or savepoint."""
    if named.isdecimal():
        return int(named)
    known = {savepoint.name: savepoint.version for savepoint in savepoints}
    if named not in known:
        raise InvalidError(
            "--version is a number (see `millpond history`) or the name of a savepoint (see `millpond savepoint`)"
            f"{did_you_mean(named, known)}",
            version=named,
            savepoints=", ".join(sorted(known)) or "none",
        )
    return known[named]


def read_options(storage_options: tuple[str, ...]) -> dict[str, str]:
    pairs = [option.partition("=") for option in storage_options]
    if any(not (name and equals) for name, equals, _ in pairs):
        # Not shown, because it may be the value.
        raise InvalidError("a storage option must be written NAME=VALUE, got one without a name or =")
    return {name: value for name, _, value in pairs}
