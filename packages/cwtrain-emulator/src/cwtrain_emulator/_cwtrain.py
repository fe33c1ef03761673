"""What ``cwtrain`` leaves for the commands of plugins, where they run below it: its options of output, and its writer.

It lies in click's ``Context.meta``, so nothing is imported. Under ``python -m cwtrain_emulator`` there is nothing, and
output is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import click

__all__ = ["Command", "Output", "output"]


class Output(Protocol):
    """Where a command's data goes; ``format`` is json, jsonl, table or id."""

    format: str

    def data(self, value: Any, *, ids: Sequence[str] | None = None) -> None:
        """Write plain JSON data; ``ids`` are its ids."""

    def refuse_ids(self) -> None:
        """Raise a usage error where ids were asked for."""


class _Json:
    format = "json"

    def data(self, value: Any, *, ids: Sequence[str] | None = None) -> None:
        click.echo(json.dumps(value, indent=2))

    def refuse_ids(self) -> None:
        """Nobody can ask for them."""


def output() -> Output:
    """Return where the running command writes."""
    made = click.get_current_context().meta.get("cwtrain.output")
    found: Output = _Json() if made is None else made()
    return found


class Command(click.Command):
    """A command that takes the options of output after its name, too, as ``cwtrain``'s own commands do."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters, and the options of output that it has no name of its own for."""
        params = super().get_params(ctx)
        taken = {name for param in params for name in param.opts}
        offered = ctx.meta.get("cwtrain.options", list)()
        return params + [option for option in offered if not taken & set(option.opts)]
