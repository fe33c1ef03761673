"""``emulator status``, ``emulator reset`` and ``emulator faults``: commands to a running emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cwtrain_emulator._cwtrain import Command, output
from cwtrain_emulator.control_client import Control, ControlError
from cwtrain_emulator.faults import FAULT_OPTIONS, KINDS, TARGETS, Option

__all__ = ["faults_group", "reset_command", "status_command"]

_Command = Callable[..., Any]


def _to_an_emulator(*, ids: Callable[[Any], list[str]] | None = None) -> Callable[[_Command], _Command]:
    """Give a command the options that say which emulator; it gets a `Control` and returns the data to print.

    `ids` finds the ids in that.
    """

    def decorate(command: _Command) -> _Command:
        @click.option(
            "--state-dir",
            type=click.Path(file_okay=False, path_type=Path),
            help="State directory of the running emulator.",
        )
        @click.option("--url", envvar="COREWEAVE_API_URL", help="Its origin; the token is COREWEAVE_API_TOKEN.")
        @functools.wraps(command)
        def call(state_dir: Path | None, url: str | None, **values: Any) -> None:
            out = output()
            if ids is None:
                out.refuse_ids()
            try:
                # A state directory says it all, whatever is exported.
                control = Control.find(url=None if state_dir else url, state_dir=state_dir)
                answer = command(control, **values)
            except ControlError as exc:
                raise click.ClickException(str(exc)) from exc
            out.data(answer, ids=None if ids is None else ids(answer))

        return call

    return decorate


def _fault_ids(faults: list[dict[str, Any]]) -> list[str]:
    return [fault["id"] for fault in faults]


@click.command("status", cls=Command)
@_to_an_emulator(ids=lambda status: [deployment["id"] for deployment in status["deployments"]])
def status_command(control: Control) -> Any:
    """Show what a running emulator has: deployments, replicas and their identities, hot-loads, faults.

    Example: cwtrain emulator status --state-dir ./state
    """
    return control.status()


@click.command("reset", cls=Command)
@_to_an_emulator()
def reset_command(control: Control) -> Any:
    """Forget every deployment, gateway, claim, hot-load, object and fault of a running emulator.

    Prints how many there were. Objects of a store given with --s3-endpoint stay.

    Example: cwtrain emulator reset --state-dir ./state
    """
    return control.reset()


@click.group("faults")
def faults_group() -> None:
    """Break a running emulator on purpose: add, list and clear faults."""


def _option(name: str, option: Option) -> Callable[[_Command], _Command]:
    kind: Any = {str: str, int: int, float: float}[option.type]
    if option.choices:
        kind = click.Choice([choice for choice in option.choices if choice])
    text = f"{option.help[0].upper()}{option.help[1:]}."
    return click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=text)


def _fault_options(command: _Command) -> _Command:
    for name, option in reversed(FAULT_OPTIONS.items()):
        command = _option(name, option)(command)
    return command


@faults_group.command("add", cls=Command)
@click.argument("target", type=click.Choice(TARGETS))
@click.argument("kind", type=click.Choice(list(KINDS)))
@_fault_options
@_to_an_emulator(ids=lambda fault: [fault["id"]])
def add_command(control: Control, target: str, kind: str, **values: Any) -> Any:
    """Add a fault and print it, with its id. Which options a kind has is in the reference of faults.

    Example: cwtrain emulator faults add api status --status 503 --retry-after 1 --path hotLoads --times 2
    """
    return control.add_fault(target, kind, **{name: value for name, value in values.items() if value is not None})


@faults_group.command("list", cls=Command)
@_to_an_emulator(ids=_fault_ids)
def list_command(control: Control) -> Any:
    """List the faults, with how many requests each has seen and struck.

    Example: cwtrain emulator faults list
    """
    return control.faults()


@faults_group.command("clear", cls=Command)
@click.argument("fault_id", required=False, metavar="[ID]")
@_to_an_emulator(ids=_fault_ids)
def clear_command(control: Control, fault_id: str | None) -> Any:
    """Remove one fault, or all of them; what stands still because of it goes on.

    Example: cwtrain emulator faults clear
    """
    control.clear_faults(fault_id)
    return control.faults()
