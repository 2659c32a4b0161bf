"""``millpond completion``: the script with which a shell completes the command line, and the names it completes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.options import json_option
from millpond.cli.terminal.output import result_as_json
from millpond.statestore.errors import InternalError, MillpondError
from millpond.statestore.history.lineage import ROWS_FOLDER
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.obstore import local_path, open_objects

_HARMLESS: Final = re.compile(r"\w(?:[\w.,:+@%/=-]| (?! ))*")
_PROGRAM: Final = "millpond"
_VARIABLE: Final = "_MILLPOND_COMPLETE"
_FILES: Final = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/millpond.fish"}


@command(
    "millpond completion bash",
    "millpond completion bash >> ~/.bashrc",
    "millpond completion zsh >> ~/.zshrc",
    "millpond completion fish > ~/.config/fish/completions/millpond.fish",
)
@click.argument("shell", type=click.Choice(tuple(_FILES)))
@json_option("One JSON object: the script, and the file that it usually goes into.")
@click.pass_context
def completion(context: click.Context, shell: str, *, as_json: bool) -> None:
    """Print the script with which SHELL completes this command line.

    Commands, options and their choices are completed, folders where a store is asked for, and the names of
    computations and savepoints out of a store on this machine. Put the script where your shell reads it when it
    starts, as the examples do.
    """
    found = get_completion_class(shell)
    if found is None:
        raise InternalError("click knows no such shell", shell=shell)
    with result_as_json(as_json) as result:
        script = found(context.find_root().command, {}, _PROGRAM, _VARIABLE).source()
        result |= {"shell": shell, "file": _FILES[shell], "script": script}
    if not as_json:
        click.echo(script)


def complete_store(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del context, param
    # The shell lists the folders itself.
    return [CompletionItem(incomplete, type="dir")]


def complete_computation(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    del param
    return _complete(context, incomplete, lambda snapshot: snapshot.computations)


def complete_savepoint(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    del param
    return _complete(
        context, incomplete, lambda snapshot: [one.name for one in open_savepoints(snapshot.txns)]
    )


def _complete(
    context: click.Context, incomplete: str, names_in: Callable[[Snapshot], Iterable[str]]
) -> list[CompletionItem]:
    """Complete names out of the store on the line; none of one that is not on this machine, or damaged."""
    # While the last option still lacks its value, click does not parse the arguments.
    store = context.params.get("store") or next(iter(context.args), None)
    try:
        folder = local_path(store) if isinstance(store, str) else None
        if folder is None or not (folder / ROWS_FOLDER / "_delta_log").is_dir():
            return []
        names = names_in(load(Log(open_objects(str(folder), folder=ROWS_FOLDER))))
    except MillpondError:
        return []
    # The shell puts the name into the line as it is: `$(…)` out of somebody's store would run with the command.
    fitting = (name for name in sorted(names) if name.startswith(incomplete) and _HARMLESS.fullmatch(name))
    return [CompletionItem(name) for name in fitting]
