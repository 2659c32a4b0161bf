"""``millpond dead-letters``: records and timers that could not be processed, shown, retried or dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from millpond.cli.terminal.cli_help import TeachingGroup
from millpond.cli.terminal.opening import StoreAt, store_argument, version_option, zookeeper_options
from millpond.cli.terminal.options import flag, json_option, option, options
from millpond.cli.terminal.output import note, print_json, print_rows, say
from millpond.executor.superstep.letter_retries import (
    LetterAction,
    LetterRequest,
    LetterSelection,
    StoredLetter,
    ask_for_letters,
    stored_letters,
    waiting_letter_requests,
    withdraw_letter_requests,
)
from millpond.executor.time.instants import parse_instant_us
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.visible import visible

_VALUE_SHOWN: Final = 60  # characters of a sample's value in a table
_TIMER: Final = "(timer)"


_selection_options: Final = options(
    option("--computation=NAME", "Only letters of this computation."),
    option("--stream=NAME", "Only records that arrived on this stream."),
    flag("--timers", "Only timers."),
    option("--key=KEY", "Only records and timers of this key."),
    option("--before=TIME", "Only what failed before this time, such as 2026-02-08T10:00:00Z."),
    option("--error=TEXT", "Only letters whose error has this text in it."),
    option("--letter=LETTER", "Only this letter, as `list` and `show` name it."),
)
_request_options: Final = options(
    _selection_options,
    flag("--all is_all", "All letters; needed if no other option selects letters."),
    zookeeper_options,
    json_option("Print the request as a JSON object."),
)


def _selection(
    *, stream: str | None, before: str | None, timers: bool, **equal: str | None
) -> LetterSelection:
    if timers and stream is not None:
        raise InvalidError("a timer arrived on no stream: give --timers or --stream")
    before_us = None if before is None else parse_instant_us(before)
    return LetterSelection(stream="" if timers else stream, before_us=before_us, **equal)


@click.group(
    cls=TeachingGroup,
    examples=(
        "millpond dead-letters list pond",
        "millpond dead-letters show pond flights/0000000001/000000",
        "millpond dead-letters retry pond --computation window_counter",
        "millpond dead-letters drop pond --before 2030-01-01T00:00:00Z",
    ),
)
def dead_letters() -> None:
    """Show, retry or drop the records and timers that could not be processed.

    Each is a letter: a row of the computation `dead_letters`. `list` and `show` only read. `retry` and
    `drop` ask the pipeline that wrote the letters; it honours the request in one of its next supersteps or, if it
    is stopped, when it runs again. `withdraw` revokes requests that wait.

    Exit code 0: done, or asked for. 1: an error, also if no letter is selected.
    """


@dead_letters.command(
    "list",
    examples=(
        "millpond dead-letters list pond",
        "millpond dead-letters list pond --computation window_counter",
        'millpond dead-letters list pond --error "no fields" --json | jq .letters',
    ),
)
@store_argument
@_selection_options
@version_option
@json_option("One JSON object per line of the table.")
def list_(store: StoreAt, version: str | None, *, as_json: bool, **selected: Any) -> None:
    """Count the dead letters of STORE by computation, stream and error.

    The newest letter of each line is its sample: its name, key and value. Letters without their whole value
    cannot be retried, and are counted as lost.
    """
    selection = _selection(**selected)
    by_kind: dict[tuple[str, str, str], list[StoredLetter]] = {}
    known: dict[str, set[Any]] = {"computation": set(), "stream": set()}
    with store.reading(version) as (opened, snapshot):
        for letter in stored_letters(snapshot, opened.objects):
            fields = letter.fields
            for name, names in known.items():
                names.add(fields.get(name))
            if not selection.has(letter):
                continue
            kind = (str(fields.get("computation")), str(fields.get("stream")), str(fields.get("error")))
            by_kind.setdefault(kind, []).append(letter)
        waiting = waiting_letter_requests(snapshot.txns)
    for name, names in known.items() if not by_kind else ():
        if names and (given := selected[name]) is not None and given not in names:
            raise InvalidError(f"no dead letter has this {name}{did_you_mean(given, names)}", **{name: given})
    groups = [_group(*kind, letters) for kind, letters in sorted(by_kind.items())]
    columns = ("computation", "stream", "error", "letters", "newest", "sample", "key", "value", "lost")
    print_rows(groups, columns, map(_row, groups), as_json=as_json)
    for request in () if as_json else waiting:
        note(f"waits for the pipeline {request.pipeline}: {request.action} {_words(request)}")


@dead_letters.command(
    examples=(
        "millpond dead-letters show pond flights/0000000001/000000",
        "millpond dead-letters show pond flights/0000000001/000000 --json | jq -r .diagnostics",
    )
)
@store_argument
@click.argument("letter", required=False)
@version_option
@json_option("As one JSON object.")
def show(store: StoreAt, letter: str | None, version: str | None, *, as_json: bool) -> None:
    """Show a LETTER of STORE whole, with its traceback.

    The only letter of a store needs no name.
    """
    with store.reading(version) as (opened, snapshot):
        found = list(stored_letters(snapshot, opened.objects, None if letter is None else [letter]))
    if not found and letter is None:
        raise InvalidError("the store has no dead letter")
    if not found:
        raise InvalidError("the store has no such dead letter; `list` names one of each kind", letter=letter)
    if len(found) > 1:
        raise click.UsageError(
            f"which of the {len(found):,} dead letters? `millpond dead-letters list` names one of each kind, such as "
            f"{found[-1].name}"
        )
    (one,) = found
    shown = {"letter": one.name, "pipeline": one.pipeline, "superstep": one.superstep, **one.fields}
    shown |= {"lost_because": one.lost}
    if as_json:
        print_json([shown])
        return
    width = max(map(len, shown))
    for name, value in shown.items():
        if value not in (None, "") and name != "diagnostics":
            say(f"{name:{width}}  {visible(value)}")
    if shown.get("diagnostics"):
        say(f"\n{shown['diagnostics']}".rstrip())


@dead_letters.command(
    examples=(
        "millpond dead-letters retry pond --all",
        "millpond dead-letters retry pond --computation window_counter --stream flights",
        "millpond dead-letters retry pond --letter flights/0000000001/000000",
    )
)
@store_argument
@_request_options
def retry(store: StoreAt, **options: Any) -> None:
    """Have dead letters of STORE processed once more, after their code was mended.

    Each goes to the computation that failed, and to no other, with its key, value, event time, stream and
    id; the id that it has left there does not make it a duplicate. It leaves the table in the commit that has its
    effects, so it is retried exactly once. If it fails again, it is a new letter. A timer fires once more.

    A record keeps its event time, so its productions may be late. If its computation drops it because
    it is late, it stays a letter.
    """
    _ask(store, "retry", **options)


@dead_letters.command(
    examples=(
        "millpond dead-letters drop pond --before 2030-01-01T00:00:00Z",
        'millpond dead-letters drop pond --computation window_counter --error "no fields"',
        "millpond dead-letters drop pond --all",
    )
)
@store_argument
@_request_options
def drop(store: StoreAt, **options: Any) -> None:
    """Have dead letters of STORE deleted.

    Their records are not processed. Letters that consumers of the stream `dead_letters` have received stay there.
    """
    _ask(store, "drop", **options)


@dead_letters.command(examples=("millpond dead-letters withdraw pond",))
@store_argument
@zookeeper_options
@json_option("One JSON object per request, one per line.")
def withdraw(store: StoreAt, *, as_json: bool) -> None:
    """Withdraw all requests to retry or drop dead letters of STORE that wait.

    Their effects until then stay. Use it if a retry ends the pipeline each time it runs.
    """
    with store.to_write() as opened:
        withdrawn = withdraw_letter_requests(opened)
    if as_json:
        print_json(
            {"pipeline": one.pipeline, "action": one.action, "selection": one.selection.text}
            for one in withdrawn
        )
        return
    for request in withdrawn:
        say(f"withdrawn: {request.action} {_words(request)}")
    if not withdrawn:
        note("no request waits")


def _ask(store: StoreAt, action: LetterAction, *, is_all: bool, as_json: bool, **selected: Any) -> None:
    selection = _selection(**selected)
    if is_all == (selection != LetterSelection()):
        raise InvalidError("which letters? give --all, or options that say which")
    with store.to_write() as opened:
        asked = ask_for_letters(opened, action, selection)
    if as_json:
        print_json([{"action": action, **asdict(asked)}])
        return
    letters = "1 dead letter" if asked.letters == 1 else f"{asked.letters:,} dead letters"
    say(f"asked {', '.join(asked.pipelines)} to {action} {letters} in one of its next supersteps")
    for reason, count in asked.lost.items():
        note(f"not retried: {count:,}, because {reason}")


def _group(computation: str, stream: str, error: str, letters: list[StoredLetter]) -> dict[str, Any]:
    """Return letters of one kind with the fields that the command prints, in their order."""
    newest = max(letters, key=lambda letter: (letter.superstep, letter.name))
    lost = [reason for letter in letters if (reason := letter.lost) is not None]
    return {
        "computation": computation,
        "stream": stream,
        "error": error,
        "letters": len(letters),
        "newest": newest.fields.get("failed_at"),
        "sample": newest.name,
        "key": newest.fields.get("key"),
        "value": str(newest.fields.get("value")),
        "lost": len(lost),
        "lost_because": lost[0] if lost else None,
    }


def _row(group: Mapping[str, Any]) -> tuple[object, ...]:
    value = group["value"]
    shown = {"stream": group["stream"] or _TIMER, "lost": group["lost"] or None}
    shown["value"] = value if len(value) <= _VALUE_SHOWN else f"{value[:_VALUE_SHOWN]}…"
    return tuple({**group, **shown}.values())[:-1]


def _words(request: LetterRequest) -> str:
    return "all" if request.selection == LetterSelection() else request.selection.text
