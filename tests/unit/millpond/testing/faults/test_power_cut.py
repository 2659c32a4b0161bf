"""The file system that loses what was not synced: what it may lose, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.testing.faults.power_cut import PowerCutFiles

CONTENTS = b"contents of a file"


def outcomes_of(files: list[PowerCutFiles], path: str) -> set[bytes | None]:
    """The contents of a file in each world; ``None`` where it has no name."""
    return {world.read(path) if path in set(world.walk("/")) else None for world in files}


def worlds(count: int, *, name_synced: bool, contents_synced: bool) -> list[PowerCutFiles]:
    """The same file, created and perhaps synced, after power cuts with different outcomes."""
    made = []
    for number in range(count):
        files = PowerCutFiles()
        files.make_folder("/a")
        files.create("/a/b", [CONTENTS])
        files.sync(["/"] + ["/a/b"] * contents_synced + ["/a"] * name_synced)
        files.cut_power(lambda outcomes, number=number: number % outcomes)  # type: ignore[misc]
        made.append(files)
    return made


def test_without_a_sync_anything_may_be_left() -> None:
    """A file that was not synced may be gone, whole, empty, cut, or have zeros in place of a tail or of everything."""
    half = len(CONTENTS) // 2
    outcomes = outcomes_of(worlds(10, name_synced=True, contents_synced=False), "/a/b")

    assert outcomes == {CONTENTS, b"", CONTENTS[:half], CONTENTS[:half] + bytes(half), bytes(2 * half)}
    assert None in outcomes_of(worlds(2, name_synced=False, contents_synced=True), "/a/b")


def test_what_was_synced_stays() -> None:
    """A file whose contents and name were synced is there and whole after every power cut."""
    assert outcomes_of(worlds(10, name_synced=True, contents_synced=True), "/a/b") == {CONTENTS}


def test_a_folder_without_its_name_loses_all_that_is_in_it() -> None:
    """Syncing a file and its folder is not enough if the folder's own name was not synced."""
    files = PowerCutFiles()
    files.make_folder("/a")
    files.create("/a/b", [CONTENTS])
    files.sync(["/a/b", "/a"])
    files.cut_power(lambda _: 0)

    assert list(files.walk("/")) == []


def test_names_are_lost_out_of_order() -> None:
    """Of two names the older may be lost and the newer stay, and a removed one may come back."""
    files = PowerCutFiles()
    files.create("/removed", [CONTENTS])
    files.sync(["/removed", "/"])
    files.create("/older", [b""])
    files.create("/newer", [b""])
    files.remove("/removed")
    choices = iter([0, 1, 0])
    files.cut_power(lambda _: next(choices))

    assert set(files.walk("/")) == {"/newer", "/removed"}


def test_two_names_of_a_file_share_their_loss() -> None:
    """A link is no copy: what one name's file has lost, the other's has lost as well, and a sync of one serves both."""
    files = PowerCutFiles()
    files.create("/a", [CONTENTS])
    files.link("/a", "/b")
    files.sync(["/"])
    choices = iter([2])
    files.cut_power(lambda _: next(choices))

    assert files.read("/a") == files.read("/b") == CONTENTS[: len(CONTENTS) // 2]


def test_a_refused_call_changes_nothing() -> None:
    """What `before` raises comes to the caller, and the call is not made."""
    files = PowerCutFiles()

    def before(call: str, path: str) -> None:
        raise RuntimeError(f"{call} {path}")

    files.before = before
    with pytest.raises(RuntimeError, match="create /a"):
        files.create("/a", [b""])
    assert list(files.walk("/")) == []


@given(st.lists(st.sampled_from(["create", "link", "replace", "remove", "sync"]), max_size=20), st.randoms())
def test_a_second_power_cut_changes_nothing(calls: list[str], random: object) -> None:
    """What is left after a power cut is on the disk: another one, with nothing in between, takes nothing more."""
    files = PowerCutFiles()
    for number, call in enumerate(calls):
        files.create(f"/{number}", [b"%d" % number])
        match call:
            case "link":
                files.link(f"/{number}", f"/{number}-link")
            case "replace":
                files.replace(f"/{number}", "/replaced")
            case "remove":
                files.remove(f"/{number}")
            case "sync":
                files.sync(["/", f"/{number}"])
    files.cut_power(random.randrange)  # type: ignore[attr-defined]
    left = {path: files.read(path) for path in files.walk("/")}
    files.cut_power(lambda _: 0)

    assert {path: files.read(path) for path in files.walk("/")} == left
