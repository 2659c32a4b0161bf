"""``millpond completion``: the script with which a shell completes the command line."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from millpond.statestore.errors import InternalError
from millpond.tools.terminal.cli_help import TeachingCommand
from millpond.tools.terminal.output import json_option, result_as_json

_PROGRAM: Final = "millpond"
_VARIABLE: Final = "_MILLPOND_COMPLETE"
_FILES: Final = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/millpond.fish",
}


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond completion bash",
        "millpond completion bash >> ~/.bashrc",
        "millpond completion zsh >> ~/.zshrc",
        "millpond completion fish > ~/.config/fish/completions/millpond.fish",
    ),
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
