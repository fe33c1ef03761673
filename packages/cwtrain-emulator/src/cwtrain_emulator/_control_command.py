"""Commands to a running emulator: ``emulator status``, ``env``, ``stop``, ``reset`` and ``faults``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cwtrain_emulator._cwtrain import Command, output
from cwtrain_emulator.api.wire import ENUMS
from cwtrain_emulator.control_client import Control, ControlError, WhichError, running
from cwtrain_emulator.faults import (
    COMMON_OPTIONS,
    FAULT_OPTIONS,
    KINDS,
    MATCH_OPTIONS,
    TARGETS,
    FaultError,
    Option,
    parse_fault,
)

__all__ = ["env_command", "faults_group", "reset_command", "status_command", "stop_command"]

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
            except WhichError as exc:
                raise click.UsageError(str(exc), click.get_current_context()) from exc
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
    return _shown(control.status())


_PREFIXES = tuple(dict.fromkeys(("HOT_LOAD_STATE_", "STATUS_", *(prefix for prefix, _ in ENUMS.values()))))
_ENUM_KEYS = frozenset({"status", "state", *(f"{name[0].lower()}{name[1:]}" for name in ENUMS), "type"})
_FREE_KEYS = frozenset({"engineConfig", "engineEnv"})


def _shown(value: Any, key: str = "") -> Any:
    """Return an object of the wire as commands print it: keys in snake_case, states and other enums bare."""
    match value:
        case dict() if key not in _FREE_KEYS:
            return {_snake_case(name): _shown(item, name) for name, item in value.items()}
        case list():
            return [_shown(item, key) for item in value]
        case str() if key in _ENUM_KEYS:
            prefix = next((one for one in _PREFIXES if value.startswith(one)), "")
            return value.removeprefix(prefix)
        case _:
            return value


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


@click.command("env", cls=Command)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="State directory of the running emulator.",
)
def env_command(state_dir: Path) -> None:
    """Print shell exports that reach the emulator that runs on a state directory.

    Example: cwtrain emulator env --state-dir ./state >emulator.env && . ./emulator.env
    """
    from cwtrain_emulator.serve import exports

    output().refuse_ids()
    try:
        click.echo(exports(running(state_dir)), nl=False)
    except ControlError as exc:
        raise click.ClickException(str(exc)) from exc


@click.command("stop", cls=Command)
@_to_an_emulator()
def stop_command(control: Control) -> Any:
    """Stop a running emulator, and return when it has ended.

    Example: cwtrain emulator stop --state-dir ./state
    """
    return control.stop()


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
    given = {name: value for name, value in values.items() if value is not None}
    try:
        parse_fault({"target": target, "kind": kind, **given})
    except FaultError as exc:
        raise _wrong_fault(target, kind, given, str(exc)) from None
    return control.add_fault(target, kind, **given)


def _wrong_fault(target: str, kind: str, given: dict[str, Any], problems: str) -> click.UsageError:
    """Return the usage error for a fault that cannot be; its next step is the line with what it lacks."""
    error = click.UsageError(f"{target} {kind}: {problems}", click.get_current_context())
    if target in KINDS[kind].targets:
        known = {**KINDS[kind].options, **MATCH_OPTIONS[target], **COMMON_OPTIONS}
        wrong = {problem.partition(":")[0] for problem in problems.split("; ")}
        words = [
            f"--{name.replace('_', '-')} {name.upper() if name in wrong else given[name]}"
            for name in known
            if name in wrong or name in given
        ]
        error.hint = " ".join([f"cwtrain emulator faults add {target} {kind}", *words])  # type: ignore[attr-defined]
    return error


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
