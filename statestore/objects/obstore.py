"""Object stores in the cloud, and the choice of the store for a path or URL.

`ObstoreObjects` serves S3, GCS and Azure, whose conditional put makes commits atomic; `LocalObjects` does the same in a
folder with a hard link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import from_url

from millpond.statestore.errors import (
    DataError,
    InvalidError,
    ObjectExistsError,
    ObjectMissingError,
    UnavailableError,
)
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.ranges import ByteRange, Tail, put_new
from millpond.statestore.objects.system_files import is_object_path
from millpond.statestore.types import Durability, Objects

_Result = TypeVar("_Result")
# Of local folders. A sync costs more than 2 ms in the median (`python -m benchmarks.local_latency
# --durability both`), so the caller has to ask for it.
DEFAULT_DURABILITY: Final[Durability] = "os_cache"


# Options of the connection, which `obstore` takes separately from the bucket's options.
_CLIENT_OPTIONS: Final = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    )
)

_SCHEMES_SHOWN: Final = ("s3", "gs", "abfss", "az")
_SCHEMES: Final = frozenset({*_SCHEMES_SHOWN, "s3a", "abfs", "adl", "azure"})
# Ends of the names of hosts that serve buckets with put-if-absent.
_BUCKET_HOSTS: Final = (
    ".amazonaws.com",
    ".blob.core.windows.net",
    ".dfs.core.windows.net",
    ".blob.fabric.microsoft.com",
    ".dfs.fabric.microsoft.com",
    ".r2.cloudflarestorage.com",
)

_PROBE: Final = "_millpond/probe"
# A service's answers as obstore quotes them.
_NOT_ALLOWED: Final = re.compile(r"status code: 40[13] |<Code>(?:ExpiredToken|InvalidToken)</Code>")
_NO_BUCKET: Final = re.compile(r"<Code>(?:NoSuchBucket|ContainerNotFound)</Code>")
# One piece of a streamed object; a few pieces are in memory at a time.
_PIECE_BYTES: Final = 8 << 20
_PARALLEL_MAX: Final = 16
_FILE_URL: Final = "file://"
_NO_NAME: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MISREAD: Final = re.compile(r"\\|%[0-9A-Fa-f]{2}")
_MISWRITTEN: Final = re.compile(r"[]\[|^]")
_USER: Final = re.compile(r"://.*@")
_PASSWORD: Final = re.compile(r"://[^/@]*:[^/]*@")
_ENDPOINTS: Final = ("aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3", "endpoint", "endpoint_url")
_CLOUD_PREFIXES: Final = ("aws_", "azure_", "google_")
# Few, because callers retry as well and know which operations are idempotent. On top of `obstore`'s default of
# ten retries, an outage would take a quarter of an hour to surface.
_CLIENT_RETRIES: Final = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}


class ObstoreObjects:
    """`Objects` in a cloud bucket, through ``obstore``; it pickles as its URL and options, so a Spark task opens its own.

    Args:
        url: any URL that ``obstore`` knows (``s3://``, ``gs://``, ``az://``).
        storage_options: options of the bucket (``aws_endpoint_url``, ``aws_access_key_id``, …) and of the connection
            (``allow_http``, ``timeout``, …), with or without the prefix ``aws_``; the same that ``deltalake`` takes.
            Missing values come from the environment (``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``, …).
    """

    def __init__(self, url: str, storage_options: Mapping[str, str] | None = None) -> None:
        self._options = dict(storage_options or {})
        self.url: Final[str] = url.rstrip("/")
        _check_scheme(self.url)
        refuse_passwords(self.url, self._options)
        client, bucket = _split_options(self._options)
        retries: Any = _CLIENT_RETRIES
        connect = partial(from_url, config=bucket, client_options=client or None, retry_config=retries)
        self._is_away = False
        self._store: Any = self._attempt("connect", lambda: connect(self.url))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (ObstoreObjects, (self.url, self._options))

    def __repr__(self) -> str:
        return f"ObstoreObjects({self.url!r})"

    @property
    def storage_options(self) -> Mapping[str, str]:
        """The options that other Delta readers need to open the same root."""
        return dict(self._options)

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object; an existing object may come from an earlier attempt whose reply was lost."""
        self._ask_if_away()
        self._attempt(path, lambda: obstore.put(self._store, path, data, mode="create", use_multipart=False))

    def put_unsynced(self, path: str, data: bytes) -> None:
        """Create the object like `put_if_absent`: the service acknowledges only durable writes."""
        self.put_if_absent(path, data)

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Do nothing: the service acknowledges only durable writes."""

    def put(self, path: str, data: bytes) -> None:
        self._ask_if_away()
        self._attempt(path, lambda: obstore.put(self._store, path, data, mode="overwrite"))

    def get(self, path: str) -> bytes:
        return self._attempt(path, lambda: bytes(obstore.get(self._store, path).bytes()))

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        """Return the bytes of objects, ``None`` for a missing one, with up to 16 requests at a time."""
        with ThreadPoolExecutor(_PARALLEL_MAX, "millpond-reads") as pool:
            return list(pool.map(self._get_if_there, paths))

    def _get_if_there(self, path: str) -> bytes | None:
        with suppress(ObjectMissingError):
            return self.get(path)
        return None

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        starts, ends = [part.start for part in ranges], [part.end for part in ranges]
        read = lambda: obstore.get_ranges(self._store, path, starts=starts, ends=ends, coalesce=0)  # noqa: E731
        return [bytes(part) for part in self._attempt(path, read)]

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        def read() -> Tail:
            answer = obstore.get(self._store, path, options={"range": {"suffix": size_bytes}})
            return Tail(bytes(answer.bytes()), answer.meta["size"])

        return self._attempt(path, read)

    def download(self, path: str, target: Path) -> None:
        """Copy the object into a local file, piece by piece."""
        with disk_errors(file=target), target.open("wb") as file:
            self._attempt(path, lambda: file.writelines(obstore.get(self._store, path).stream(_PIECE_BYTES)))

    def upload(self, path: str, source: Path) -> None:
        """Create the object from a local file, piece by piece, whole or not at all.

        A multipart upload takes no put-if-absent condition. The caller must pass a name that no other writer draws, because
        an existing object is found by a look-up before the upload, not atomically.
        """
        with suppress(ObjectMissingError):
            self._attempt(path, lambda: obstore.head(self._store, path))
            raise ObjectExistsError("the object exists", path=path, store=self.url)
        self._attempt(
            path, lambda: obstore.put(self._store, path, source, chunk_size=_PIECE_BYTES, max_concurrency=4)
        )

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        def walk() -> list[str]:
            pages = obstore.list(self._store, prefix, offset=start_after, chunk_size=1_000)
            return sorted(entry["path"] for page in pages for entry in page)

        return self._attempt(prefix, walk)

    def delete(self, paths: Iterable[str]) -> None:
        wanted = list(paths)
        try:
            self._attempt("delete", lambda: obstore.delete(self._store, wanted))
        except ObjectMissingError:
            # A store may stop at the first missing object, so delete them one at a time.
            for path in wanted:
                with suppress(ObjectMissingError):
                    self._attempt(path, partial(obstore.delete, self._store, path))

    def _ask_if_away(self) -> None:
        """Ask for an object that need not exist, so that an outage is not sent the same data over and over."""
        if self._is_away:
            with suppress(ObjectMissingError):
                self._attempt(_PROBE, lambda: obstore.head(self._store, _PROBE))

    def _attempt(self, path: str, action: Callable[[], _Result]) -> _Result:
        try:
            result = action()
        except AlreadyExistsError as error:
            self._is_away = False
            raise ObjectExistsError("the object exists", path=path, store=self.url) from error
        except Exception as error:
            self._refuse(path, error)
            if isinstance(error, FileNotFoundError):
                self._is_away = False
                raise ObjectMissingError("the object is missing", path=path, store=self.url) from error
            self._is_away = True
            # obstore raises its own errors, OSError and ValueError. They all mean that the operation may or may not
            # have had its effect.
            raise UnavailableError(
                "the object store failed", path=path, store=self.url, cause=str(error).partition("\n")[0]
            ) from error
        self._is_away = False
        return result

    def _refuse(self, path: str, error: Exception) -> None:
        """Raise `InvalidError` for what no retry mends: refused credentials, and a missing bucket."""
        text = str(error)
        cause = text.partition("\n")[0]
        if _NO_BUCKET.search(text):
            raise InvalidError(
                "the object store has no such bucket: create it, or correct the URL",
                path=path, store=self.url, cause=cause,
            ) from error  # fmt: skip
        if _NOT_ALLOWED.search(text):
            raise InvalidError(
                "the object store refuses these credentials, or they lack a permission: check the storage options and "
                "the environment",
                path=path, store=self.url, cause=cause,
            ) from error  # fmt: skip


def download(objects: Objects, path: str, target: Path) -> None:
    """Copy an object into a local file, in pieces from a store on disk or in the cloud."""
    if isinstance(objects, LocalObjects | ObstoreObjects):
        objects.download(path, target)
    else:
        with disk_errors(file=target), target.open("wb") as file:
            file.write(objects.get(path))


def upload(objects: Objects, path: str, source: Path) -> None:
    """Create an object under a unique name from a local file; see `download` and `put_new`."""
    if isinstance(objects, LocalObjects | ObstoreObjects):
        objects.upload(path, source)
    else:
        put_new(objects, path, source.read_bytes())


@contextmanager
def disk_errors(**details: object) -> Iterator[None]:
    """Raise errors of this machine's disk as `UnavailableError` with these details."""
    try:
        yield
    except OSError as error:
        raise UnavailableError("this machine's disk failed", **details, cause=error) from error


def open_objects(
    url: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    folder: str = "",
    durability: Durability | None = None,
) -> Objects:
    """Open the object store at a path, ``file://…`` or the URL of a cloud store; a missing local folder is created.

    The path may be a link. A ``folder`` below it, which becomes the root, may not: whoever made the store could lead
    its readers elsewhere. ``durability`` is for local folders, by default `DEFAULT_DURABILITY`; a cloud store always has
    ``"disk"``.
    """
    local = local_path(url)
    if local is not None:
        root = local.resolve() if local.is_symlink() else local
        return LocalObjects(root / folder, DEFAULT_DURABILITY if durability is None else durability)
    url = f"{url.rstrip('/')}/{folder}" if folder else url
    if durability not in (None, "disk"):
        raise InvalidError(
            "an object store acknowledges only what is durable: durability is for local folders",
            path=url,
            durability=durability,
        )
    return ObstoreObjects(url, storage_options)


def refuse_outside(paths: Iterable[str], root: str) -> None:
    """Raise `DataError` for a path of a log that would lead another reader out of the root.

    Readers of Delta tables follow links, and absolute paths with the user's credentials.
    """
    local = local_path(root)
    files = None if local is None else LocalObjects(local.resolve())
    for path in paths:
        if not is_object_path(path):
            raise DataError("the log names a file outside of the table", path=path, table=root)
        if files is not None:
            with suppress(ObjectMissingError):
                files.read_ranges(path, ())


def is_local(url: str) -> bool:
    """Return True for the path or URL of a local folder."""
    return local_path(url) is not None


def local_path(path: str | Path) -> Path | None:
    """Return the absolute path of a file or folder of this machine; ``None`` for the URL of an object store.

    ``~`` and ``~/…`` begin in the user's home, also where no shell has replaced them. A URL ``file:///…`` has its percent
    codes decoded, as other programs do.

    Raises:
        InvalidError: the name has control characters or bytes that are no UTF-8, which logs and URLs cannot hold.
    """
    text = str(path)
    if text.startswith(_FILE_URL):
        text = unquote(text.removeprefix(_FILE_URL).removeprefix("localhost"), errors="surrogateescape")
        if not text.startswith("/"):
            raise InvalidError("a file:// URL must have an absolute path, as in file:///data/pond", path=path)
    elif "://" in text:
        return None
    elif text == "~" or text.startswith("~/"):
        text = os.path.expanduser(text)  # noqa: PTH111 - pathlib fails where there is no home
    found = Path(text).absolute()
    if _NO_NAME.search(str(found)):
        raise InvalidError(
            "the name of a file or folder must be UTF-8 with no control characters: rename it",
            path=ascii(str(found)),
        )
    return found


def file_here(path: str | Path) -> Path:
    """Return the path of what must be on this machine, as it was given where it is one already; see `local_path`."""
    here = local_path(path)
    return here if here is not None and str(path).startswith(("~", _FILE_URL)) else Path(path)


def place_for_delta_rs(path: str | Path, *, writes: bool = False) -> str:
    """Return a table's URL, or its path on this machine; refuse a path that delta-rs takes for another one."""
    local = local_path(path)
    if local is None:
        return str(path)
    if (wrong := _MISREAD.search(str(local))) or (writes and (wrong := _MISWRITTEN.search(str(local)))):
        raise InvalidError(
            "the Python library of Delta takes a table's path for another one if it has a backslash, % before two digits, or, "
            "for writing, one of [ ] | ^: use another folder",
            path=path,
            part=wrong[0],
        )
    return str(local)


def _check_scheme(url: str) -> None:
    parts = urlsplit(url)
    is_bucket = parts.scheme == "https" and (parts.hostname or "").endswith(_BUCKET_HOSTS)
    if parts.scheme not in _SCHEMES and not is_bucket:
        raise InvalidError(
            "this kind of path has no put-if-absent, on which commits rest: take a folder of a disk, or an object store "
            f"({', '.join(f'{scheme}://' for scheme in _SCHEMES_SHOWN)})",
            path=url,
        )


def refuse_passwords(url: str, options: Mapping[str, str]) -> None:
    """Refuse a password where neither the service nor its library hides it: the URL and the endpoint are in errors."""
    given = {name: value for name, value in {**os.environ, **options}.items() if name.lower() in _ENDPOINTS}
    wrong = [name for name, value in given.items() if _USER.search(value)]
    if _PASSWORD.search(url) or wrong:
        raise InvalidError(
            "a URL of an object store must have no user and password: give them as storage options",
            where=", ".join(wrong) or "path",
        )


def _split_options(options: Mapping[str, str]) -> tuple[Any, Any]:
    """Split options into connection options, under ``obstore``'s names, and the unchanged bucket options."""
    client: dict[str, str] = {}
    bucket: dict[str, str] = {}
    for name, value in options.items():
        bare = name.lower()
        for prefix in _CLOUD_PREFIXES:
            bare = bare.removeprefix(prefix)
        if bare in _CLIENT_OPTIONS:
            client[bare] = value
        else:
            bucket[name] = value
    if "allow_http" not in client and os.environ.get("AWS_ALLOW_HTTP"):
        client["allow_http"] = os.environ["AWS_ALLOW_HTTP"]
    return client, bucket
