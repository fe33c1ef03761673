"""``cwtrain gateway``: create, look at and delete gateways."""

from __future__ import annotations

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._group import LazyGroup
from cwtrain.cli._options import TEXT, load_spec, spec_option, timeout_option, wait_option
from cwtrain.cli._resources import create_resource, delete_resource, found_id, status_lines
from cwtrain.errors import CWTrainError
from cwtrain.infra._find import find_one

__all__ = ["gateway"]

_COLUMNS = ("id", "name", "status", "zones", "endpoints")


@click.group(cls=LazyGroup, no_args_is_help=False)
def gateway() -> None:
    """Create, look at and delete gateways.

    A gateway is the endpoint in front of deployments.
    """


@gateway.command(cls=Command, example="cwtrain gateway create --file gateway.json --wait")
@spec_option("gateway's spec")
@wait_option("Wait until the gateway is READY.")
@timeout_option(600, "Seconds to wait with --wait.")
@pass_context
def create(ctx: Context, file: str, wait: bool, timeout: float) -> None:
    """Create a gateway from a spec and print it. Values that still are a <placeholder> are refused."""
    from cwtrain.infra import lifecycle
    from cwtrain.infra._wire import gateway_to_json

    spec = load_spec(file)
    with ctx.client() as client:
        created, stays = create_resource(ctx, "gateway", spec, client.create_gateway, "stays")
        if wait:
            try:
                created = lifecycle.wait_for_gateway(
                    client, created.id, timeout=timeout, on_progress=status_lines(ctx, "gateway", created.id)
                )
            except CWTrainError as exc:
                exc.add_note(stays)
                raise
    ctx.all_done()
    ctx.out.data(gateway_to_json(created), ids=[created.id])


@gateway.command(cls=Command, example="cwtrain gateway get my-gateway")
@click.argument("name_or_id", type=TEXT)
@pass_context
def get(ctx: Context, name_or_id: str) -> None:
    """Print a gateway, found by its id or its name."""
    from cwtrain.infra._wire import gateway_to_json

    with ctx.client() as client:
        found = find_one("gateway", name_or_id, client.get_gateway, client.list_gateways)
    ctx.out.data(gateway_to_json(found), ids=[found.id])


@gateway.command(cls=Command, example="cwtrain gateway wait my-gateway")
@click.argument("name_or_id", type=TEXT)
@timeout_option(600, "Seconds to wait.")
@pass_context
def wait(ctx: Context, name_or_id: str, timeout: float) -> None:
    """Wait until a gateway is READY and print it, as `create --wait` does; nothing is created or changed."""
    from cwtrain.infra import lifecycle
    from cwtrain.infra._wire import gateway_to_json

    with ctx.client() as client:
        gateway_id = found_id(
            ctx, "gateway", name_or_id, lambda name: find_one("gateway", name, client.get_gateway, client.list_gateways)
        )
        ready = lifecycle.wait_for_gateway(
            client, gateway_id, timeout=timeout, on_progress=status_lines(ctx, "gateway", gateway_id)
        )
    ctx.all_done()
    ctx.out.data(gateway_to_json(ready), ids=[ready.id])


@gateway.command("list", cls=Command, example="cwtrain --output table gateway list")
@pass_context
def list_(ctx: Context) -> None:
    """Print all gateways."""
    from cwtrain.infra._wire import gateway_to_json

    with ctx.client() as client:
        found = client.list_gateways()
    ctx.out.data([gateway_to_json(one) for one in found], ids=[one.id for one in found], columns=_COLUMNS)


@gateway.command(cls=Command, example="cwtrain gateway delete 7be1... --wait")
@click.argument("name_or_id", type=TEXT)
@wait_option("Wait until it is gone; one that deployments still use is tried again until the timeout.")
@timeout_option(600, "Seconds to wait with --wait.")
@click.option("--ignore-not-found", is_flag=True, help="Succeed when there is no such gateway.")
@pass_context
def delete(ctx: Context, name_or_id: str, wait: bool, timeout: float, ignore_not_found: bool) -> None:
    """Delete a gateway and print {id, result}: deleting, deleted (with --wait) or not_found."""
    from cwtrain.infra import lifecycle

    with ctx.client() as client:
        delete_resource(
            ctx,
            "gateway",
            name_or_id,
            find=lambda name: find_one("gateway", name, client.get_gateway, client.list_gateways),
            delete=client.delete_gateway,
            delete_and_wait=lambda found: lifecycle.delete_gateway(
                client, found, timeout=timeout, on_progress=status_lines(ctx, "gateway", found)
            ),
            wait=wait,
            ignore_not_found=ignore_not_found,
        )


@gateway.command(cls=Command, example="cwtrain gateway parameters")
@pass_context
def parameters(ctx: Context) -> None:
    """Print where gateways can be made."""
    with ctx.client() as client:
        ctx.out.data(client.get_gateway_parameters())
