"""The group ``emulator`` of the command line: it imports a command's module when the command is asked for."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["emulator_group"]

_HOMES = {
    "env": "cwtrain_emulator._control_command:env_command",
    "faults": "cwtrain_emulator._control_command:faults_group",
    "reset": "cwtrain_emulator._control_command:reset_command",
    "serve": "cwtrain_emulator._command:serve_command",
    "start": "cwtrain_emulator._command:start_command",
    "status": "cwtrain_emulator._control_command:status_command",
    "stop": "cwtrain_emulator._control_command:stop_command",
}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return None
        module, _, name = _HOMES[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


emulator_group = _Group("emulator", help="Run Dedicated Inference on this machine.")
