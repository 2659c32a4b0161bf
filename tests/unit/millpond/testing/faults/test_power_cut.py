"""The file system that loses unsynced data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.testing.faults.power_cut import PowerCutFiles

CONTENTS = b"contents of a file"


def outcomes_of(files: list[PowerCutFiles], path: str) -> set[bytes | None]:
    """Return the contents of a file in each world, ``None`` where it has no name."""
    return {world.read(path) if path in set(world.walk("/")) else None for world in files}


def worlds(count: int, *, name_synced: bool, contents_synced: bool) -> list[PowerCutFiles]:
    made = []
    for number in range(count):
        files = PowerCutFiles()
        files.make_folder("/a")
        files.create("/a/b", [CONTENTS])
        files.sync(["/"] + ["/a/b"] * contents_synced + ["/a"] * name_synced)
        files.cut_power(lambda outcomes, number=number: number % outcomes)  # type: ignore[misc]
        made.append(files)
    return made


def test_unsynced_file_may_be_anything() -> None:
    half = len(CONTENTS) // 2
    outcomes = outcomes_of(worlds(10, name_synced=True, contents_synced=False), "/a/b")

    assert outcomes == {CONTENTS, b"", CONTENTS[:half], CONTENTS[:half] + bytes(half), bytes(2 * half)}
    assert None in outcomes_of(worlds(2, name_synced=False, contents_synced=True), "/a/b")


def test_synced_file_and_name_survive() -> None:
    assert outcomes_of(worlds(10, name_synced=True, contents_synced=True), "/a/b") == {CONTENTS}


def test_folder_with_unsynced_name_loses_its_files() -> None:
    """Syncing a file and its folder is not enough."""
    files = PowerCutFiles()
    files.make_folder("/a")
    files.create("/a/b", [CONTENTS])
    files.sync(["/a/b", "/a"])
    files.cut_power(lambda _: 0)

    assert list(files.walk("/")) == []


def test_names_are_lost_out_of_order() -> None:
    """A removed name may return."""
    files = PowerCutFiles()
    files.create("/removed", [CONTENTS])
    files.sync(["/removed", "/"])
    files.create("/older", [b""])
    files.create("/newer", [b""])
    files.remove("/removed")
    choices = iter([0, 1, 0])
    files.cut_power(lambda _: next(choices))

    assert set(files.walk("/")) == {"/newer", "/removed"}


def test_links_of_file_share_loss_and_sync() -> None:
    files = PowerCutFiles()
    files.create("/a", [CONTENTS])
    files.link("/a", "/b")
    files.sync(["/"])
    choices = iter([2])
    files.cut_power(lambda _: next(choices))

    assert files.read("/a") == files.read("/b") == CONTENTS[: len(CONTENTS) // 2]


def test_refused_call_changes_nothing() -> None:
    files = PowerCutFiles()

    def before(call: str, path: str) -> None:
        raise RuntimeError(f"{call} {path}")

    files.before = before
    with pytest.raises(RuntimeError, match="create /a"):
        files.create("/a", [b""])
    assert list(files.walk("/")) == []


@given(st.lists(st.sampled_from(["create", "link", "replace", "remove", "sync"]), max_size=20), st.randoms())
def test_second_power_cut_changes_nothing(calls: list[str], random: object) -> None:
    """Everything left by the first one is on the disk."""
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
