"""
Object stores: the same rules on a disk and in memory.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.statestore.objects import MemoryObjects, ObstoreObjects, open_objects

if TYPE_CHECKING:
    from pathlib import Path

    from millpond.statestore.types import Objects


@pytest.fixture(params=["local", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return open_objects(str(tmp_path / "pond")) if request.param == "local" else MemoryObjects()


class TestRules:
    def test_what_was_put_is_got(self, objects: Objects) -> None:
        """An object has the bytes that it was created with."""
        objects.put_if_absent("a/b", b"bytes")

        assert objects.get("a/b") == b"bytes"

    def test_put_if_absent_happens_once(self, objects: Objects) -> None:
        """Of two creations of one object the second fails and changes nothing."""
        objects.put_if_absent("a", b"first")

        with pytest.raises(ObjectExistsError):
            objects.put_if_absent("a", b"second")
        assert objects.get("a") == b"first"

    def test_put_replaces(self, objects: Objects) -> None:
        """A plain put wins over what was there."""
        objects.put("a", b"first")
        objects.put("a", b"second")

        assert objects.get("a") == b"second"

    def test_a_missing_object_is_named(self, objects: Objects) -> None:
        """Getting what is not there raises an error that names it."""
        with pytest.raises(ObjectMissingError, match="nowhere"):
            objects.get("nowhere")

    def test_a_listing_is_sorted_and_keeps_to_whole_path_parts(self, objects: Objects) -> None:
        """Listing a folder gives its objects in order and no neighbour's."""
        for path in ("log/2", "log/10", "log/1", "logs/1", "log/sub/3"):
            objects.put_if_absent(path, b"")

        assert list(objects.list("log")) == ["log/1", "log/10", "log/2", "log/sub/3"]
        assert list(objects.list("log", start_after="log/10")) == ["log/2", "log/sub/3"]
        assert list(objects.list("nowhere")) == []

    def test_deleting_twice_is_no_error(self, objects: Objects) -> None:
        """A missing object among the ones to delete does not keep the others."""
        objects.put("a", b"")
        objects.put("b", b"")

        objects.delete(["gone", "a", "gone too", "b"])

        assert list(objects.list("")) == []

    @pytest.mark.parametrize("path", ["computation=a%20b/f", "é ü/f", "a#b?c", "%25/x%2F", "a+b&c=d"])
    def test_a_path_is_taken_as_it_is(self, objects: Objects, path: str) -> None:
        """No character of a path is encoded or decoded on the way."""
        objects.put_if_absent(path, b"1")

        assert objects.get(path) == b"1"
        assert list(objects.list("")) == [path]


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

    def test_it_travels_to_other_processes(self, tmp_path: Path) -> None:
        """A pickled store opens the same root again."""
        objects = ObstoreObjects(str(tmp_path))
        objects.put("a", b"1")

        assert pickle.loads(pickle.dumps(objects)).get("a") == b"1"

    def test_options_are_kept_for_other_readers(self, tmp_path: Path) -> None:
        """What the store was opened with can be passed on, and it says where it is."""
        objects = ObstoreObjects(str(tmp_path), {"region": "x"})

        assert objects.storage_options == {"region": "x"}
        assert str(tmp_path) in repr(objects)

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
        """A URL that no store serves raises UnavailableError that names it."""
        with pytest.raises(UnavailableError, match="nosuch"):
            open_objects("nosuch://host/path")
