"""Object stores on disk and in the cloud: locations, options and errors."""

from __future__ import annotations

import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

import pytest

from millpond.statestore.errors import InvalidError, ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects, open_objects
from millpond.statestore.objects.ranges import put_new
from millpond.testing.servers.s3_server import s3_options

if TYPE_CHECKING:
    from pathlib import Path


class TestLocal:
    def test_missing_folder_is_created(self, tmp_path: Path) -> None:
        objects = open_objects(str(tmp_path / "new" / "pond"))

        assert (tmp_path / "new" / "pond").is_dir()
        assert objects.url == str(tmp_path / "new" / "pond")

    def test_percent_sign_in_path_is_literal(self, tmp_path: Path) -> None:
        open_objects(str(tmp_path)).put_if_absent("computation=a%20b/f", b"1")

        assert (tmp_path / "computation=a%20b" / "f").read_bytes() == b"1"

    def test_file_url_is_decoded(self, tmp_path: Path) -> None:
        (tmp_path / "a b").mkdir()

        assert open_objects((tmp_path / "a b").as_uri()).url == str(tmp_path / "a b")

    def test_file_as_root_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")

        with pytest.raises(UnavailableError, match="file"):
            open_objects(str(tmp_path / "file"))

    def test_failed_write_is_unavailable_with_cause(self, tmp_path: Path) -> None:
        objects = open_objects(str(tmp_path))
        objects.put("a", b"1")

        with pytest.raises(UnavailableError) as caught:
            objects.put_if_absent("a/b", b"below a file")
        assert caught.value.__cause__ is not None

    def test_unsupported_scheme_is_refused(self) -> None:
        """A store needs put-if-absent."""
        with pytest.raises(InvalidError, match=r"no put-if-absent.*nosuch"):
            open_objects("nosuch://host/path")


class TestPutNew:
    def test_put_of_same_bytes_succeeds(self) -> None:
        """This is a retry after a lost reply."""
        objects = MemoryObjects()
        put_new(objects, "a", b"mine")
        put_new(objects, "a", b"mine")

        assert objects.get("a") == b"mine"

    def test_object_of_another_writer_is_not_replaced(self) -> None:
        objects = MemoryObjects()
        put_new(objects, "a", b"theirs")

        with pytest.raises(ObjectExistsError):
            put_new(objects, "a", b"mine")
        assert objects.get("a") == b"theirs"

    def test_conflict_without_object_is_unavailable(self) -> None:
        """The service is busy; nothing is damaged."""

        class Busy(MemoryObjects):
            def put_if_absent(self, path: str, data: bytes) -> None:
                raise ObjectExistsError("a conflicting operation is in progress", path=path)

        with pytest.raises(UnavailableError):
            put_new(Busy(), "a", b"mine")


class TestCloud:
    def test_options_accept_names_of_other_readers(self) -> None:
        """Names may have the prefix aws_, in either case."""
        options = {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "aws_region": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "timeout": "1s",
        }

        assert open_objects("s3://bucket/pond/", options).url == "s3://bucket/pond"

    def test_pickled_store_keeps_root_and_options(self) -> None:
        objects = ObstoreObjects("s3://bucket/pond", {"aws_region": "us-east-1"})
        again = pickle.loads(pickle.dumps(objects))

        assert again.storage_options == {"aws_region": "us-east-1"}
        assert repr(again) == "ObstoreObjects('s3://bucket/pond')"

    def test_unknown_option_is_named(self) -> None:
        """Otherwise it would fail at the first read."""
        with pytest.raises(UnavailableError, match="aws_regoin"):
            open_objects("s3://bucket/pond", {"aws_regoin": "us-east-1"})

    def test_refused_connection_fails_after_few_tries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }.items():
            monkeypatch.setenv(name, value)

        with pytest.raises(UnavailableError, match="after 4 retries"):
            open_objects("s3://bucket/pond").get("a")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://user:SECRET@bucket/pond", {}),
        ("s3://bucket/pond", {"aws_endpoint_url": "http://user:SECRET@127.0.0.1:1"}),
        ("s3://bucket/pond", {"AWS_ENDPOINT": "http://SECRET@127.0.0.1:1"}),
        ("s3://bucket/pond", {"endpoint": "http://user:SEC/RET@127.0.0.1:1"}),
    ],
)
def test_password_in_url_is_refused_and_hidden(url: str, options: dict[str, str]) -> None:
    """The library shows the endpoint in each error."""
    with pytest.raises(InvalidError, match="must have no user and password") as caught:
        ObstoreObjects(url, options)

    assert "SEC" not in str(caught.value)


def test_password_of_endpoint_in_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:SECRET@127.0.0.1:1")
    with pytest.raises(InvalidError, match="where=`AWS_ENDPOINT_URL`"):
        ObstoreObjects("s3://bucket/pond")


class Answers:
    """An S3 server on the loopback interface that answers every request alike, and counts the bytes that it was sent."""

    def __init__(self, status: int, code: str = "") -> None:
        self.status, self.body = status, f"<Error><Code>{code}</Code></Error>".encode()
        self.requests: list[str] = []
        self.received = 0
        answers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                answers.requests.append(self.command)
                answers.received += len(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                self.send_response_only(answers.status)
                self.send_header("Content-Length", str(len(answers.body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answers.body)

            do_GET = do_HEAD = do_PUT  # noqa: N815 - the names that the server looks for

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> ObstoreObjects:
        self._thread.start()
        return ObstoreObjects("s3://bucket/pond", s3_options(f"127.0.0.1:{self._server.server_port}"))

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


REFUSED: Final = "the object store refuses these credentials"
NO_BUCKET: Final = "no such bucket"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "Unauthorized", REFUSED),
        (403, "SignatureDoesNotMatch", REFUSED),
        (400, "ExpiredToken", REFUSED),
        (404, "NoSuchBucket", NO_BUCKET),
    ],
)
def test_refusal_is_told_by_name_and_not_retried(status: int, code: str, message: str) -> None:
    answers = Answers(status, code)
    with answers as objects:
        for action in (
            lambda: objects.put_if_absent("a", b"1"),
            lambda: objects.get("a"),
            lambda: objects.list("a"),
        ):
            with pytest.raises(InvalidError, match=f"{message}.*{code}"):
                action()
    assert answers.requests == ["PUT", "GET", "GET"]


def test_outage_is_not_sent_the_same_data_again() -> None:
    answers, data = Answers(503), bytes(100_000)
    with answers as objects:
        for _ in range(4):
            with pytest.raises(UnavailableError):
                objects.put_if_absent("a", data)
        assert answers.received == 5 * len(data)
        answers.status = 200
        objects.put_if_absent("a", data)
        objects.put_if_absent("b", data)
    assert answers.received == 7 * len(data)


def test_missing_object_ends_an_outage() -> None:
    answers = Answers(500)
    with answers as objects:
        with pytest.raises(UnavailableError):
            objects.get("a")
        answers.status = 404
        with pytest.raises(ObjectMissingError):
            objects.get("a")
        answers.status = 200
        objects.put_if_absent("a", b"1")
    assert "HEAD" not in answers.requests
