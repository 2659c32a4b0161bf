"""An S3 server on the loopback interface: moto, in a separate process, stopped by its id.

It keeps its buckets in memory and loses them when it stops. moto looks for an object and puts it in
two steps, so of several conditional puts at once two may succeed (5 times in 100, when eight threads met); the process started here lets one
PUT in at a time, which makes ``If-None-Match: *`` what a real S3 promises.

Needs ``moto[s3]``, ``flask`` and ``flask-cors``; only tests do.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Self

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases.zookeeper_process import HOST
from millpond.statestore.types import Clock
from millpond.testing.servers.zookeeper import wait_until

_READY_MS: Final = 60_000
_READY: Final = "ready "

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def s3_options(address: str) -> dict[str, str]:
    """Storage options for an S3 server at ``host:port``, for `Store.open`, `DeltaSink` and ``deltalake`` alike."""
    return {
        "aws_endpoint_url": f"http://{address}",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "allow_http": "true",
        "timeout": "10s",
    }


class S3Server:
    """The process; use it as a context, or `start` and `close` it.

    Args:
        clock: measures the bound on waiting.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> with S3Server(SystemClock()) as server:  # doctest: +SKIP
        ...     Store.open(f"s3://{server.make_bucket('pond')}/a", storage_options=server.options, ...)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{HOST}:{self._port}"

    @property
    def port(self) -> int:
        """The address that it listens at."""
        return self._port

    @property
    def options(self) -> dict[str, str]:
        """Storage options that lead to it."""
        return s3_options(self.address)

    def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            UnavailableError: it ended at once, because moto or Flask is missing, say.
        """
        command = [sys.executable, "-P", "-m", "millpond.testing.servers.s3_server"]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line.startswith(_READY):
            self.close()
            raise UnavailableError("the S3 server does not start: are moto[s3], flask and flask-cors there?")
        self._port = int(line.removeprefix(_READY))
        if not wait_until(self._answers, self._clock, _READY_MS):
            self.close()
            raise UnavailableError("the S3 server does not answer", port=self._port)

    def make_bucket(self, name: str) -> str:
        """Make a bucket; its name."""
        status = self._ask("PUT", f"/{name}")
        if status != http.client.OK:
            raise UnavailableError("the S3 server refuses the bucket", bucket=name, status=status)
        return name

    def close(self) -> None:
        """Kill it; its buckets are gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.close()

    def _answers(self) -> bool:
        with suppress(OSError):
            return self._ask("GET", "/") == http.client.OK
        return False

    def _ask(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5.0)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        finally:
            connection.close()


class _OnePutAtATime:
    """WSGI middleware that makes a conditional put atomic."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environment["REQUEST_METHOD"] != "PUT":
            return self._application(environment, start_response)
        with self._lock:
            return list(self._application(environment, start_response))


def main() -> None:
    """Serve on a free port, printed in one line, until the standard input ends."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _OnePutAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server(HOST, 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{_READY}{server.server_port}\n")
    sys.stdout.flush()
    # The standard input ends when the process that started this server has ended, for whatever reason.
    sys.stdin.read()


if __name__ == "__main__":
    main()
