"""``cwtrain completion``: the script that lets a shell complete commands and options."""

from __future__ import annotations

import click

from cwtrain.cli._context import Command

__all__ = ["completion"]


@click.command(cls=Command, example='eval "$(cwtrain completion bash)"')
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    Completing asks no network, and offers the plugins' commands, too.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from cwtrain.cli._root import root

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}", click.get_current_context())
    # Not the class's own `source`: bash's runs bash to look at its version, and the script works all the same.
    script = ShellComplete.source(kind(root, {}, "cwtrain", "_CWTRAIN_COMPLETE"))
    click.echo(script, nl=not script.endswith("\n"))
