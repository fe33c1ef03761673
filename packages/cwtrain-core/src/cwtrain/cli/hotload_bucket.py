"""``cwtrain hotload gc``, ``chain`` and ``resume-info``: what lies in a deployment's bucket, and what of it is used."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._options import TEXT, deployment_option
from cwtrain.cli._output import is_terminal
from cwtrain.models.text import size

if TYPE_CHECKING:
    from cwtrain.hotload.retention import Doomed
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import HotLoad

__all__ = ["chain", "gc", "resume_info"]


@click.command(cls=Command, example="cwtrain hotload gc --deployment 2f3c... --keep 20")
@deployment_option(help="A deployment with the bucket and prefix to look at.")
@click.option(
    "--keep", type=click.IntRange(min=0), required=True, metavar="N", help="How many COMPLETED ones each keeps."
)
@click.option("--yes", is_flag=True, help="Remove what is listed. Needs s3:DeleteObject.")
@pass_context
def gc(ctx: Context, deployment_id: str, keep: int, yes: bool) -> None:
    """List or remove snapshots that nothing needs.

    They are listed; with --yes they are removed.

    Needed is what any deployment with this bucket and prefix serves, the last N that it COMPLETED, each run's baseline,
    what lies at a deployment's model.path, everything that these stand on, and what may still be on its way. If
    anything needed cannot be read, nothing is removed.
    """
    from cwtrain.hotload.retention import delete_snapshots, plan_retention, sharing

    with ctx.client() as client:
        loader = ctx.loader(client, deployment_id)
        deployment_id = loader.deployment_id
        store, location = loader.store, loader.location
        deployments = list(client.list_deployments())
        hot_loads = {one.id: list(client.list_hot_loads(one.id)) for one in sharing(deployments, location)}
        hot_loads.setdefault(deployment_id, list(client.list_hot_loads(deployment_id)))
        plan = plan_retention(
            store,
            location,
            deployments=deployments,
            hot_loads=hot_loads,
            keep=keep,
            now=dt.datetime.now(dt.UTC),
        )
        removed = 0

        def told(one: Doomed) -> None:
            nonlocal removed
            removed += 1
            ctx.out.say(f"removed {one.identity} ({removed} of {len(plan.doomed)})")

        if yes:
            ctx.still_running("what was removed is gone; the same command goes on where this one stopped")
            delete_snapshots(store, location, plan.doomed, on_deleted=told)
            ctx.all_done()
    if plan.doomed and not yes:
        ctx.out.say(f"{len(plan.doomed)} snapshots, {size(plan.size_bytes)}, can be removed: add --yes to do it")
    live = dict(sorted(plan.live.items()))
    data = {
        "uri": f"s3://{location.bucket}/{location.root}",
        "keep": keep,
        "deployments": sorted(hot_loads),
        "removed": yes,
        "bytes": plan.size_bytes,
        "doomed": [_doomed(one) for one in plan.doomed],
        "live": live,
    }
    ctx.out.data(
        data,
        ids=[one.identity for one in plan.doomed],
        columns={"doomed": ("identity", "bytes", "objects", "whole", "run_id?")},
        table={**data, "live": [{"identity": one, "needed because": why} for one, why in live.items()]},
    )


def _doomed(one: Doomed) -> dict[str, Any]:
    return {
        "identity": one.identity,
        "run_id": one.run_id,
        "bytes": one.size_bytes,
        "objects": len(one.keys),
        "whole": one.whole,
    }


@click.command(cls=Command, example="cwtrain hotload chain --deployment 2f3c...")
@deployment_option()
@pass_context
def chain(ctx: Context, deployment_id: str) -> None:
    """Show the chain that a deployment serves.

    The full snapshot and the deltas on it, each with its size in the bucket; on a terminal it is drawn, too.
    """
    from cwtrain.hotload.served_chain import chain_report, draw_chain

    with ctx.client() as client:
        loader = ctx.loader(client, deployment_id)
        deployment_id = loader.deployment_id
        report = chain_report(loader.store, loader.location, deployment_id, _hot_loads(client, deployment_id))
    for warning in report.warnings:
        ctx.out.say(f"warning: {warning}")
    if is_terminal():
        for line in draw_chain(report):
            ctx.out.say(line)
    columns = {"links": ("identity", "kind", "size_bytes", "objects", "tensors", "previous_identity?", "hot_load_id?")}
    ctx.out.data(report.to_json(), ids=[link.identity for link in report.links], columns=columns)


@click.command("resume-info", cls=Command, example="cwtrain hotload resume-info --run grpo-7b")
@click.option("--run", "run_id", type=TEXT, required=True, help="The run's id (CWTRAIN_HOTLOAD_RUN_ID).")
@click.option(
    "--deployment",
    "deployment_id",
    type=TEXT,
    metavar="ID",
    # Not from the environment: what the trainer there publishes to says nothing about where this run did.
    help="Id of the deployment; without it all deployments are looked at.",
)
@pass_context
def resume_info(ctx: Context, run_id: str, deployment_id: str | None) -> None:
    """Show what a run has published.

    And what a publisher with this run id does when it is started again. Without --deployment, those whose bucket cannot
    be read are named under "not_looked_at"; where nothing is found then, it is an error.
    """
    from cwtrain.config.hotload import clean_run_id
    from cwtrain.errors import ConfigError, CWTrainError
    from cwtrain.hotload import resume

    try:
        run = clean_run_id(run_id)
    except ConfigError as error:
        raise click.BadParameter(error.message, click.get_current_context(), param_hint="'--run'") from error
    with ctx.client() as client:
        deployment_id = ctx.deployment_id(client, deployment_id) if deployment_id else None
        wanted = [deployment_id] if deployment_id else [one.id for one in client.list_deployments() if one.hot_load]
        found = []
        refused: list[tuple[str, CWTrainError]] = []
        for one in wanted:
            try:
                loader = ctx.loader(client, one)
                info = resume.resume_info(loader.store, loader.location, run, one, _hot_loads(client, one))
            except CWTrainError as error:
                if deployment_id:
                    raise
                refused.append((one, error))  # somebody else's, perhaps: the run may be in one that can be read
                continue
            if info.versions or info.epochs or deployment_id:
                found.append(info)
    if refused and not found:
        unread, reason = refused[0]
        more = f" ({len(refused) - 1} more could not be read either)" if refused[1:] else ""
        ctx.out.say(f"nothing of run {run} where it could be looked for; not looked at: deployment {unread}{more}")
        raise reason
    for unread, reason in refused:
        ctx.out.say(f"warning: not looked at: deployment {unread}: {reason.message}")
    for info in found:
        ctx.out.say(f"{info.deployment_id}: {info.advice}")
    if not found:
        ctx.out.say(f"no deployment has anything of run {run}")
    data = {
        "run_id": run,
        "deployments": [info.to_json() for info in found],
        "not_looked_at": [{"deployment_id": unread, "error": reason.message} for unread, reason in refused],
    }
    ctx.out.data(data, ids=[one.identity for info in found for one in info.versions])


def _hot_loads(client: InferenceClient, deployment_id: str) -> list[HotLoad]:
    return list(client.list_hot_loads(deployment_id))
