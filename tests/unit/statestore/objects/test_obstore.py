"""Object stores on disk and in the cloud: their locations, options and errors."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from millpond.statestore.errors import InvalidError, ObjectExistsError, UnavailableError
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects, open_objects
from millpond.statestore.objects.ranges import put_new

if TYPE_CHECKING:
    from pathlib import Path


class TestLocal:
    def test_the_folder_is_made(self, tmp_path: Path) -> None:
        """Opening a path that is not there makes the folder, and the url is its absolute path."""
        objects = open_objects(str(tmp_path / "new" / "pond"))

        assert (tmp_path / "new" / "pond").is_dir()
        assert objects.url == str(tmp_path / "new" / "pond")

    def test_objects_lie_where_their_path_says(self, tmp_path: Path) -> None:
        """A percent sign in a path is a percent sign on the disk."""
        open_objects(str(tmp_path)).put_if_absent("computation=a%20b/f", b"1")

        assert (tmp_path / "computation=a%20b" / "f").read_bytes() == b"1"

    def test_a_file_url_is_a_path(self, tmp_path: Path) -> None:
        """A file URL opens the folder that it names, decoded."""
        (tmp_path / "a b").mkdir()

        assert open_objects((tmp_path / "a b").as_uri()).url == str(tmp_path / "a b")

    def test_a_path_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        """A store cannot be opened on a file, and the error says which."""
        (tmp_path / "file").write_text("")

        with pytest.raises(UnavailableError, match="file"):
            open_objects(str(tmp_path / "file"))

    def test_a_write_that_fails_is_unavailable_with_its_cause(self, tmp_path: Path) -> None:
        """What the file system refuses raises UnavailableError and keeps the reason."""
        objects = open_objects(str(tmp_path))
        objects.put("a", b"1")

        with pytest.raises(UnavailableError) as caught:
            objects.put_if_absent("a/b", b"below a file")
        assert caught.value.__cause__ is not None

    def test_an_unknown_scheme_is_refused(self) -> None:
        """A URL of a kind without put-if-absent raises InvalidError that names it."""
        with pytest.raises(InvalidError, match=r"no put-if-absent.*nosuch"):
            open_objects("nosuch://host/path")


class TestPutNew:
    def test_an_object_with_these_bytes_is_ones_own(self) -> None:
        """A put that was repeated after a lost reply finds its own object, and that is success."""
        objects = MemoryObjects()
        put_new(objects, "a", b"mine")
        put_new(objects, "a", b"mine")

        assert objects.get("a") == b"mine"

    def test_another_writers_object_stays(self) -> None:
        """A name that is taken by other bytes is an error, and they stay."""
        objects = MemoryObjects()
        put_new(objects, "a", b"theirs")

        with pytest.raises(ObjectExistsError):
            put_new(objects, "a", b"mine")
        assert objects.get("a") == b"theirs"

    def test_a_name_that_is_taken_by_nothing_is_no_answer(self) -> None:
        """A store that refuses a put as a conflict and has no object is away for the moment, and not damaged."""

        class Busy(MemoryObjects):
            def put_if_absent(self, path: str, data: bytes) -> None:
                raise ObjectExistsError("a conflicting operation is in progress", path=path)

        with pytest.raises(UnavailableError):
            put_new(Busy(), "a", b"mine")


class TestCloud:
    def test_options_go_by_the_names_that_other_readers_know(self) -> None:
        """Options of bucket and connection stand in one mapping, with or without aws_, in either case."""
        options = {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "aws_region": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "timeout": "1s",
        }

        assert open_objects("s3://bucket/pond/", options).url == "s3://bucket/pond"

    def test_it_travels_to_other_processes(self) -> None:
        """A pickled store opens the same root with the same options, which can be passed on, and says where it is."""
        objects = ObstoreObjects("s3://bucket/pond", {"aws_region": "us-east-1"})
        again = pickle.loads(pickle.dumps(objects))

        assert again.storage_options == {"aws_region": "us-east-1"}
        assert repr(again) == "ObstoreObjects('s3://bucket/pond')"

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        """A misspelled option is no surprise at the first read."""
        with pytest.raises(UnavailableError, match="aws_regoin"):
            open_objects("s3://bucket/pond", {"aws_regoin": "us-east-1"})

    def test_a_server_that_is_away_is_told_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Options may come from the environment, and a refused connection is an error after a few tries."""
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
def test_password_in_a_url_is_refused_and_not_shown(url: str, options: dict[str, str]) -> None:
    """The library shows the endpoint in each error, whose trace would hold it."""
    with pytest.raises(InvalidError, match="must have no user and password") as caught:
        ObstoreObjects(url, options)

    assert "SEC" not in str(caught.value)


def test_password_of_an_endpoint_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:SECRET@127.0.0.1:1")
    with pytest.raises(InvalidError, match="where=`AWS_ENDPOINT_URL`"):
        ObstoreObjects("s3://bucket/pond")
