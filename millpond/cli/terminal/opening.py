"""Opening a store read-only: no lease, no ZooKeeper server, no writes except a reader's horizon in the catalog.

All commands that read take the same arguments for this; `store_argument` adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import click

from millpond.cli.completion import complete_savepoint, complete_store
from millpond.cli.terminal.output import note
from millpond.statestore.errors import ConflictError, InvalidError, did_you_mean
from millpond.statestore.history.savepoint import Savepoint
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.log.high_water import Mark, list_marks, newest_mark
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng

_Command = TypeVar("_Command", bound=Callable[..., Any])


def store_argument(command: _Command) -> _Command:
    """Add the argument STORE and the option --storage-option to a command."""
    return click.argument("store", shell_complete=complete_store)(storage_option(command))


def storage_option(command: _Command) -> _Command:
    """Add the option --storage-option to a command."""
    return click.option(
        "--storage-option",
        "storage_options",
        metavar="NAME=VALUE",
        multiple=True,
        help="Credentials and endpoints of an object store; may be repeated.",
    )(command)


def version_option(command: _Command) -> _Command:
    """Add the option --version, which selects an older table version by its number or its savepoint."""
    return click.option(
        "--version",
        "version",
        metavar="N|NAME",
        shell_complete=complete_savepoint,
        help="Show the store as it was at table version N (see `millpond history`), or at savepoint NAME.",
    )(command)


def zookeeper_options(command: _Command) -> _Command:
    """Add the options --zookeeper and --zookeeper-security, which name the store's ensemble."""
    add_hosts = click.option(
        "--zookeeper", metavar="HOSTS", help="The store's ensemble, unless it has its own server."
    )
    add_security = click.option(
        "--zookeeper-security",
        type=_SecurityFile(),
        metavar="FILE",
        help="TOML file with TLS and credentials for the ensemble; by default the environment's "
        "MILLPOND_ZOOKEEPER_….",
    )
    return add_hosts(add_security(command))


class _SecurityFile(click.ParamType[ZooKeeperSecurity]):
    """A file for `ZooKeeperSecurity.from_file`."""

    name = "file"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> ZooKeeperSecurity:
        """Read the file.

        Raises:
            InvalidError: it cannot be read or understood.
        """
        del param, ctx
        return value if isinstance(value, ZooKeeperSecurity) else ZooKeeperSecurity.from_file(str(value))


def open_to_read(
    store: str,
    storage_options: tuple[str, ...],
    catalog: str | None = None,
    *,
    check_mark: bool = True,
) -> Store:
    """Open a store read-only.

    Args:
        store: its path or URL.
        storage_options: ``NAME=VALUE`` texts, as on the command line.
        catalog: SQLAlchemy URL of the catalog, unless in the store's folder.
        check_mark: whether to refuse a store that was rolled back.

    Raises:
        DataError: the store is damaged, or was rolled back.
        InvalidError: there is no store, or an option has no ``=``.
    """
    options = read_options(storage_options)
    return Store.open(
        store,
        catalog=catalog,
        storage_options=options,
        create=False,
        read_only=True,
        check_mark=check_mark,
    )


def open_to_write(
    store: str,
    storage_options: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    catalog: str | None = None,
    create: bool = False,
    read_only: bool = False,
    clock: Clock | None = None,
    rng: Rng | None = None,
) -> Store:
    """Open a store to change it, with what `store_argument` and `zookeeper_options` add to a command.

    Args:
        store: its path or URL.
        storage_options: ``NAME=VALUE`` texts, as on the command line.
        zookeeper: ``host:port,…`` of its ensemble; ``None`` for its own server.
        zookeeper_security: TLS and credentials for the ensemble.
        catalog: SQLAlchemy URL of the catalog, unless in the store's folder.
        create: whether to create it if there is none.
        read_only: whether to change nothing after all.
        clock: the source of time.
        rng: the source of names.

    Raises:
        DataError: the store is damaged, or was rolled back.
        InvalidError: there is no store, or an option has no ``=``.
        UnavailableError: a service cannot be reached.
    """
    return Store.open(
        store,
        zookeeper=zookeeper,
        zookeeper_security=zookeeper_security,
        catalog=catalog,
        storage_options=read_options(storage_options),
        create=create,
        read_only=read_only,
        clock=clock,
        rng=rng,
    )


def read_stored_mark(store: Store) -> Mark | None:
    """The high-water mark in a store's folder; ``None`` where there is none.

    Raises:
        DataError: there are marks of an incarnation that the log does not know.
        UnavailableError: the store is unavailable.
    """
    marks = list_marks(open_objects(store.path, store.storage_options))
    return newest_mark(marks, [known.id for known in store.lineage.incarnations])


@contextmanager
def snapshot_to_read(store: Store, named: str | None) -> Iterator[Snapshot]:
    """A version, pinned until the block ends; a version that is being collected is read without a pin.

    Args:
        store: the store.
        named: the number of the version, or the name of a savepoint; ``None`` for the newest version.

    Raises:
        DataError: the version has been collected.
        InvalidError: there is no savepoint of that name.
    """
    version = None if named is None else version_in(store.savepoints(), named)
    with ExitStack() as resources:
        try:
            snapshot = resources.enter_context(store.reading(version))
        except ConflictError:
            note("that version is older than the retention: its files may be deleted at any moment")
            snapshot = store.snapshot(version)
        yield snapshot


def check_computation(snapshot: Snapshot, computation: str) -> None:
    """Refuse a computation of which a version has no rows.

    Raises:
        InvalidError: it has none; the nearest name is told.
    """
    if computation not in snapshot.computations:
        known = ", ".join(snapshot.computations) or "none has rows yet"
        hint = did_you_mean(computation, snapshot.computations)
        raise InvalidError(
            f"the store has no rows of that computation{hint}", computation=computation, known=known
        )


def version_in(savepoints: Iterable[Savepoint], named: str) -> int:
    """The version that a number or the name of a savepoint says.

    Raises:
        InvalidError: there is no savepoint of that name.
    """
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
    """Parse storage options from the command line.

    Raises:
        InvalidError: an option has no ``=``.
    """
    pairs = [option.partition("=") for option in storage_options]
    unusable = [name for name, equals, _ in pairs if not equals]
    if unusable:
        raise InvalidError("a storage option is written NAME=VALUE", option=unusable[0])
    return {name: value for name, _, value in pairs}
