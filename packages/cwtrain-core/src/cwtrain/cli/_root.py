"""The root of the command line: global options and the table of core's commands."""

from __future__ import annotations

import json
from typing import Any

import click

from cwtrain.cli._context import GlobalOptions, global_options, offer_output
from cwtrain.cli._group import RootGroup

__all__ = ["root"]


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(json.dumps({"cwtrain-core": version("cwtrain-core")}, indent=2))
        ctx.exit()


@click.group(
    cls=RootGroup,
    name="cwtrain",
    lazy={
        "deployment": "cwtrain.cli.deployment:deployment",
        "gateway": "cwtrain.cli.gateway:gateway",
        "hotload": "cwtrain.cli.hotload:hotload",
        "snapshot": "cwtrain.cli.snapshot:snapshot",
        "plugins": "cwtrain.cli.plugins:plugins",
        "doctor": "cwtrain.cli.doctor:doctor",
        "completion": "cwtrain.cli.completion:completion",
    },
    about={
        "deployment": "Create, look at, change and delete deployments.",
        "gateway": "Create, look at and delete gateways.",
        "hotload": "Check, publish and follow snapshots of weights.",
        "snapshot": "Make, apply, convert, verify and show snapshots on disk.",
        "plugins": "Look at installed plugins.",
        "doctor": "Report what is installed, set and reachable.",
        "completion": "Print the completion script of a shell.",
    },
    # No name of an integration is known here but for what to install: the aliases of cwtrain.integrations do the same.
    elsewhere={
        "demo": "demo",
        "emulator": "emulator",
        "miles": "miles",
        "rollout": "rollout",
        "slime": "slime",
    },
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
    no_args_is_help=False,
)
@click.pass_context
def root(ctx: click.Context, /, **_: Any) -> None:
    """Publish RL training weights to CoreWeave Dedicated Inference, and manage what serves them.

    Standard output is data, JSON by default; progress, logs and errors go to standard error. Exit codes: 0 done, 1 the
    operation failed, 2 wrong usage or configuration, 130 interrupted, 143 terminated.
    """
    ctx.ensure_object(GlobalOptions)
    offer_output(ctx)


root.params.extend(global_options())
root.params.append(
    click.Option(
        ("--version",),
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_version,
        help="Print the version and exit.",
    )
)
