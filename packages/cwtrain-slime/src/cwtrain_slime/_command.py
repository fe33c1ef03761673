"""``cwtrain slime check`` and its sister of miles, made from the dialect. Only click is imported before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cwtrain.cli._context import Command, Context, pass_context

if TYPE_CHECKING:
    from cwtrain_slime._dialect import Dialect

__all__ = ["trainer_group"]


def trainer_group(dialect: Dialect) -> click.Group:
    """Return the group of commands of one trainer."""
    name = dialect.name

    @click.group(name, help=f"Prepare a run of {name} that publishes to a deployment.")
    def group() -> None:
        pass

    group.add_command(_check_command(dialect))
    return group


def _check_command(dialect: Dialect) -> click.Command:
    name = dialect.name

    @click.command(
        "check",
        cls=Command,
        example=f'cwtrain {name} check "${{ARGS[@]}}"',
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    )
    @click.option(
        "--publish-base",
        "with_base",
        is_flag=True,
        help="Upload and hot-load --hf-checkpoint now, ahead of the run.",
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="ARGS...")
    @pass_context
    def check(ctx: Context, *, with_base: bool, words: tuple[str, ...]) -> None:
        from cwtrain_slime._check import check_run

        if not words:
            raise click.UsageError(f"give the flags that {name} is launched with", click.get_current_context())
        with ctx.out.progress() as progress:
            report = check_run(
                dialect, words, environ=_environ(ctx), client=ctx.client, with_base=with_base, on_progress=progress
            )
        for found in report.findings:
            ctx.out.say(f"{found.level.value}: {found.message} [{found.name}]\n  fix: {found.fix}")
        if ctx.out.format == "table":
            ctx.out.data([found.to_json() for found in report.findings], columns=("level", "name", "message", "fix"))
        else:
            ctx.out.data(report.to_json(), ids=[found.name for found in report.findings])
        if not report.ok:
            click.get_current_context().exit(1)

    check.help = f"""Find what will not work, or will be ignored, in a run of {name}, before a GPU is rented.

    ARGS are the flags that {name} is launched with (the whole launch line will do), and the environment is the one of
    the run. Needs neither {name} nor a GPU. Looks at the flags, the settings, the base checkpoint, the disks, the
    deployment, the bucket, the published base and two answers of the endpoint. Exit code 0 when there is no error among
    the findings; warnings are no errors. Each finding has its line in the how-to page.
    """
    return check


def _environ(ctx: Context) -> dict[str, Any]:
    """Return the environment with a token that was given as an option."""
    import os

    environ = dict(os.environ)
    if ctx.token:
        environ["COREWEAVE_API_TOKEN"] = ctx.token
    return environ
